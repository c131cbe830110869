"""Tests of operations with the fake pager: outcomes, deadlines, hangs and faults of our own."""

from __future__ import annotations

import time
from queue import Queue
from typing import TYPE_CHECKING

import pytest
import virtual_time
from blocking import PATIENCE_S, Loop
from fake_pager import FakePager, Hang, Lose, Raise, Refuse

from kiwi_core.daemon.engine.operations import OperationRunner
from kiwi_core.daemon.sessions.shutdown import NO_ANSWER, bring_back
from kiwi_core.pager.api import ProcessRef, Target
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut, Resume, Suspend
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, NS_PER_S, OpId, SessionId

if TYPE_CHECKING:
    from kiwi_core.sched.actions import Operation

S = SessionId("s")
TARGET = Target(S, ProcessRef(10, 1))
LOOP = Loop()


class World:
    def __init__(self) -> None:
        self.pager = FakePager(1024 * MIB)
        self.pager.start(S, resident_bytes=100 * MIB)
        self.posted: Queue[ev.Event] = Queue()
        self.operations = OperationRunner(self.pager, self.posted.put)

    def perform(self, kind: type[Operation], op: int = 1, deadline_in_s: float = 60) -> ev.Event:
        self.start(kind, op, deadline_in_s)
        return self.posted.get(timeout=PATIENCE_S)

    def start(
        self, kind: type[Operation], op: int = 1, deadline_in_s: float = 60, **more: int
    ) -> int:
        """Start an operation and return its deadline."""
        deadline_ns = time.monotonic_ns() + round(deadline_in_s * NS_PER_S)
        if kind is PageIn:
            more["need_bytes"] = 100 * MIB
        action = kind(op=OpId(op), session=S, deadline_ns=deadline_ns, cause="test", **more)
        LOOP.call(lambda: self.operations.start(action, TARGET))
        return deadline_ns


@pytest.fixture
def world() -> World:
    return World()


def test_what_goes_out_comes_back(world: World) -> None:
    suspended = world.perform(Suspend, 1)
    assert suspended == ev.Suspended(op=OpId(1), resident_bytes=100 * MIB)
    out = world.perform(PageOut, 2)
    assert isinstance(out, ev.PagedOut)
    assert (out.op, out.moved_bytes) == (2, 100 * MIB)
    back = world.perform(PageIn, 3)
    assert isinstance(back, ev.PagedIn)
    assert back.moved_bytes == 100 * MIB
    assert world.perform(Suspend, 4).op == 4  # type: ignore[union-attr]
    assert world.perform(Resume, 5) == ev.Resumed(op=OpId(5))


@pytest.mark.parametrize(
    ("kind", "call", "event"),
    [
        (Suspend, "suspend", ev.SuspendRefused),
        (Resume, "resume", ev.ResumeFailed),
        (PageOut, "page_out", ev.PageOutRefused),
        (PageIn, "page_in", ev.PageInRefused),
    ],
)
def test_refusals_and_our_own_faults_are_outcomes(
    world: World, kind: type[Operation], call: str, event: type
) -> None:
    world.pager.script(call, Refuse(Reason.LOCK_TIMEOUT, "why"), session=S)
    assert world.perform(kind) == event(op=OpId(1), reason=Reason.LOCK_TIMEOUT, detail="why")
    world.pager.script(call, Raise(RuntimeError("a bug")), session=S)
    failed = world.perform(kind, 2)
    assert failed == event(op=OpId(2), reason=Reason.DRIVER, detail="RuntimeError: a bug")


def test_a_resume_of_what_is_out_tells_so(world: World) -> None:
    """The page-out of a killed daemon may take effect after its successor has looked."""
    world.perform(PageOut)
    failed = world.perform(Resume, 2)
    assert isinstance(failed, ev.ResumeFailed)
    assert failed.paged_out_bytes == 100 * MIB
    assert isinstance(world.perform(PageIn, 3), ev.PagedIn)


def test_a_loss_says_in_which_direction(world: World) -> None:
    world.pager.script("page_out", Lose("gone"), session=S)
    assert world.perform(PageOut) == ev.PageOutLost(op=OpId(1), detail="gone")
    world.pager.script("page_in", Lose("gone"), session=S)
    assert world.perform(PageIn, 2) == ev.PageInLost(op=OpId(2), detail="gone")


def test_a_hanging_operation_is_overdue_once_and_its_outcome_still_counts(world: World) -> None:
    world.pager.script("page_out", hang := Hang(), session=S)
    world.start(PageOut, 7, deadline_in_s=0.2)
    assert hang.entered.wait(PATIENCE_S)
    deadline_ns = world.operations.next_deadline_ns()
    assert deadline_ns is not None
    assert world.operations.take_overdue(deadline_ns - 1) == []
    assert (world.operations.running, world.operations.waiting_for) == (1, 1)
    assert world.operations.take_overdue(deadline_ns) == [ev.OperationOverdue(op=OpId(7))]
    assert world.operations.take_overdue(deadline_ns + NS_PER_S) == []
    assert world.operations.next_deadline_ns() is None
    assert (world.operations.running, world.operations.waiting_for) == (1, 0)
    assert world.operations.sessions == {S}
    hang.release()
    assert isinstance(world.posted.get(timeout=PATIENCE_S), (ev.PagedOut, ev.PageOutRefused))
    world.operations.finished(OpId(7))
    assert world.operations.running == 0
    assert world.operations.sessions == set()


def test_the_nearest_deadline_is_the_next_one(world: World) -> None:
    hangs = [Hang(), Hang()]
    deadlines_ns = []
    for op, (hang, deadline_in_s) in enumerate(zip(hangs, (5000, 2000), strict=True)):
        world.pager.script("page_out", hang, session=S)
        deadlines_ns.append(world.start(PageOut, op, deadline_in_s))
        assert hang.entered.wait(PATIENCE_S)
    assert world.operations.next_deadline_ns() == min(deadlines_ns) == deadlines_ns[1]
    for hang in hangs:
        hang.release()


# --- leaving ------------------------------------------------------------------------------------


def _several(pager: FakePager, count: int) -> list[Target]:
    targets = [Target(SessionId(f"s{n}"), ProcessRef(100 + n, 1)) for n in range(count)]
    for target in targets:
        pager.start(target.session, resident_bytes=100 * MIB)
        LOOP.run(pager.page_out(target, time.monotonic_ns() + 60 * NS_PER_S))
    return targets


def _brought_back(pager: FakePager, targets: list[Target]) -> dict[SessionId, str]:
    async def story() -> dict[SessionId, str]:
        return await bring_back(pager, targets, time.monotonic() + 60)

    return virtual_time.run(story())


def _residency(pager: FakePager, target: Target) -> Residency:
    return LOOP.run(pager.observe(target)).residency


def test_everybody_comes_back_as_far_as_there_is_room() -> None:
    pager = FakePager(350 * MIB)
    targets = _several(pager, 5)
    left = _brought_back(pager, targets)
    assert list(left) == [target.session for target in targets[3:]]
    assert all("not enough free memory" in why for why in left.values())
    assert [_residency(pager, target) for target in targets] == [Residency.RESIDENT] * 3 + [
        Residency.PAGED_OUT
    ] * 2


def test_a_hanging_session_keeps_no_other_out() -> None:
    pager = FakePager(1024 * MIB)
    targets = _several(pager, 4)
    pager.script("page_in", hang := Hang(), session=targets[0].session)
    pager.script("page_in", Raise(RuntimeError("a bug")), session=targets[1].session)
    left = _brought_back(pager, targets)
    assert left == {
        targets[0].session: NO_ANSWER,
        targets[1].session: "RuntimeError: a bug",
    }
    assert all(_residency(pager, target) is Residency.RESIDENT for target in targets[2:])
    hang.release()
