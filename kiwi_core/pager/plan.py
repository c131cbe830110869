"""Plans what an operation does with a session: from a look to steps, or a refusal. Pure.

A page-out first stops all processes (``stop``), then moves out what libraries own
(``libraries_out``) and what the driver must move (``driver_out``). The driver takes a process with
Kiwi's library only while the gate is shut: a synchronise call in between would kill it. A page-in
goes the other way (``libraries_in``, ``driver_in``, ``unlock``, ``libraries_in`` again,
``open_gates``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.pager.ending import Stop, lost, refusal
from kiwi_core.pager.linked import LibraryStep, all_out
from kiwi_core.states import NOT_FREE, MovedBy, Reason, Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kiwi_core.config import Config
    from kiwi_core.gpu.host import Shortage
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.linked import LinkedProcess
    from kiwi_core.pager.look import SessionLook, SessionProcess

DriverStep = Literal["lock", "checkpoint", "restore", "unlock"]

Verb = LibraryStep | DriverStep

INVERSE: Final[dict[Verb, Verb]] = {
    "shut": "open",
    "open": "shut",
    "lock": "unlock",
    "unlock": "lock",
    "page-out": "page-in",
    "page-in": "page-out",
    "checkpoint": "restore",
    "restore": "checkpoint",
}


@dataclass(frozen=True)
class PlanStep:
    verb: Verb
    process: SessionProcess

    @property
    def library(self) -> LinkedProcess:
        assert self.process.library is not None
        return self.process.library


# --- out -----------------------------------------------------------------------------------------


def stop(look: SessionLook) -> list[PlanStep]:
    """Shut the gates that are open, and lock what has none."""
    shut = [PlanStep("shut", one) for one in look if _by_library(one, Residency.RESIDENT)]
    return shut + [PlanStep("lock", one) for one in _of_driver(look) if _runs(one)]


def libraries_out(look: SessionLook) -> list[PlanStep]:
    """Move out what libraries own. One that was out at its last report, perhaps to an earlier
    daemon, may be paging in: it is asked, too, because the driver must not move it meanwhile."""
    own = [one for one in look if one.backend is MovedBy.INPROCESS]
    return [PlanStep("page-out", one) for one in own if was_out(one) or _owns_something_in(one)]


def was_out(process: SessionProcess) -> bool:
    library = process.library
    out = process.reported is Residency.PAGED_OUT
    return out and library is not None and not library.connected


def driver_part(look: SessionLook) -> list[SessionProcess]:
    """Return what the driver has to move out: what has no library, and what is only gated. Raises
    ``Stop`` if the driver does not report a state of that."""
    left = [one for one in look if one.backend is MovedBy.INPROCESS]
    gated = [one for one in left if one.gate_only or _yields(one)]
    for one in gated:
        if one.error is not None:
            raise Stop(refusal(one.error, one.ref.pid)) from one.error
    in_gpu = (CheckpointState.RUNNING, CheckpointState.LOCKED)
    return [one for one in (*_of_driver(look), *gated) if one.state in in_gpu and not one.empty]


def driver_out(look: SessionLook) -> list[PlanStep]:
    """Let the driver move out its part, now that all are stopped, and nothing whose gate is open
    again. Libraries that own some of it yield first."""
    those = [one for one in driver_part(look) if not _by_library(one, Residency.RESIDENT)]
    return [PlanStep("yield", one) for one in those if _yields(one)] + take(those)


def rest_out(look: SessionLook, least_bytes: int = -1) -> list[PlanStep]:
    """Make libraries yield to the driver, which moves what they have left in the GPU, where that is
    more than ``least_bytes``: contexts, and what they cannot own."""
    return [
        PlanStep("yield", one)
        for one in look
        if one.backend is MovedBy.INPROCESS and one.library is not None and one.library.owns
        if one.library.report.unowned_bytes > least_bytes and _runs(one) and not one.empty
    ]


def take(those: Sequence[SessionProcess]) -> list[PlanStep]:
    """Let the driver take processes: lock those that run, and move out all."""
    lock = [PlanStep("lock", one) for one in those if _runs(one)]
    return lock + [PlanStep("checkpoint", one) for one in those]


def comparable(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Return the page-outs to come of libraries that have all in the GPU: what these report
    afterwards is what the GPU must have gained."""
    return [step for step in steps if step.process.reported is not Residency.PAGED_OUT]


def gains(
    out: Sequence[PlanStep], before: SessionLook, after: SessionLook
) -> list[tuple[LinkedProcess, int]]:
    """Return how much less NVML counts for processes whose libraries have moved out all that they
    own, since they were stopped. Where NVML names no processes, nobody can tell."""
    had = {one.ref: one.row_bytes for one in before}
    has = {one.ref: one.row_bytes for one in after}
    known = [(step.library, had.get(step.process.ref), has.get(step.process.ref)) for step in out]
    return [(library, a - b) for library, a, b in known if a is not None and b is not None]


def taken(look: SessionLook) -> list[SessionProcess]:
    """Return the processes of which the driver has what libraries had left in the GPU, while these
    still have out what they own."""
    held = (CheckpointState.LOCKED, CheckpointState.CHECKPOINTED)
    return [
        one
        for one in look
        if one.state in held and one.error is None and not one.stopped
        if one.library is not None and one.library.owns and one.reported is Residency.PAGED_OUT
    ]


def residues(look: SessionLook) -> SessionLook:
    """Return what the driver has ``taken`` as a look of its own, in which no library is ordered
    anything."""
    return replace(look, processes=tuple(replace(one, library=None) for one in taken(look)))


def end_yields(look: SessionLook) -> list[PlanStep]:
    """Have libraries that are out do the page-out that they have done: nothing moves, and they know
    that the driver has let go of their processes."""
    return [
        PlanStep("page-out", one)
        for one in look
        if _by_library(one, Residency.PAGED_OUT) and one.library is not None
        if one.library.owns and one.library.connected
    ]


def may_be_cleared(look: SessionLook) -> bool:
    """Return whether all libraries of a session have out what they own: then the driver may take
    what they left in the GPU. Otherwise it is being paged in."""
    libraries = [one.library for one in look if one.library is not None]
    return bool(libraries) and all(map(all_out, libraries))


# --- in ------------------------------------------------------------------------------------------


def libraries_in(look: SessionLook) -> list[PlanStep]:
    return [PlanStep("page-in", one) for one in look if _by_library(one, Residency.PAGED_OUT)]


def driver_in(look: SessionLook) -> list[PlanStep]:
    out = [one for one in _of_driver(look) if one.state is CheckpointState.CHECKPOINTED]
    return [PlanStep("restore", one) for one in out]


def unlock(look: SessionLook) -> list[PlanStep]:
    """Unlock what the driver holds, once nothing is out (``driver_in``)."""
    held = (CheckpointState.CHECKPOINTED, CheckpointState.LOCKED)
    return [PlanStep("unlock", one) for one in _of_driver(look) if one.state in held]


def open_gates(look: SessionLook) -> list[PlanStep]:
    return [PlanStep("open", one) for one in look if _by_library(one, Residency.SUSPENDED)]


def is_owned(look: SessionLook) -> bool:
    """Return whether libraries own and move all memory of the session."""
    known = [one for one in look if one.library or not one.unknown]
    return bool(known) and all(
        one.library
        and one.library.connected
        and one.library.owns
        and not one.library.yields
        and one.residency not in NOT_FREE
        for one in known
    )


# --- refusals ------------------------------------------------------------------------------------


def check(look: SessionLook) -> None:
    """Raise ``Stop`` if a process of the session does not run, or the driver gives no state of one
    that it must move."""
    for one in look:
        if one.stopped:
            raise Stop(Refused(Reason.STOPPED, f"Process {one.ref.pid} is {one.stopped}."))
        if one.error is not None and one.backend is MovedBy.CHECKPOINT:
            raise Stop(refusal(one.error, one.ref.pid)) from one.error


def check_lost(look: SessionLook) -> None:
    for one in look:
        if one.error is None and one.residency is Residency.LOST:
            raise Stop(lost(one.ref.pid))
        if one.reported is Residency.LOST:
            raise Stop(Lost(f"The GPU memory of process {one.ref.pid} was lost earlier."))


# The text has no figure: the user would get a notice at each change of it.
_FULL: Final = Refused(
    Reason.NO_ROOM,
    "The GPU is full to the last megabytes, and the driver needs some tens of MiB of free GPU "
    "memory to move a program's memory out. Free some GPU memory (in PyTorch: "
    "torch.cuda.empty_cache()), or end a program that uses the GPU; Kiwi tries again.",
)


def refusal_of_full(gpu: GpuLook, total_bytes: int, config: Config) -> Refused | None:
    """Return a refusal if hardly any GPU memory is free: a checkpoint could fail.

    With less than 2 MiB free, an H200 (driver 580.159.04) answered OUT_OF_MEMORY after 4 s. The
    program went on unharmed, but from then on each checkpoint of it was answered with UNKNOWN,
    however much was free. With about 65 MiB free it moved a process out.
    """
    share_bytes = total_bytes // config.checkpoint_room_share
    left_bytes = min(config.checkpoint_room_bytes, share_bytes)
    # Half of what the library leaves free: it measures in another way and rounds to blocks.
    return _FULL if gpu.free_bytes is not None and gpu.free_bytes < left_bytes // 2 else None


def refusal_elsewhere(
    taken: Collection[SessionProcess], users_elsewhere: dict[int, str]
) -> Refused | None:
    """Return a refusal if one of ``taken`` uses another GPU, too."""
    for one in taken:
        if one.row_bytes is not None and (other := users_elsewhere.get(one.ref.pid)):
            detail = (
                f"Process {one.ref.pid} uses {other} too; Kiwi moves processes of one GPU only."
            )
            return Refused(Reason.UNSUPPORTED, detail)
    return None


def ram_bytes(
    taken: Collection[SessionProcess],
    gpu: GpuLook,
    total_bytes: int,
    learnt: Mapping[ProcessRef, int],
) -> int:
    """Return the RAM that ``taken`` need. Where NVML cannot name its users (a PID namespace), use
    what each had at its last page-out (``learnt``), or else the most that they can have
    together."""
    named_bytes = sum(one.row_bytes or 0 for one in taken)
    nameless = [one.ref for one in taken if one.row_bytes is None]
    if not nameless or gpu.names_users:
        return named_bytes
    if all(ref in learnt for ref in nameless):
        return named_bytes + sum(learnt[ref] for ref in nameless)
    used_bytes = total_bytes - (gpu.free_bytes or 0)
    return named_bytes + max(0, used_bytes - sum(gpu.bytes_by_pid.values()))


def refusal_for_ram(
    need_bytes: int, available_bytes: int, own: Shortage | None, any_: Shortage | None
) -> Refused | None:
    """Return a refusal if system RAM, or a control group, cannot take ``need_bytes``. ``own`` is
    what the processes' own group lacks, ``any_`` what one lacks that holds for others, too."""
    if not need_bytes or available_bytes >= need_bytes:
        return None
    detail = (
        f"{format_bytes(need_bytes)} would have to go to system RAM, which has "
        f"{format_bytes(available_bytes)} left for it."
    )
    if own or any_:
        detail += f" In its control group, {own or any_}."
    return Refused(Reason.NO_JOB_MEMORY if own else Reason.NO_HOST_MEMORY, detail)


def more_ram_bytes(look: SessionLook) -> int:
    """Return the RAM that its libraries need beyond what they have in reserve."""
    reports = [one.library.report for one in look if one.library is not None]
    reserve_bytes = sum(max(0, one.arena_bytes - one.paged_out_bytes) for one in reports)
    return max(0, sum(one.resident_bytes for one in reports) - reserve_bytes)


def with_shortage(refused: Refused, lacking: Shortage | None) -> Refused:
    """Return a library's refusal for RAM with the true reason, if the own control group of its
    process is too small: a library sees only that it gets no more."""
    if lacking is None:
        return refused
    detail = f"{refused.detail.removesuffix('.')}. In its control group, {lacking}."
    return Refused(Reason.NO_JOB_MEMORY, detail)


# --- inside --------------------------------------------------------------------------------------


def _of_driver(look: SessionLook) -> list[SessionProcess]:
    """Return what only the driver can move, as far as it has reported a state."""
    return [
        one for one in look if one.backend is MovedBy.CHECKPOINT and not (one.empty or one.error)
    ]


def _by_library(process: SessionProcess, residency: Residency) -> bool:
    return process.backend is MovedBy.INPROCESS and process.reported is residency


def _runs(process: SessionProcess) -> bool:
    return process.state is CheckpointState.RUNNING


def _yields(process: SessionProcess) -> bool:
    """Return whether the driver moves what its library owns, unless the library has it out."""
    library = process.library
    return library is not None and library.yields and not _by_library(process, Residency.PAGED_OUT)


def _owns_something_in(process: SessionProcess) -> bool:
    library = process.library
    if library is None or not library.owns or _yields(process):
        return False
    has_in = library.connected and library.report.resident_bytes > 0
    return has_in or process.reported is not Residency.PAGED_OUT
