"""Tables of the pager's plan: which steps follow from a look, for processes of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.host import Shortage
from kiwi_core.gpu.looks import GpuLook
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager import plan
from kiwi_core.pager.api import Lost
from kiwi_core.pager.ending import Stop
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.pager.look import SessionLook, SessionProcess
from kiwi_core.states import MovedBy, Reason, Residency
from kiwi_core.units import GIB, MIB

RUNNING, LOCKED = CheckpointState.RUNNING, CheckpointState.LOCKED
OUT, NOTHING = CheckpointState.CHECKPOINTED, CheckpointState.NOT_A_CUDA_PROCESS
ERROR = GpuError("unknown", "The driver does not say.", driver_code=999)


@dataclass
class Library:
    ref: ProcessRef = field(default_factory=lambda: ProcessRef(1, 0))
    report: LibraryReport = field(default_factory=LibraryReport)
    connected: bool = True
    owns: bool = True
    expected: bool = False
    moving: bool = False
    yields: bool = False
    gains: list[tuple[int, int]] = field(default_factory=list)

    def compare_gain(self, gained_bytes: int, reported_bytes: int) -> None:
        self.gains.append((gained_bytes, reported_bytes))


def plain(state: CheckpointState = RUNNING, **more: object) -> SessionProcess:
    return replace(SessionProcess(ProcessRef(1, 0), state, row_bytes=10 * MIB), **more)  # type: ignore[arg-type]


def linked(
    where: Residency, state: CheckpointState = RUNNING, *, owns: bool = True, **more: object
) -> SessionProcess:
    report = LibraryReport(where)
    if where is Residency.PAGED_OUT:
        report = replace(report, paged_out_bytes=8 * MIB)
    library = Library(owns=owns, report=report)
    for name in ("connected", "moving", "yields"):
        setattr(library, name, more.pop(name, getattr(library, name)))
    names = ("resident_bytes", "unowned_bytes")
    library.report = replace(report, **{n: more.pop(n) for n in names if n in more})  # type: ignore[arg-type]
    return plain(state, library=library, **more)


def gated(where: Residency, state: CheckpointState = RUNNING, **more: object) -> SessionProcess:
    return linked(where, state, owns=False, **more)


def look(*processes: SessionProcess) -> SessionLook:
    """Number the processes from 1."""
    numbered = [replace(one, ref=ProcessRef(pid, 0)) for pid, one in enumerate(processes, 1)]
    return SessionLook(GpuLook(20 * MIB), tuple(p.ref for p in numbered), tuple(numbered))


def verbs(steps: list[plan.PlanStep]) -> list[str]:
    return [f"{step.verb} {step.process.ref.pid}" for step in steps]


IN, SHUT, AWAY = Residency.RESIDENT, Residency.SUSPENDED, Residency.PAGED_OUT


@pytest.mark.parametrize(
    ("process", "backend", "stop", "libraries", "driver"),
    [
        (plain(), MovedBy.CHECKPOINT, ["lock 1"], [], ["lock 1", "checkpoint 1"]),
        (plain(LOCKED), MovedBy.CHECKPOINT, [], [], ["checkpoint 1"]),
        (plain(OUT), MovedBy.CHECKPOINT, [], [], []),
        (plain(empty=True), MovedBy.CHECKPOINT, [], [], []),
        (gated(IN), MovedBy.INPROCESS, ["shut 1"], [], []),
        (gated(SHUT), MovedBy.INPROCESS, [], [], ["lock 1", "checkpoint 1"]),
        (gated(SHUT, empty=True), MovedBy.INPROCESS, [], [], []),
        (gated(SHUT, NOTHING), MovedBy.INPROCESS, [], [], []),
        (gated(SHUT, LOCKED), MovedBy.CHECKPOINT, [], [], ["checkpoint 1"]),
        (gated(SHUT, OUT), MovedBy.CHECKPOINT, [], [], []),
        (linked(IN, yields=True), MovedBy.INPROCESS, ["shut 1"], [], []),
        (
            linked(SHUT, yields=True),
            MovedBy.INPROCESS,
            [],
            [],
            ["yield 1", "lock 1", "checkpoint 1"],
        ),
        (linked(SHUT, OUT, yields=True), MovedBy.CHECKPOINT, [], [], []),
        (linked(AWAY, resident_bytes=1, yields=True), MovedBy.INPROCESS, [], ["page-out 1"], []),
        (linked(IN), MovedBy.INPROCESS, ["shut 1"], ["page-out 1"], []),
        (linked(SHUT), MovedBy.INPROCESS, [], ["page-out 1"], []),
        (linked(AWAY), MovedBy.INPROCESS, [], [], []),
        (linked(AWAY, resident_bytes=1), MovedBy.INPROCESS, [], ["page-out 1"], []),
        (linked(AWAY, connected=False), MovedBy.INPROCESS, [], ["page-out 1"], []),
        (linked(AWAY, LOCKED), MovedBy.CHECKPOINT, [], [], ["checkpoint 1"]),
        (linked(IN, error=ERROR), MovedBy.INPROCESS, ["shut 1"], ["page-out 1"], []),
        (linked(AWAY, error=ERROR, out_bytes=1), MovedBy.CHECKPOINT, [], [], []),
    ],
)
def test_the_way_out(
    process: SessionProcess,
    backend: MovedBy,
    stop: list[str],
    libraries: list[str],
    driver: list[str],
) -> None:
    seen = look(process)
    assert process.backend is backend
    assert verbs(plan.stop(seen)) == stop
    assert verbs(plan.libraries_out(seen)) == libraries
    assert verbs(plan.driver_out(seen)) == driver


@pytest.mark.parametrize(
    ("process", "libraries", "restored", "unlocked", "opened"),
    [
        (plain(), [], [], [], []),
        (plain(LOCKED), [], [], ["unlock 1"], []),
        (plain(OUT), [], ["restore 1"], ["unlock 1"], []),
        (gated(SHUT), [], [], [], ["open 1"]),
        (gated(SHUT, OUT), [], ["restore 1"], ["unlock 1"], []),
        (linked(AWAY), ["page-in 1"], [], [], []),
        (linked(AWAY, OUT), [], ["restore 1"], ["unlock 1"], []),
        (linked(AWAY, yields=True), ["page-in 1"], [], [], []),
        (linked(SHUT, OUT, yields=True), [], ["restore 1"], ["unlock 1"], []),
        (linked(SHUT, yields=True), [], [], [], ["open 1"]),
        (linked(IN), [], [], [], []),
    ],
)
def test_the_way_in(
    process: SessionProcess,
    libraries: list[str],
    restored: list[str],
    unlocked: list[str],
    opened: list[str],
) -> None:
    seen = look(process)
    assert verbs(plan.libraries_in(seen)) == libraries
    assert verbs(plan.driver_in(seen)) == restored
    assert verbs(plan.unlock(seen)) == unlocked
    assert verbs(plan.open_gates(seen)) == opened


def test_what_the_driver_has_freed_is_its_librarys_again() -> None:
    seen = look(gated(SHUT, LOCKED), linked(AWAY, LOCKED), plain(LOCKED))
    assert plan.libraries_in(seen) == plan.open_gates(seen) == []
    assert verbs(plan.libraries_in(seen.freed())) == ["page-in 2"]
    assert verbs(plan.open_gates(seen.freed())) == ["open 1"]


def test_gates_are_shut_before_anything_is_locked_and_all_are_locked_before_one_goes() -> None:
    seen = look(plain(), gated(IN), plain())
    assert verbs(plan.stop(seen)) == ["shut 2", "lock 1", "lock 3"]
    seen = look(plain(LOCKED), gated(SHUT), plain(LOCKED))
    assert verbs(plan.driver_out(seen)) == ["lock 2", *(f"checkpoint {n}" for n in (1, 3, 2))]


@pytest.mark.parametrize(
    ("process", "least_bytes", "steps"),
    [
        (linked(AWAY), -1, ["yield 1"]),
        (linked(AWAY, unowned_bytes=5), 5, []),
        (linked(AWAY, unowned_bytes=6), 5, ["yield 1"]),
        (linked(AWAY, empty=True), -1, []),
        (linked(AWAY, NOTHING), -1, []),
        (linked(AWAY, OUT), -1, []),
        (gated(SHUT), -1, []),
        (plain(), -1, []),
    ],
)
def test_what_libraries_leave(process: SessionProcess, least_bytes: int, steps: list[str]) -> None:
    assert verbs(plan.rest_out(look(process), least_bytes)) == steps


@pytest.mark.parametrize(
    ("processes", "may"),
    [
        ([linked(AWAY), linked(AWAY)], True),
        ([linked(AWAY), linked(IN)], False),
        ([linked(AWAY, moving=True)], False),
        ([linked(AWAY, resident_bytes=1)], False),
        ([linked(AWAY, connected=False)], False),
        ([plain()], False),
    ],
)
def test_whose_rest_may_be_cleared_for_others(processes: list[SessionProcess], may: bool) -> None:
    assert plan.may_be_cleared(look(*processes)) is may


@pytest.mark.parametrize(
    ("process", "steps", "ends"),
    [
        (linked(AWAY, OUT), ["restore 1", "unlock 1"], []),
        (linked(AWAY, LOCKED), ["unlock 1"], []),
        (linked(AWAY, OUT, connected=False), ["restore 1", "unlock 1"], []),
        (linked(AWAY), [], ["page-out 1"]),
        (linked(AWAY, connected=False), [], []),
        (linked(SHUT, OUT), [], []),
        (linked(AWAY, OUT, error=ERROR, out_bytes=1), [], []),
        (linked(AWAY, OUT, stopped="stopped"), [], []),
        (gated(SHUT, OUT), [], []),
        (gated(AWAY), [], []),
        (plain(OUT), [], []),
    ],
)
def test_what_the_driver_has_taken_of_contexts(
    process: SessionProcess, steps: list[str], ends: list[str]
) -> None:
    seen = look(process)
    residues = plan.residues(seen)
    assert [one.ref for one in residues] == [one.ref for one in plan.taken(seen)]
    assert verbs(plan.driver_in(residues) + plan.unlock(residues)) == steps
    assert verbs(plan.end_yields(seen)) == ends


@pytest.mark.parametrize(
    ("processes", "owned"),
    [
        ([], False),
        ([linked(IN), linked(AWAY)], True),
        ([linked(IN), plain()], False),
        ([linked(IN), plain(NOTHING)], True),
        ([linked(IN), gated(IN)], False),
        ([linked(IN, connected=False)], False),
        ([linked(AWAY, LOCKED)], False),
    ],
)
def test_who_owns_a_session(processes: list[SessionProcess], owned: bool) -> None:
    assert plan.is_owned(look(*processes)) is owned


# --- refusals ------------------------------------------------------------------------------------


def test_whose_state_must_be_known() -> None:
    plan.check(look(linked(IN, error=ERROR), gated(IN, error=ERROR)))
    for process in (plain(NOTHING, error=ERROR), linked(AWAY, error=ERROR, out_bytes=1)):
        with pytest.raises(Stop, match="does not say"):
            plan.check(look(process))
    plan.driver_part(look(linked(IN, error=ERROR)))
    with pytest.raises(Stop, match="does not say"):
        plan.driver_part(look(gated(IN, error=ERROR)))


def test_what_does_not_run_is_left_alone() -> None:
    with pytest.raises(Stop) as stopped:
        plan.check(look(plain(), linked(IN, stopped="stopped by Ctrl-Z")))
    assert "Process 2 is stopped by Ctrl-Z." in str(stopped.value)


@pytest.mark.parametrize("process", [plain(CheckpointState.FAILED), linked(Residency.LOST)])
def test_what_is_lost_ends_the_session(process: SessionProcess) -> None:
    with pytest.raises(Stop) as stop:
        plan.check_lost(look(plain(), process))
    assert isinstance(stop.value.outcome, Lost)
    assert stop.value.over


@pytest.mark.parametrize(
    ("free_bytes", "full"), [(0, True), (31 * MIB, True), (32 * MIB, False), (None, False)]
)
def test_a_full_gpu(free_bytes: int | None, full: bool) -> None:
    refused = plan.refusal_of_full(GpuLook(free_bytes), 80 * GIB, DEFAULTS)
    assert (refused is not None) is full


def test_a_process_of_two_gpus() -> None:
    seen = look(plain(), plain(row_bytes=None))
    assert plan.refusal_elsewhere(seen.processes, {7: "GPU-y"}) is None
    assert plan.refusal_elsewhere(seen.processes, {2: "GPU-y"}) is None, "it has nothing here"
    assert plan.refusal_elsewhere(seen.processes, {1: "GPU-y"}) is not None


@pytest.mark.parametrize(
    ("names", "rows", "learnt_mib", "need_mib"),
    [
        (True, (10, 20), {}, 30),
        (True, (10, None), {}, 10),
        (False, (10, None), {}, 10 + 100 - 20 - 10),
        (False, (10, None), {2: 7}, 17),
        (False, (None, None), {2: 7}, 80),
    ],
)
def test_how_much_ram_a_page_out_needs(
    names: bool, rows: tuple[int | None, int | None], learnt_mib: dict[int, int], need_mib: int
) -> None:
    sizes = [None if row is None else row * MIB for row in rows]
    seen = look(*(plain(row_bytes=size) for size in sizes))
    bytes_by_pid = {pid: size for pid, size in enumerate(sizes, 1) if size is not None}
    gpu = GpuLook(20 * MIB, bytes_by_pid, names_users=names)
    learnt = {ProcessRef(pid, 0): mib * MIB for pid, mib in learnt_mib.items()}
    assert plan.ram_bytes(seen.processes, gpu, 100 * MIB, learnt) == need_mib * MIB


SHORTAGE = Shortage(limit_bytes=GIB, needs_bytes=2 * GIB)


@pytest.mark.parametrize(
    ("need", "available", "own", "any_", "reason"),
    [
        (10, 10, None, None, None),
        (0, -1, None, None, None),
        (10, 9, None, None, Reason.NO_HOST_MEMORY),
        (10, 9, None, SHORTAGE, Reason.NO_HOST_MEMORY),
        (10, 9, SHORTAGE, SHORTAGE, Reason.NO_JOB_MEMORY),
    ],
)
def test_ram_that_cannot_take_it(
    need: int, available: int, own: Shortage | None, any_: Shortage | None, reason: Reason | None
) -> None:
    refused = plan.refusal_for_ram(need * MIB, available * MIB, own, any_)
    assert (refused.reason if refused else None) is reason
    if refused is not None:
        assert "10 MiB would have to go to system RAM, which has 9 MiB" in refused.detail
        assert ("control group" in refused.detail) is (any_ is not None)
