"""The checkpoint pager against a scripted driver and GPU: answers that neither a real nor an
emulated driver can be talked into, such as doing the work and then reporting a failure."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from blocking import Blocking, Loop
from contract import moved, refused, soon_ns

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import claims, host, processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.nvml import UtilisationSample
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.gpu.results import cuda_error
from kiwi_core.movers.errors import died, hung
from kiwi_core.pager.api import Lost, Target
from kiwi_core.pager.checkpoint import moving, ports
from kiwi_core.pager.checkpoint import room as room_module
from kiwi_core.pager.checkpoint.fitness import Kind, Unfit
from kiwi_core.pager.checkpoint.pager import CheckpointPager
from kiwi_core.pager.checkpoint.ports import Stop
from kiwi_core.pager.checkpoint.room import Footprints, GpuRoom, Reservation
from kiwi_core.pager.checkpoint.survey import UsageMeter
from kiwi_core.states import Reason, Residency
from kiwi_core.units import GIB, MIB, SessionId

RUNNING, LOCKED = CheckpointState.RUNNING, CheckpointState.LOCKED
OUT, FAILED = CheckpointState.CHECKPOINTED, CheckpointState.FAILED
UNDER_WAY, BACK_UNDER_WAY = CheckpointState.CHECKPOINTING, CheckpointState.RESTORING
CONFIG = replace(DEFAULTS, room_wait_ns=50_000_000)

MOVES = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, OUT),
    "restore": (OUT, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


class Machine:
    """A GPU, a driver and processes, as scripted. Process 1 is the session's root, the others in
    ``sizes`` are its children. ``errors[call, pid]`` are met one by one; a fault is either a
    result code, or a function that may do the work before it returns one (0: none)."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {int(name[1:]): size for name, size in sizes.items()}
        self.total = 100 * MIB
        self.outside = 0
        self.nameless = 0
        """What is taken of the GPU without NVML naming anybody."""
        self.claims: list[Sequence[int]] = []
        self.names = True
        self.states = dict.fromkeys(self.sizes, RUNNING)
        self.unlisted: set[int] = set()
        self.elsewhere: dict[int, str] = {}
        self.faults: dict[tuple[str, int], list[int | Callable[[], int]]] = defaultdict(list)
        self.calls: list[str] = []
        self.nvml_fails = False
        self.now_samples: tuple[UtilisationSample, ...] | None = ()

    # The driver.

    async def checkpoint_state(self, pid: int) -> CheckpointState:
        self._fault("state", pid)
        return self.states.get(pid, CheckpointState.NOT_A_CUDA_PROCESS)

    async def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._move("lock", pid)

    async def checkpoint(self, pid: int, within_s: float) -> None:
        assert within_s > 0
        self._move("checkpoint", pid)

    async def restore(self, pid: int, within_s: float) -> None:
        self._move("restore", pid)

    async def unlock(self, pid: int) -> None:
        self._move("unlock", pid)

    def _move(self, call: str, pid: int) -> None:
        self.calls.append(f"{call} {pid}")
        self._fault(call, pid)
        before, after = MOVES[call]
        if self.states.get(pid) is not before:
            raise cuda_error(f"{call} of {pid}", 401)
        self.states[pid] = after

    def _fault(self, call: str, pid: int) -> None:
        if not self.faults[call, pid]:
            return
        fault = self.faults[call, pid].pop(0)
        number = fault if isinstance(fault, int) else fault()
        if number:
            raise cuda_error(f"{call} of {pid}", number)

    # The GPU.

    async def free_bytes(self) -> int:
        self._check_nvml()
        return self.total - self.outside - self.nameless - sum(self._resident().values())

    def total_bytes(self) -> int:
        return self.total

    async def names_users(self) -> bool:
        return self.names

    async def bytes_by_pid(self) -> dict[int, int]:
        self._check_nvml()
        outside = {99: self.outside} if self.outside else {}
        return outside | {p: s for p, s in self._resident().items() if p not in self.unlisted}

    async def users_elsewhere(self) -> dict[int, str]:
        return self.elsewhere

    async def claimed_restore(self, pid: int, claims_bytes: Sequence[int], within_s: float) -> None:
        self.claims.append(claims_bytes)
        if await self.free_bytes() < min(claims_bytes):
            raise GpuError(claims.NO_ROOM, "no room")
        await self.restore(pid, within_s)

    async def samples(self, since_us: int) -> tuple[UtilisationSample, ...] | None:
        if self.now_samples is None:
            return None
        return tuple(s for s in self.now_samples if s.time_us > since_us)

    def _resident(self) -> dict[int, int]:
        gone = (OUT, BACK_UNDER_WAY, FAILED)
        return {p: s for p, s in self.sizes.items() if self.states.get(p, OUT) not in gone}

    def _check_nvml(self) -> None:
        if self.nvml_fails:
            raise GpuError("nvml-gpu-lost", "The GPU is gone.", driver_code=15)

    def does(self, pid: int, state: CheckpointState, number: int) -> Callable[[], int]:
        """A call that leaves the process in ``state`` and then reports ``number``."""

        def act() -> int:
            self.states[pid] = state
            return number

        return act

    def dies(self, pid: int, number: int) -> Callable[[], int]:
        def act() -> int:
            del self.states[pid]
            return number

        return act


TARGET = Target(SessionId("s"), ProcessRef(1, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(p1=10 * MIB, p2=20 * MIB)
    living = machine.states

    def tree(root: ProcessRef, _without: object = ()) -> tuple[ProcessRef, ...]:
        return tuple(ProcessRef(pid, 0) for pid in living) if root.pid in living else ()

    monkeypatch.setattr(processes, "tree", tree)
    monkeypatch.setattr(processes, "alive", lambda ref: ref.pid in living)
    monkeypatch.setattr(processes, "ref_of", lambda _pid: None)
    monkeypatch.setattr(ports, "may_control", lambda _pid: True)
    monkeypatch.setattr(moving, "may_control", lambda _pid: True)
    return machine


@pytest.fixture
def pager(machine: Machine) -> CheckpointPager:
    return new_pager(machine)


LOOP = Loop()


def new_pager(machine: Machine, **more: object) -> CheckpointPager:
    """Its calls block."""
    pager = CheckpointPager(
        machine,
        machine,
        CONFIG,
        **{"host_available_bytes": lambda _pids: 1 << 50, **more},  # type: ignore[arg-type]
    )
    return Blocking(pager, LOOP)  # type: ignore[return-value]


# --- it failed in reporting, not in doing --------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "after"), [("lock", LOCKED), ("checkpoint", OUT), ("restore", LOCKED)]
)
def test_work_that_was_done_counts(
    machine: Machine, pager: CheckpointPager, call: str, after: CheckpointState
) -> None:
    machine.faults[call, 2] = [machine.does(2, after, 600 if call == "lock" else 999)]
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert set(machine.states.values()) == {RUNNING}


def test_an_unlock_that_was_done_counts(machine: Machine, pager: CheckpointPager) -> None:
    machine.faults["unlock", 1] = [machine.does(1, RUNNING, 999)]
    moved(pager.suspend(TARGET, soon_ns()))
    moved(pager.resume(TARGET, soon_ns()))


def test_an_unlock_is_tried_once_more_and_then_refused(
    machine: Machine, pager: CheckpointPager
) -> None:
    moved(pager.suspend(TARGET, soon_ns()))
    machine.faults["unlock", 1] = [999]
    moved(pager.resume(TARGET, soon_ns()))
    moved(pager.suspend(TARGET, soon_ns()))
    machine.faults["unlock", 1] = [999, 999]
    refused(pager.resume(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: LOCKED, 2: RUNNING}
    moved(pager.resume(TARGET, soon_ns()))


# --- refusals and what they leave behind ---------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (600, Reason.LOCK_TIMEOUT),
        (800, Reason.NOT_PERMITTED),
        (801, Reason.UNSUPPORTED),
        (500, Reason.UNSUPPORTED),
        (304, Reason.DRIVER),
        (999, Reason.DRIVER),
    ],
)
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_refused_page_out_lets_everybody_run(
    machine: Machine, pager: CheckpointPager, call: str, number: int, reason: Reason
) -> None:
    machine.faults[call, 2] = [number]
    refused(pager.page_out(TARGET, soon_ns()), reason)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    assert pager.export_footprints() == {}


@pytest.mark.parametrize("number", [2, 801, 719])
def test_a_refusal_that_can_have_damaged_a_process_is_not_tried_again(
    machine: Machine, pager: CheckpointPager, number: int
) -> None:
    machine.faults["checkpoint", 2] = [number]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    machine.calls.clear()
    assert refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED) == answer
    assert machine.calls == [], "the driver is not asked"
    del machine.states[2]
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT}, "the others go once it has ended"


def test_memory_that_nobody_is_named_for_has_room_claimed(
    machine: Machine, pager: CheckpointPager
) -> None:
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.claims == []
    out(machine, pager)
    machine.nameless = 45 * MIB
    moved(pager.page_in(TARGET, soon_ns()))
    first, second = machine.claims
    assert min(first) > 10 * MIB
    assert min(second) > 20 * MIB


def test_what_is_known_beforehand_is_not_tried(machine: Machine) -> None:
    why = Unfit(Kind.MANAGED, "It uses managed memory.", "Do without.")
    pager = new_pager(machine, unfit=lambda ref: why if ref.pid == 2 else None)
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert answer.detail == "It uses managed memory. Do without."
    assert machine.calls == []


def test_what_is_out_already_comes_back_whatever_is_known(machine: Machine) -> None:
    unfit: list[int] = []
    why = Unfit(Kind.MANAGED, "It uses managed memory.", "Do without.")
    pager = new_pager(machine, unfit=lambda ref: why if ref.pid in unfit else None)
    out(machine, pager)
    unfit += [1, 2]
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


@pytest.mark.parametrize(("host_mib", "fits"), [(40, True), (25, False)])
def test_room_in_the_cgroup_is_looked_for_where_nvml_names_nobody(
    machine: Machine, host_mib: int, *, fits: bool
) -> None:
    """Else the kernel would kill the process in the middle of its way out."""
    machine.names, machine.unlisted = False, {1, 2}
    asked: list[list[int]] = []

    def available(pids: Collection[int]) -> int:
        asked.append(sorted(pids))
        return host_mib * MIB

    pager = new_pager(machine, host_available_bytes=available)
    if fits:
        moved(pager.page_out(TARGET, soon_ns()))
    else:
        refused(pager.page_out(TARGET, soon_ns()), Reason.NO_HOST_MEMORY)
        assert machine.calls == []
    assert asked == [[1, 2]]


def test_a_refusal_names_the_limit_of_the_job_and_what_to_ask_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = host.Shortage(limit_bytes=GIB, needs_bytes=2 * GIB)
    monkeypatch.setattr(host, "shortage", lambda _pids, _more_bytes: lacking)
    pager = new_pager(machine, host_available_bytes=lambda _pids: 0)
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.NO_HOST_MEMORY)
    assert "ask for 2048 MiB (in Slurm: --mem=2048M)" in answer.detail


def test_what_a_process_had_the_last_time_is_what_it_is_taken_to_need(machine: Machine) -> None:
    """Not all that nobody is named for: others have some of that."""
    machine.names, machine.unlisted = False, {1, 2, 99}
    available_bytes = 100 * MIB
    pager = new_pager(machine, host_available_bytes=lambda _pids: available_bytes)
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    machine.outside = 60 * MIB
    available_bytes = 32 * MIB
    moved(pager.page_out(TARGET, soon_ns()))


def test_one_that_may_not_be_controlled(
    machine: Machine, pager: CheckpointPager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says only "OS call failed"; whose process it is tells the rest."""
    monkeypatch.setattr(ports, "may_control", lambda _pid: False)
    monkeypatch.setattr(moving, "may_control", lambda _pid: False)
    machine.faults["state", 1] = [304]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.NOT_PERMITTED)
    assert "CAP_SYS_PTRACE" in answer.detail
    machine.states.update({1: OUT, 2: OUT})
    machine.faults["restore", 1] = [304]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NOT_PERMITTED)


def test_a_machine_that_cannot_do_it(machine: Machine, pager: CheckpointPager) -> None:
    machine.faults["state", 1] = [801] * 10
    refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    seen = pager.observe(TARGET)
    assert (seen.residency, seen.resident_bytes) == (Residency.RESIDENT, 30 * MIB)


def test_nvml_that_fails_after_the_lock(machine: Machine) -> None:
    def fails(*_: object) -> None:
        machine.nvml_fails = True

    pager = new_pager(machine, remember=fails)
    machine.unlisted = {2}  # so that NVML is asked again
    refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: OUT, 2: LOCKED}, "nobody runs while a part is out"
    machine.nvml_fails = False
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_remembering_that_fails_leaves_everybody_running(machine: Machine) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        new_pager(machine, remember=fails).page_out(TARGET, soon_ns())
    assert machine.states == {1: RUNNING, 2: RUNNING}


def test_a_process_on_two_gpus_is_left_alone(machine: Machine, pager: CheckpointPager) -> None:
    machine.elsewhere = {2: "GPU-y", 77: "GPU-z"}
    assert "GPU-y" in refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED).detail
    assert machine.calls == []


def test_a_session_that_never_stops_starting_processes(
    machine: Machine, pager: CheckpointPager
) -> None:
    def one_more(pid: int) -> Callable[[], int]:
        def act() -> int:
            machine.states[pid + 1] = RUNNING
            machine.faults["lock", pid + 1] = [one_more(pid + 1)]
            return 0

        return act

    machine.faults["lock", 2] = [one_more(2)]
    refused(pager.suspend(TARGET, soon_ns()), Reason.LOCK_TIMEOUT)
    assert set(machine.states.values()) == {RUNNING}


def test_what_cannot_be_undone_is_said(machine: Machine, pager: CheckpointPager) -> None:
    machine.faults["checkpoint", 2] = [999]
    machine.faults["restore", 1] = [999]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert "stays in system RAM until it can be paged in" in answer.detail
    assert pager.observe(TARGET).residency is Residency.PAGED_OUT
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}


# --- page-in -------------------------------------------------------------------------------------


def out(machine: Machine, pager: CheckpointPager) -> None:
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT, 2: OUT}
    machine.calls.clear()


def test_nobody_runs_before_all_are_back(machine: Machine, pager: CheckpointPager) -> None:
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.calls == ["restore 1", "restore 2", "unlock 1", "unlock 2"]


def test_a_driver_that_can_try_again_after_out_of_memory(
    machine: Machine, pager: CheckpointPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 2] = [2]
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_out_of_memory_twice_is_no_room_and_nothing_has_changed(
    machine: Machine, pager: CheckpointPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 2] = [2, 2]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert machine.states == {1: OUT, 2: OUT}
    moved(pager.page_in(TARGET, soon_ns()))


def test_a_restore_that_fails_in_the_same_way_three_times_with_room_is_lost(
    machine: Machine, pager: CheckpointPager
) -> None:
    """Driver 580 answers INVALID_VALUE for ever where memory was shared."""
    out(machine, pager)
    machine.faults["restore", 1] = [1] * 10
    for _ in range(2):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    assert isinstance(pager.page_in(TARGET, soon_ns()), Lost)
    assert machine.states == {1: OUT, 2: RUNNING}, "the rest of it runs"


def test_restores_that_fail_in_different_ways_or_succeed_between_are_not_lost(
    machine: Machine, pager: CheckpointPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [1, 1, 999, 999, 0, 1, 1]
    for _ in range(4):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    moved(pager.page_in(TARGET, soon_ns()))
    out(machine, pager)
    for _ in range(2):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    moved(pager.page_in(TARGET, soon_ns()))


def test_what_a_failed_restore_keeps_is_told(machine: Machine, pager: CheckpointPager) -> None:
    """Real drivers take what is free, answer OUT_OF_MEMORY, and from then on an OS error."""
    out(machine, pager)

    def grabs() -> int:
        machine.outside = 7 * MIB
        return 2

    machine.faults["restore", 1] = [grabs, 304]
    outcome = pager.page_in(TARGET, soon_ns())
    assert isinstance(outcome, Lost)
    assert "It holds 7 MiB of GPU memory until it is restarted." in outcome.detail


def test_room_that_vanishes_half_way(machine: Machine, pager: CheckpointPager) -> None:
    out(machine, pager)

    def grab() -> int:
        machine.outside = 75 * MIB
        return 0

    machine.faults["restore", 1] = [grab]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert machine.calls == ["restore 1", "checkpoint 1"], "the second was never tried"
    machine.outside = 0
    moved(pager.page_in(TARGET, soon_ns()))


@pytest.mark.parametrize("state", [OUT, FAILED])
def test_what_can_never_come_back_is_lost_and_the_rest_runs(
    machine: Machine, pager: CheckpointPager, state: CheckpointState
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [machine.does(1, state, 304), 304]
    assert isinstance(pager.page_in(TARGET, soon_ns()), Lost)
    assert machine.states == {1: state, 2: RUNNING}


def test_lost_in_a_page_out(machine: Machine, pager: CheckpointPager) -> None:
    machine.faults["checkpoint", 2] = [machine.does(2, FAILED, 304)]
    assert isinstance(pager.page_out(TARGET, soon_ns()), Lost)
    assert machine.states == {1: RUNNING, 2: FAILED}
    assert pager.observe(TARGET).residency is Residency.LOST
    assert isinstance(pager.suspend(TARGET, soon_ns()), Lost)
    assert machine.states == {1: RUNNING, 2: FAILED}


@pytest.mark.parametrize("call", ["state", "restore", "unlock"])
def test_a_child_that_ends_meanwhile_is_no_error(
    machine: Machine, pager: CheckpointPager, call: str
) -> None:
    out(machine, pager)
    machine.faults[call, 2] = [machine.dies(2, 304)]
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING}
    assert pager.export_footprints() == {}


def test_one_that_is_out_is_not_merely_resumed(machine: Machine, pager: CheckpointPager) -> None:
    out(machine, pager)
    answer = refused(pager.resume(TARGET, soon_ns()), Reason.DRIVER)
    assert "has to be paged in" in answer.detail
    assert machine.calls == []


@pytest.mark.parametrize("left", [LOCKED, OUT])
@pytest.mark.parametrize("call", ["suspend", "resume", "page_out", "page_in"])
def test_what_a_dead_root_leaves_behind_is_let_go(
    machine: Machine,
    pager: CheckpointPager,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    left: CheckpointState,
) -> None:
    del machine.states[1]
    machine.states[2] = left
    monkeypatch.setattr(processes, "tree", lambda *_: (ProcessRef(2, 0),))
    refused(getattr(pager, call)(TARGET, soon_ns()), Reason.GONE)
    assert machine.states == {2: RUNNING}


def test_a_mixture_that_a_crash_left(machine: Machine, pager: CheckpointPager) -> None:
    machine.states.update({1: OUT, 2: LOCKED})
    pager.import_footprints({ProcessRef(1, 0): 10 * MIB})
    seen = pager.observe(TARGET)
    assert seen.residency is Residency.PAGED_OUT
    assert (seen.paged_out_bytes, seen.resident_bytes) == (10 * MIB, 20 * MIB)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
    machine.states.update({1: OUT, 2: RUNNING})
    pager.import_footprints({ProcessRef(1, 0): 10 * MIB})
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert machine.states == {1: OUT, 2: OUT}


# --- calls that were given up --------------------------------------------------------------------


def given_up(error: GpuError) -> Callable[[], int]:
    """A call of which nobody knows how it came out; the driver does not show that it is at it."""

    def act() -> int:
        raise error

    return act


DIED, HANGS = died("a call"), hung("a call", 1.0)


def test_a_checkpoint_that_was_cut_short_is_asked_for_again(
    machine: Machine, pager: CheckpointPager
) -> None:
    """The second call is answered when the first is over."""
    machine.faults["checkpoint", 1] = [given_up(DIED), machine.does(1, OUT, 401)]
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB


def test_a_restore_that_was_cut_short_is_asked_for_again(
    machine: Machine, pager: CheckpointPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [given_up(DIED), machine.does(1, LOCKED, 401)]
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert machine.states == {1: RUNNING, 2: RUNNING}


@pytest.mark.parametrize("error", [DIED, HANGS])
def test_what_goes_out_after_its_call_was_given_up_comes_back_beside_others(
    machine: Machine, pager: CheckpointPager, error: GpuError
) -> None:
    machine.faults["checkpoint", 1] = [given_up(error), given_up(error)]
    refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    machine.states[1] = OUT
    machine.outside = 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 10 * MIB
    assert pager.export_footprints() == {}


def test_what_the_session_has_elsewhere_does_not_keep_an_unknown_size_out(
    machine: Machine, pager: CheckpointPager
) -> None:
    """A library moves process 2, which is back in the GPU already."""
    machine.states.update({1: OUT, 2: RUNNING})
    target = replace(TARGET, without=frozenset({ProcessRef(2, 0)}))
    assert moved(pager.page_in(target, soon_ns())).bytes_moved == 10 * MIB


# --- states 4 and 5 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "then"), [(UNDER_WAY, OUT), (BACK_UNDER_WAY, LOCKED)])
def test_a_call_under_way_is_waited_for(
    machine: Machine, pager: CheckpointPager, state: CheckpointState, then: CheckpointState
) -> None:
    machine.states[2] = state
    refused(pager.page_in(TARGET, soon_ns(0.03)), Reason.DRIVER)
    timer = threading.Timer(0.05, machine.states.update, [{2: then}])
    timer.start()
    moved(pager.page_in(TARGET, soon_ns()))
    timer.join()
    assert machine.states == {1: RUNNING, 2: RUNNING}


def test_a_late_call_of_a_killed_caller_is_caught_up_with(
    machine: Machine, pager: CheckpointPager
) -> None:
    """Its checkpoint begins only when the new caller wants to unlock."""
    machine.states.update({1: OUT, 2: LOCKED})
    machine.faults["unlock", 2] = [machine.does(2, OUT, 401)]
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
    machine.states.update({1: LOCKED, 2: LOCKED})
    machine.faults["checkpoint", 2] = [machine.does(2, UNDER_WAY, 401)]
    timer = threading.Timer(0.05, machine.states.update, [{2: OUT}])
    timer.start()
    moved(pager.page_out(TARGET, soon_ns()))
    timer.join()
    assert machine.states == {1: OUT, 2: OUT}


# --- sizes and room ------------------------------------------------------------------------------


def test_a_process_that_nvml_does_not_list_needs_what_it_gave_up(
    machine: Machine, pager: CheckpointPager
) -> None:
    """In a PID namespace of its own, or before NVML has noticed it."""
    machine.unlisted = {1, 2}
    moved(pager.page_out(TARGET, soon_ns()))
    sizes = {ref.pid: size for ref, size in pager.export_footprints().items()}
    assert sizes == {1: 10 * MIB, 2: 20 * MIB}
    machine.outside = 67 * MIB  # the other one, 30 MiB and the margin do not fit together
    answer = refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert answer.detail == ("It needs 30 MiB of GPU memory and 8.3 MiB to spare; 33 MiB are free.")


def room(machine: Machine) -> GpuRoom:
    return GpuRoom(machine, CONFIG)


def fits(room: GpuRoom, reservation: Reservation) -> bool:
    try:
        LOOP.run(room.wait(reservation, 0, lambda: None))
    except Stop:
        return False
    return True


def test_the_margin_counts_beside_others() -> None:
    machine = Machine()
    assert fits(room(machine), Reservation(100 * MIB, [])), "what filled the GPU can come back"
    machine.outside = 10 * MIB
    assert fits(room(machine), Reservation(81 * MIB, []))
    assert not fits(room(machine), Reservation(82 * MIB, []))
    assert fits(room(machine), Reservation(90 * MIB, [99])), "its own other process is no other"


def test_the_margin_grows_with_the_need() -> None:
    machine = Machine()
    machine.total, machine.outside = 80 * 1024 * MIB, 1024 * MIB
    need = (79 * 1024 - 32) * MIB * 100 // 101
    assert fits(room(machine), Reservation(need - MIB, []))
    assert not fits(room(machine), Reservation(need + MIB, []))


@pytest.mark.parametrize(("spare_mib", "margin_mib"), [(3, 3), (20, 8), (40, 24), (1000, 268)])
def test_one_that_is_alone_has_the_margin_that_an_empty_gpu_can_spare(
    spare_mib: int, margin_mib: int
) -> None:
    """Processes take 5 MiB more than NVML says; a restore that fails is permanent."""
    machine = Machine()
    machine.total = 24 * 1024 * MIB
    shared = room(machine)

    def would_fit(need_bytes: int) -> bool:
        reservation = Reservation(need_bytes, [])
        with shared.reserved(reservation):
            return fits(shared, reservation)

    assert would_fit(0), "it has been seen empty"
    machine.sizes, machine.states = {7: 0}, {7: RUNNING}
    need_bytes = machine.total - spare_mib * MIB
    for used_mib in range(spare_mib + 1):
        machine.sizes[7] = used_mib * MIB  # somebody whom NVML does not list
        machine.unlisted = {7}
        if not would_fit(need_bytes):
            break
    left_mib = spare_mib - used_mib + 1
    assert left_mib == pytest.approx(margin_mib, abs=1)


def test_a_small_need_has_32_mib_to_spare_beside_others() -> None:
    machine = Machine()
    machine.total = 24 * 1024 * MIB
    machine.outside = machine.total - 200 * MIB
    assert fits(room(machine), Reservation(166 * MIB, []))
    assert not fits(room(machine), Reservation(167 * MIB, []))


@pytest.mark.parametrize("named", [True, False])
def test_nobody_is_known_to_be_alone_where_nvml_names_nobody(named: bool) -> None:
    """In a PID namespace: somebody whom NVML does not list uses 30 MiB of 100."""
    machine = Machine()
    machine.names = named
    shared = room(machine)

    def would_fit(need_bytes: int | None) -> bool:
        reservation = Reservation(need_bytes, [])
        with shared.reserved(reservation):
            return fits(shared, reservation)

    assert would_fit(100 * MIB), "it is as empty as it was ever seen"
    machine.sizes, machine.states = {2: 30 * MIB}, {2: RUNNING}
    machine.unlisted = {2}
    assert not would_fit(70 * MIB), "an empty GPU has more to spare"
    assert would_fit(61 * MIB)
    assert would_fit(None) is named


@pytest.mark.parametrize("halted", [True, False])
def test_what_one_that_stands_still_has_taken_does_not_count_twice(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, halted: bool
) -> None:
    """Frozen in the middle of its restore: NVML counts 60 MiB for it, and it has not reported."""
    machine.total = 200 * MIB
    machine.sizes, machine.states = {1: 60 * MIB, 2: 10 * MIB}, {1: OUT, 2: RUNNING}
    shared = room(machine)
    one, two = Reservation(60 * MIB, [1]), Reservation(100 * MIB, [2])
    with shared.reserved(one), shared.reserved(two):
        assert fits(shared, one)
        monkeypatch.setattr(room_module, "why_stopped", lambda _ref: "frozen" if halted else "")
        monkeypatch.setattr(processes, "ref_of", lambda pid: ProcessRef(pid, 0))
        assert fits(shared, two), "beside the 60 that are to come"
        machine.states[1] = RUNNING
        assert fits(shared, two) is halted


def test_room_is_promised_once_and_given_back() -> None:
    machine = Machine()
    shared = room(machine)
    one, two = Reservation(60 * MIB, []), Reservation(60 * MIB, [])
    with shared.reserved(one):
        assert fits(shared, one)
        assert fits(shared, one), "its own promise does not stand in its way"
        with shared.reserved(two):
            assert not fits(shared, two)
            one.spend(50 * MIB)  # back in the GPU: NVML would count it from here on
            assert fits(shared, two)
    assert fits(shared, Reservation(90 * MIB, []))


def test_an_unknown_size_waits_for_all_others_and_makes_them_wait() -> None:
    machine = Machine()
    shared = room(machine)
    unknown, known = Reservation(None, [5]), Reservation(MIB, [])
    machine.outside = MIB
    assert not fits(shared, unknown)
    machine.outside = 0
    with shared.reserved(unknown):
        assert fits(shared, unknown)
        assert not fits(shared, known)
    with shared.reserved(known):
        assert fits(shared, known)
        assert not fits(shared, unknown)


def test_waiting_for_room_is_given_up_when_nobody_wants_it() -> None:
    machine = Machine()
    machine.outside = 100 * MIB

    def unwanted() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        LOOP.run(room(machine).wait(Reservation(MIB, []), time.monotonic_ns() + 10**12, unwanted))


# --- who worked ----------------------------------------------------------------------------------


class Samples:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.meter = UsageMeter(machine, Footprints())

    def add(self, pid: int, percent: int, time_us: int) -> None:
        assert self.machine.now_samples is not None
        self.machine.now_samples += (UtilisationSample(pid, percent, time_us),)
        self.meter.forget()

    def busy(self, session: str, *pids: int) -> bool | None:
        return self.meter.busy(SessionId(session), pids, LOOP.run(self.meter.read()))


@pytest.fixture
def samples(machine: Machine) -> Samples:
    return Samples(machine)


def test_busy_is_since_the_sessions_own_last_look(samples: Samples) -> None:
    samples.add(1, 50, 10_000_000)
    samples.add(2, 0, 10_000_000)
    assert samples.busy("a", 1) is True
    assert samples.busy("b", 2) is False
    assert samples.busy("a", 1) is False, "nothing new"
    assert samples.busy("c", 1) is True, "a session that looks for the first time"
    samples.add(1, 1, 11_000_000)
    samples.add(2, 0, 11_500_000)
    assert samples.busy("b", 1, 2) is True
    assert samples.busy("a", 1) is True, "another one's look takes nothing away"


def test_old_work_is_not_news_to_a_new_session(samples: Samples) -> None:
    samples.add(1, 50, 10_000_000)
    samples.add(1, 0, 12_000_000)
    assert samples.busy("a", 1) is False


def test_nobody_knows_who_worked(samples: Samples) -> None:
    samples.machine.now_samples = None
    assert samples.busy("a", 1) is None


def test_one_reading_serves_many_looks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    readings = []

    async def read() -> dict[int, int]:
        readings.append(1)
        return {}

    monkeypatch.setattr(machine, "bytes_by_pid", read)
    meter = UsageMeter(machine, Footprints())
    for _ in range(100):
        LOOP.run(meter.read())
    assert len(readings) == 1
    clock[0] += 10**9
    LOOP.run(meter.read())
    assert len(readings) == 2
    meter.forget()
    LOOP.run(meter.read())
    assert len(readings) == 3
