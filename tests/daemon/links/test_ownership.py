"""Tests of the decision which libraries own, and of what is remembered of programs."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kiwi_core.daemon.links import ownership
from kiwi_core.daemon.links.calls import PagerCall
from kiwi_core.daemon.links.link import Link
from kiwi_core.daemon.links.ownership import Ownership
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.gpu import ownable, processes
from kiwi_core.gpu.ownable import OwnershipObjection, ProcessFacts
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.states import GateOnly, Residency
from kiwi_core.units import MIB, SessionId
from kiwi_core.wire.messages import Hello, Role
from kiwi_core.wire.pager import PagerAction, PagerDone, PagerOutcome, PagerState

if TYPE_CHECKING:
    from kiwi_core.gpu.processes import ProcessRef

TOOL = ProcessFacts(tracer_pid=7)


def me() -> ProcessRef:
    ref = processes.ref_of(os.getpid())
    assert ref is not None
    return ref


def hello(*, owns: bool = True, could_own: bool = True) -> Hello:
    return Hello(protocol=1, role=Role.PAGER, client="t", owns=owns, could_own=could_own)


NOTHING_FOUND = ProcessFacts()


class Desk(Ownership):
    """``seen``: the facts of every process; ``written`` counts what must reach the roster."""

    def __init__(
        self,
        seen: ProcessFacts | None = NOTHING_FOUND,
        *,
        coherent: bool = False,
        unasked: GateOnly | None = GateOnly.NOT_ASKED,
    ) -> None:
        self.seen, self.written = seen, 0
        super().__init__(coherent, self._count, lambda: unasked, lambda _pid: self.seen)

    def _count(self) -> None:
        self.written += 1

    def told(self, link: Link | None = None, *, record: SessionRecord | None = None) -> Link:
        link = link or Link(me(), os.getuid())
        self.decide(link, record, hello())
        return link


def why(link: Link) -> GateOnly | None:
    return link.objection.why if link.objection else None


@pytest.mark.parametrize(
    ("owns", "could_own", "seen", "expected", "reason", "yields"),
    [
        (True, True, ProcessFacts(), True, None, False),
        (True, True, TOOL, False, GateOnly.TOOL, False),
        (False, True, ProcessFacts(), False, GateOnly.NOT_ASKED, False),
        (False, False, ProcessFacts(), False, GateOnly.NOT_ASKED, False),
        (True, False, ProcessFacts(), True, None, False),
        (True, False, TOOL, True, GateOnly.TOOL, True),
    ],
    ids=["asks", "a tool", "does not ask", "gate only", "owns", "owns under a tool"],
)
def test_the_decision(
    owns: bool,
    could_own: bool,
    seen: ProcessFacts,
    expected: bool,
    reason: GateOnly | None,
    yields: bool,
) -> None:
    link = Link(me(), os.getuid())
    Desk(seen).decide(link, None, hello(owns=owns, could_own=could_own))
    assert (link.owns, why(link), link.yields) == (expected, reason, yields)


@pytest.mark.parametrize(
    ("unasked", "seen", "expected", "reason"),
    [
        (None, ProcessFacts(), True, None),
        (None, TOOL, False, GateOnly.TOOL),
        (GateOnly.UNPROVEN, ProcessFacts(), False, GateOnly.UNPROVEN),
        (GateOnly.PROOF_FAILED, ProcessFacts(), False, GateOnly.PROOF_FAILED),
    ],
    ids=["proven", "proven, but a tool", "not proven", "failed"],
)
def test_a_program_that_asks_for_nothing_gets_what_the_machine_has_proven(
    unasked: GateOnly | None, seen: ProcessFacts, expected: bool, reason: GateOnly | None
) -> None:
    desk, link = Desk(seen, unasked=unasked), Link(me(), os.getuid())
    desk.decide(link, None, hello(owns=False))
    assert (link.owns, why(link), link.yields) == (expected, reason, False)
    desk.decide(link, None, hello(owns=expected, could_own=False))  # it connects again
    assert (link.owns, why(link)) == (expected, reason)


def test_a_gate_stays_a_gate_whatever_the_machine_has_proven() -> None:
    desk, link = Desk(unasked=None), Link(me(), os.getuid())
    desk.decide(link, None, hello(owns=False, could_own=False))
    assert (link.owns, why(link)) == (False, GateOnly.NOT_ASKED)


def test_a_coherent_machine_says_no_to_all() -> None:
    assert why(Desk(coherent=True).told()) is GateOnly.COHERENT


def test_a_library_that_connects_again_keeps_its_reason() -> None:
    desk = Desk(TOOL)
    link = desk.told()
    desk.seen = ProcessFacts()
    desk.decide(link, None, hello(owns=False, could_own=False))
    assert (link.owns, why(link)) == (False, GateOnly.TOOL)


def test_a_library_that_had_the_answer_too_late_says_so() -> None:
    desk = Desk()
    link = desk.told()
    desk.decide(link, None, hello(owns=False, could_own=False))
    assert (link.owns, why(link)) == (False, GateOnly.LATE)
    desk.decide(link, None, hello(owns=False, could_own=False))
    assert why(link) is GateOnly.LATE


def test_a_program_is_known_by_its_notebook_or_its_command() -> None:
    link = Link(me(), os.getuid(), "python3")
    other = Link(me(), os.getuid() + 1, "python3")
    record = SessionRecord(SessionId("k1"), me(), os.getuid(), "a.ipynb")
    elsewhere = SessionRecord(SessionId("k2"), processes.ProcessRef(1, 1), os.getuid(), "a.ipynb")
    unnamed = SessionRecord(SessionId("k3"), me(), os.getuid(), f"process {os.getpid()}")
    command = ownership.program_of(link, None)
    assert command == ownership.program_of(link, elsewhere) == ownership.program_of(link, unnamed)
    assert ownership.program_of(link, record) not in (command, ownership.program_of(other, None))
    assert ownership.program_of(other, None) != command


def crashed(desk: Desk, monkeypatch: pytest.MonkeyPatch, number: int, moved_s: float) -> Link:
    link = desk.told()
    link.moved_s = moved_s
    monkeypatch.setattr(ownership.clock, "now_s", lambda: 100.0)
    monkeypatch.setattr(ownable, "ended_by", lambda _ref, _fd: number)
    desk.died(link)
    return desk.told()


@pytest.mark.parametrize(
    ("number", "moved_s", "remembered"),
    [(11, 91.0, True), (7, 91.0, True), (6, 91.0, True), (9, 91.0, False), (11, 89.0, False)],
)
def test_a_crash_soon_after_a_move_is_remembered(
    monkeypatch: pytest.MonkeyPatch, number: int, moved_s: float, remembered: bool
) -> None:
    desk = Desk()
    again = crashed(desk, monkeypatch, number, moved_s)
    assert why(again) is (GateOnly.CRASHED if remembered else None)
    assert desk.written == int(remembered)
    successor = Desk()
    successor.restore(desk.roster())
    assert why(successor.told()) is why(again)


def test_another_version_forgives_a_crash_and_time_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    crashed(desk, monkeypatch, 11, 91.0)
    monkeypatch.setattr(ownership, "__version__", "99")
    assert why(desk.told()) is None
    desk.heard(link := desk.told(), PagerState(state="resident", ipc_refused=1))
    assert why(link) is None, "its memory is owned as it is"
    monkeypatch.setattr(ownership, "__version__", "100")
    assert why(desk.told()) is GateOnly.IPC
    later = ownership.time.time() + ownership.REMEMBERED_S + 1
    monkeypatch.setattr(ownership.time, "time", lambda: later)
    assert why(desk.told()) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (PagerState(state="resident"), None),
        (PagerState(state="resident", ipc_refused=2), GateOnly.IPC),
        (PagerState(state="resident", unowned={"gpu": MIB}), GateOnly.SEVERAL_GPUS),
        (PagerState(state="resident", unowned={"gpu": 0, "pool": 1}), None),
    ],
)
def test_what_owned_memory_cannot_do_is_learnt_from_reports(
    state: PagerState, reason: GateOnly | None
) -> None:
    desk = Desk()
    link = desk.told()
    for _ in range(2):
        desk.heard(link, state)
    assert why(desk.told()) is reason
    assert desk.written == (reason is not None)
    gate_only = Desk()
    gate_only.decide(link, None, hello(owns=False))
    gate_only.heard(link, state)
    assert not gate_only.roster(), "the driver's memory can do all that"


def test_only_so_many_programs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    link = desk.told()
    for number in range(ownership.PROGRAMS_MAX + 5):
        link.program = str(number)
        desk.heard(link, PagerState(state="resident", ipc_refused=1))
    kept = [one.program for one in desk.roster()]
    assert kept == [str(number) for number in range(5, ownership.PROGRAMS_MAX + 5)]


def test_a_device_that_is_opened_later_is_found_before_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    link, ended = desk.told(), desk.told(Link(processes.ProcessRef(1 << 30, 1), 0))
    gate_only = Link(me(), 0, owns=False)
    desk.before_a_move([link, ended, gate_only])
    assert [why(one) for one in (link, ended, gate_only)] == [None] * 3
    monkeypatch.setattr(ownable, "open_files", lambda _pid: frozenset({"/dev/nvidia-fs0"}))
    desk.before_a_move([link, gate_only])
    desk.before_a_move([link])
    assert (link.objection, link.yields) == (
        OwnershipObjection(GateOnly.DIRECT, "/dev/nvidia-fs0"),
        True,
    )
    assert gate_only.objection is None


def test_two_poor_page_outs_in_a_row_and_the_library_is_in_doubt() -> None:
    link = Desk().told()
    for gained, reported in ((0, 63), (30, 64), (60, 100), (49, 100), (64, 128), (10, 64)):
        link.compare_gain(gained * MIB, reported * MIB)
        assert not link.yields
    link.compare_gain(-MIB, 64 * MIB)
    assert (why(link), link.yields) == (GateOnly.DOUBTED, True)
    desk = Desk()
    desk.decide(link, None, hello(could_own=False))
    assert why(link) is GateOnly.DOUBTED, "also on its next connection"


def test_two_page_outs_that_the_driver_failed_and_it_moves_the_memory_itself() -> None:
    async def run() -> None:
        link = Desk().told()
        link.report = LibraryReport(Residency.RESIDENT, MIB)
        for reason in ("driver", "no-host-memory", "driver", "lock-timeout", "driver"):
            await _refuses(link, PagerAction.PAGE_OUT, reason)
            await _refuses(link, PagerAction.HOLD, "driver")
            assert not link.yields
        await _refuses(link, PagerAction.PAGE_OUT, "driver")
        assert (why(link), link.yields) == (GateOnly.REFUSED, True)

    asyncio.run(run())


async def _refuses(link: Link, action: PagerAction, reason: str) -> None:
    link.call = PagerCall(action, 0, op=7)
    refused = PagerDone(op=7, outcome=PagerOutcome.REFUSED, reason=reason)
    assert link.done(refused)
