"""Operations on processes with Kiwi's library, beside what only the driver can move. The libraries
are scripted like the driver: the GPU's books are those of ``Machine``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from contract import moved, refused, soon_ns
from scripted_machine import LOCKED, OUT, RUNNING, TARGET, Machine, new_pager

from kiwi_core.gpu.looks import GpuLook
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.movers.errors import hung
from kiwi_core.pager.api import Moved, Outcome, Refused, Target
from kiwi_core.pager.linked import LibraryReport, LibraryStep, LinkedProcess, LinkedProcesses
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.pager.unmovable import WhyUnmovable
from kiwi_core.states import MovedBy, Reason, Residency
from kiwi_core.units import MIB, SessionId


@dataclass(eq=False)
class Library:
    """A connected library, which owns ``owned_bytes`` of what its process has in the GPU."""

    ref: ProcessRef
    owned_bytes: int
    report: LibraryReport = field(default_factory=LibraryReport)
    connected: bool = True
    expected: bool = False
    moving: bool = False
    yields: bool = False
    gains: list[tuple[int, int]] = field(default_factory=list)

    def compare_gain(self, gained_bytes: int, reported_bytes: int) -> None:
        self.gains.append((gained_bytes, reported_bytes))

    @property
    def owns(self) -> bool:
        return self.owned_bytes > 0


class Libraries(LinkedProcesses):
    """The libraries of the session. ``faults[step, pid]`` apply one by one: each may do something,
    and returns the outcome, or ``None`` if the library goes on with the step."""

    def __init__(self, machine: Machine, **owned: int) -> None:
        self.machine = machine
        self.faults: dict[tuple[str, int], list[Callable[[], Outcome | None]]] = defaultdict(list)
        self.by_pid = {
            int(name[1:]): Library(ProcessRef(int(name[1:]), 0), size)
            for name, size in owned.items()
        }
        move = machine._move

        def guarded(call: str, pid: int) -> None:
            library = self.by_pid.get(pid)
            if call == "checkpoint" and library is not None and pid in machine.states:
                assert library.report.residency is not Residency.RESIDENT, "its gate is open"
            move(call, pid)

        machine._move = guarded  # type: ignore[method-assign]

    def of(self, session: SessionId) -> tuple[LinkedProcess, ...]:
        return self.everybody() if session == TARGET.session else ()

    def everybody(self) -> tuple[LinkedProcess, ...]:
        return tuple(self.by_pid.values())

    def paged_out(self) -> tuple[Target, ...]:
        return ()

    async def perform(
        self, those: Sequence[LinkedProcess], step: LibraryStep, deadline_ns: int
    ) -> list[Outcome]:
        return [self._one(self.by_pid[one.ref.pid], step) for one in those]

    def _one(self, library: Library, step: LibraryStep) -> Outcome:
        pid = library.ref.pid
        self.machine.calls.append(f"{step} {pid}")
        if self.faults[step, pid]:
            outcome = self.faults[step, pid].pop(0)()
            if outcome is not None:
                return outcome
        if pid not in self.machine.states:
            return Refused(Reason.GONE)
        assert self.machine.states[pid] is RUNNING, "its first driver call would not return"
        return self._done(library, step)

    def _done(self, library: Library, step: LibraryStep) -> Outcome:
        pid, size = library.ref.pid, library.owned_bytes
        was = library.report.residency
        if step == "yield":
            shut = was is not Residency.RESIDENT
            return Moved(0, 0) if shut else Refused(Reason.DRIVER, "its gate is not shut")
        if step == "shut":
            library.report = LibraryReport(Residency.SUSPENDED, size)
        elif step == "page-out":
            if was is not Residency.PAGED_OUT:
                self.machine.sizes[pid] -= size
            library.report = LibraryReport(Residency.PAGED_OUT, paged_out_bytes=size)
            return Moved(size, 0)
        elif step == "open" and was is Residency.PAGED_OUT:
            return Refused(Reason.DRIVER, "its memory is out")
        else:
            if step == "page-in" and was is Residency.PAGED_OUT:
                if self.machine.left_bytes() < size:
                    return Refused(Reason.NO_ROOM, "no room")
                self.machine.sizes[pid] += size
            library.report = LibraryReport(Residency.RESIDENT, size)
        return Moved(0, 0)


def only_root(machine: Machine, size_bytes: int) -> None:
    machine.sizes = {1: size_bytes}
    del machine.states[2]


def refuses(reason: Reason = Reason.LOCK_TIMEOUT) -> Callable[[], Outcome]:
    return lambda: Refused(reason, "said no")


def pager_of(machine: Machine, libraries: Libraries, **more: object) -> SessionPager:
    return new_pager(machine, links=libraries, **more)


@pytest.fixture
def both(machine: Machine) -> Libraries:
    """The root has a library that owns 8 of its 10 MiB; its child has none."""
    return Libraries(machine, p1=8 * MIB)


def test_out_and_back(machine: Machine, both: Libraries) -> None:
    pager = pager_of(machine, both)
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.calls == ["shut 1", "lock 2", "page-out 1", "checkpoint 2"]
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
    assert machine.sizes == {1: 10 * MIB, 2: 20 * MIB}


def test_what_the_gpu_gained_is_compared_with_what_the_library_says(
    machine: Machine, both: Libraries
) -> None:
    """Not where the library had it out before."""
    pager = pager_of(machine, both)
    moved(pager.page_out(TARGET, soon_ns()))
    moved(pager.page_out(TARGET, soon_ns()))
    assert both.by_pid[1].gains == [(8 * MIB, 8 * MIB)]


def test_the_driver_moves_what_a_library_owns_that_yields(
    machine: Machine, both: Libraries
) -> None:
    both.by_pid[1].yields = True
    pager = pager_of(machine, both)
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.calls[:3] == ["shut 1", "lock 2", "yield 1"]
    assert machine.states == {1: OUT, 2: OUT}
    assert pager.moved_by(TARGET.session) is MovedBy.CHECKPOINT
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.calls[-1] == "open 1"
    assert machine.states == {1: RUNNING, 2: RUNNING}
    assert machine.sizes == {1: 10 * MIB, 2: 20 * MIB}
    assert both.by_pid[1].gains == []


def test_a_library_that_refuses_to_yield_keeps_everything_where_it_is(
    machine: Machine, both: Libraries
) -> None:
    both.by_pid[1].yields = True
    both.faults["yield", 1].append(refuses())
    refused(pager_of(machine, both).page_out(TARGET, soon_ns()), Reason.LOCK_TIMEOUT)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    assert both.by_pid[1].report.residency is Residency.RESIDENT


def test_what_filled_all_that_others_left_comes_back_though_the_driver_has_its_rest(
    machine: Machine,
) -> None:
    """What the library owns was out already when the driver took the rest: what was free then is
    not what the session leaves free once it is back."""
    only_root(machine, 60 * MIB)
    machine.hidden, machine.outside = 6 * MIB, 32 * MIB
    pager = pager_of(machine, Libraries(machine, p1=50 * MIB))
    moved(pager.page_out(TARGET, soon_ns()))
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT}
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING}
    assert machine.sizes == {1: 60 * MIB}


def test_what_filled_all_that_others_left_comes_back_with_a_child_without_library(
    machine: Machine,
) -> None:
    machine.sizes = {1: 40 * MIB, 2: 20 * MIB}
    machine.hidden, machine.outside = 6 * MIB, 27 * MIB
    pager = pager_of(machine, Libraries(machine, p1=38 * MIB))
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: OUT}
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.sizes == {1: 40 * MIB, 2: 20 * MIB}


def test_a_process_that_came_meanwhile_is_brought_back_when_another_one_refuses(
    machine: Machine,
) -> None:
    libraries = Libraries(machine, p1=8 * MIB, p2=8 * MIB)
    newcomer = libraries.by_pid.pop(2)
    del machine.states[2]

    def starts() -> None:
        machine.states[2] = RUNNING
        libraries.by_pid[2] = newcomer

    libraries.faults["shut", 1] = [starts]
    libraries.faults["page-out", 1] = [refuses()]
    pager = pager_of(machine, libraries)
    refused(pager.page_out(TARGET, soon_ns()), Reason.LOCK_TIMEOUT)
    assert machine.sizes == {1: 10 * MIB, 2: 20 * MIB}
    reports = [one.report.residency for one in libraries.everybody()]
    assert reports == [Residency.RESIDENT, Residency.RESIDENT]


def test_what_is_locked_with_its_memory_out_is_not_merely_resumed(machine: Machine) -> None:
    only_root(machine, 10 * MIB)
    libraries = Libraries(machine, p1=8 * MIB)
    pager = pager_of(machine, libraries)
    moved(pager.page_out(TARGET, soon_ns()))
    machine.states[1] = LOCKED
    pager = pager_of(machine, libraries)  # as a new daemon, which has not seen it run
    refused(pager.resume(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: LOCKED}


def test_a_library_that_was_out_before_and_connects_again_has_its_rest_taken(
    machine: Machine,
) -> None:
    """The scheduler asks a second time only if room is short."""
    only_root(machine, 10 * MIB)
    libraries = Libraries(machine, p1=8 * MIB)
    pager = pager_of(machine, libraries)
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING}
    library = libraries.by_pid[1]
    library.connected, library.expected = False, True

    def connects() -> None:
        library.connected, library.expected = True, False

    libraries.faults["page-out", 1] = [connects]
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT}


def test_what_grows_before_its_gate_is_shut_is_not_moved_out_of_ram(machine: Machine) -> None:
    """It ran until then: what was known of it before is out of date."""
    only_root(machine, 10 * MIB)
    libraries = Libraries(machine, p1=0)

    def grows() -> None:
        machine.sizes[1] = 40 * MIB

    libraries.faults["shut", 1] = [grows]
    pager = pager_of(machine, libraries, host_available_bytes=lambda _pids: 30 * MIB)
    refused(pager.page_out(TARGET, soon_ns()), Reason.NO_HOST_MEMORY)
    assert libraries.by_pid[1].report.residency is Residency.RESIDENT
    assert "checkpoint 1" not in machine.calls


def test_what_must_not_be_moved_since_just_before_its_gate_was_shut(machine: Machine) -> None:
    """A program on driver 595 dies of the try to move its managed memory."""
    only_root(machine, 10 * MIB)
    libraries = Libraries(machine, p1=0)
    known: list[WhyUnmovable] = []
    libraries.faults["shut", 1] = [
        lambda: known.append(WhyUnmovable("It uses managed memory.", "It stays in the GPU."))
    ]
    pager = pager_of(machine, libraries, known_unmovable=lambda _ref: known[0] if known else None)
    refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert machine.calls == ["shut 1", "open 1"]


def test_a_process_that_cannot_be_taken_again_is_named(machine: Machine) -> None:
    libraries = Libraries(machine, p2=0)
    pager = pager_of(machine, libraries)
    moved(pager.page_out(TARGET, soon_ns()))
    machine.faults["unlock", 1] = [999, 999]
    libraries.faults["yield", 2] = [refuses()]
    answer = refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    assert "Process 2 is back in the GPU but suspended: said no" in answer.detail
    assert machine.states == {1: LOCKED, 2: RUNNING}


def test_what_starts_while_libraries_move_out_is_locked_before_it_is_measured(
    machine: Machine,
) -> None:
    """What it allocated in between would be missing when it comes back."""
    del machine.states[2]
    libraries = Libraries(machine, p1=8 * MIB)
    libraries.faults["page-out", 1] = [lambda: machine.states.update({2: RUNNING})]

    def grows() -> int:
        machine.sizes[2] = 40 * MIB
        return 0

    machine.faults["lock", 2] = [grows]
    pager = pager_of(machine, libraries)
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: OUT}
    assert pager.export_footprints()[ProcessRef(2, 0)] == 40 * MIB


def test_a_library_moves_its_process_though_the_driver_hangs_on_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question asks about all: then each is asked for itself."""
    only_root(machine, 10 * MIB)
    look = machine.look

    async def hangs(pids: Sequence[int] = ()) -> GpuLook:
        if pids:
            raise hung("a look", 1.0)
        return await look()

    monkeypatch.setattr(machine, "look", hangs)
    pager = pager_of(machine, Libraries(machine, p1=8 * MIB))
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.calls == ["shut 1", "page-out 1"]


def test_a_child_that_must_not_be_moved_is_known_before_libraries_move(
    machine: Machine, both: Libraries
) -> None:
    """Otherwise their memory goes out and back at each try."""
    why = WhyUnmovable("It uses managed memory.", "It stays in the GPU.")
    pager = pager_of(machine, both, known_unmovable=lambda ref: why if ref.pid == 2 else None)
    refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert machine.calls == []


def test_what_was_suspended_before_is_suspended_again_when_another_one_refuses(
    machine: Machine,
) -> None:
    libraries = Libraries(machine, p1=8 * MIB, p2=8 * MIB)
    pager = pager_of(machine, libraries)
    moved(pager.suspend(TARGET, soon_ns()))
    libraries.faults["page-out", 2] = [refuses()]
    refused(pager.page_out(TARGET, soon_ns()), Reason.LOCK_TIMEOUT)
    reports = [one.report.residency for one in libraries.everybody()]
    assert reports == [Residency.SUSPENDED, Residency.SUSPENDED]
