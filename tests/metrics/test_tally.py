"""Tests that the counters agree with the scheduler's own books after every event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from simulation import Simulation
from world import World

from kiwi_core.daemon.engine.tally import OPERATIONS, Tally, Waits
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Operation, PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.model.turn import Want
from kiwi_core.states import Reason
from kiwi_core.units import GIB, NS_PER_MS, NS_PER_S, OpId, SessionId
from kiwi_core.wire import metrics as wire

if TYPE_CHECKING:
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.model.session import Session

NAMES = {Suspend: "suspend", Resume: "resume", PageOut: "page-out", PageIn: "page-in"}
WITH_REASON = (ev.SuspendRefused, ev.ResumeFailed, ev.PageOutRefused, ev.PageInRefused)


# --- seeded simulations ---------------------------------------------------------------------------


@dataclass
class Books:
    """The same numbers, from the scheduler's own records."""

    waits_ns: dict[bool, list[int]] = field(default_factory=lambda: {False: [], True: []})
    """By whether the burst had begun before."""
    moved_bytes: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    out_bytes: dict[SessionId, int] = field(default_factory=dict)
    elapsed_ns: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    moves: dict[str, int] = field(default_factory=lambda: {"out": 0, "in": 0})
    refusals: dict[tuple[str, Reason], int] = field(default_factory=dict)
    lost: int = 0
    overdue: int = 0
    ops: dict[OpId, Operation] = field(default_factory=dict)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    """All sessions that ever existed; their times are final once they have left."""


class Counted(Simulation):
    """A simulation in which every event is also counted, and all is compared after each."""

    tally: Tally
    books: Books
    suspensions = 0
    given_up = 0
    resumed = 0

    def _new_scheduler(self, first_op: int) -> None:
        super()._new_scheduler(first_op)
        self.tally, self.books = Tally(), Books()
        scheduler = self.scheduler
        handle = scheduler.handle

        def handle_and_count(event: ev.Event, now_ns: int) -> list[Action]:
            st = scheduler._st
            queued = {
                (s.id, s.burst): (now_ns if s.turn_ending else s.queued_ns, s.mid_burst)
                for s in st.queue.values()
                if not s.leaving
            }
            # One that is let in again begins a new wait, which may end in the same event.
            aside = (s for s in st.kept_out.values() if s.aside)
            queued |= {(s.id, s.burst): (now_ns, s.mid_burst) for s in aside}
            ran = {(s.id, s.burst) for s in st.runners.values()}
            actions = handle(event, now_ns)
            self.tally.take(scheduler.happenings)
            self._note_outcome(event)
            for action in actions:
                if isinstance(action, Operation):
                    self.books.ops[action.op] = action
                elif isinstance(action, Grant) and action.session in scheduler.holders:
                    which = (action.session, action.burst)
                    if which not in ran:  # otherwise it is only reported again
                        found_again = isinstance(event, ev.SessionJoined)
                        queued_ns, begun = queued.get(which, (now_ns, found_again))
                        self.books.waits_ns[begun].append(now_ns - queued_ns)
            self._compare(now_ns)
            return actions

        scheduler.handle = handle_and_count  # type: ignore[method-assign]

    def _note_outcome(self, event: ev.Event) -> None:
        books = self.books
        action = books.ops.get(getattr(event, "op", OpId(-1)))
        if action is None:
            return
        if isinstance(event, (ev.PagedOut, ev.PagedIn)):
            direction = "out" if isinstance(event, ev.PagedOut) else "in"
            books.moves[direction] += 1
            books.moved_bytes[direction] += self._moved(action.session, event)
            books.elapsed_ns[direction] += event.elapsed_ns
        elif isinstance(event, WITH_REASON):
            key = (NAMES[type(action)], event.reason)
            books.refusals[key] = books.refusals.get(key, 0) + 1
        elif isinstance(event, (ev.PageOutLost, ev.PageInLost)):
            books.lost += 1
        elif isinstance(event, ev.OperationOverdue):
            books.overdue += 1
            return
        del books.ops[action.op]

    def _moved(self, session: SessionId, event: ev.PagedOut | ev.PagedIn) -> int:
        """A page-out reports all bytes that are out by then; those that were out before do not
        count."""
        before_bytes = self.books.out_bytes.pop(session, 0)
        if isinstance(event, ev.PagedIn):
            return event.moved_bytes
        self.books.out_bytes[session] = max(before_bytes, event.moved_bytes)
        return max(0, event.moved_bytes - before_bytes)

    def _compare(self, now_ns: int) -> None:
        tally, books = self.tally, self.books
        books.sessions |= self.scheduler._st.sessions
        everybody = books.sessions.values()
        held_ns = sum(
            s.held_ns + (now_ns - s.granted_ns if s.want is Want.RUNNING or s.turn_ending else 0)
            for s in everybody
        )
        assert tally.session_held_ns(now_ns) == held_ns
        assert tally.held_ns(now_ns) <= held_ns
        for begun, waits in ((False, tally.first_waits), (True, tally.resumption_waits)):
            assert count(waits) == len(books.waits_ns[begun])
            assert waits.sum_ns == sum(books.waits_ns[begun])
        assert tally.suspensions == sum(s.suspensions for s in everybody)
        for direction, moves in (("out", tally.moved_out), ("in", tally.moved_in)):
            assert moves.moves == books.moves[direction]
            assert moves.bytes_moved == books.moved_bytes[direction]
            assert moves.elapsed_ns == books.elapsed_ns[direction]
        assert tally.refusals == books.refusals
        assert tally.lost_out + tally.lost_in == books.lost
        assert tally.overdue == books.overdue
        self.suspensions = max(self.suspensions, tally.suspensions)
        self.given_up = max(self.given_up, tally.waits_given_up)
        self.resumed = max(self.resumed, count(tally.resumption_waits))


@pytest.mark.parametrize("seed", range(24))
def test_every_number_is_the_schedulers(seed: int) -> None:
    Counted(seed).run(1500)


def test_the_simulations_have_everything_in_them() -> None:
    """Otherwise the test above would prove little."""
    seen = [Counted(seed) for seed in range(24)]
    for world in seen:
        world.run(400)
    assert any(world.suspensions for world in seen)
    assert any(world.resumed for world in seen)
    assert any(world.given_up for world in seen)
    assert any(world.counts.restarts for world in seen)
    assert any(world.tally.refusals for world in seen)
    assert any(world.tally.overdue for world in seen)
    assert any(world.books.lost for world in seen)


# --- stories --------------------------------------------------------------------------------------


class Told:
    """``World`` with counters beside its scheduler."""

    def __init__(self, line: str) -> None:
        self.world = World(line)
        self.tally = Tally()
        scheduler = self.world.scheduler
        handle = scheduler.handle

        def handle_and_count(event: ev.Event, now_ns: int) -> list[Action]:
            actions = handle(event, now_ns)
            self.tally.take(scheduler.happenings)
            return actions

        scheduler.handle = handle_and_count  # type: ignore[method-assign]

    def do(self, at_s: float, words: str) -> None:
        self.world.do(at_s, words)

    @property
    def now_ns(self) -> int:
        return self.world.now_ns


def count(waits: Waits) -> int:
    return sum(waits.histogram().counts)


def in_seconds(waits: Waits) -> tuple[int, float]:
    return count(waits), waits.sum_ns / NS_PER_S


def test_the_timeline() -> None:
    """Two do not fit together; the second waits for the first one's quantum and a swap."""
    told = Told("gpu 10 tq=30")
    told.do(0, "a joins; b joins; memory")
    told.do(0, "a asks 1")
    told.do(5, "memory a=8")
    told.do(10, "b asks 1")
    told.do(30, "time")
    told.do(32, "#1 out 8 2s")
    told.do(40, "memory b=8")
    told.do(50, "b ends 1")
    told.do(51, "#2 out 8 1s")
    told.do(53, "#3 in 8 2s")
    told.do(60, "a ends 1")
    tally = told.tally
    assert in_seconds(tally.first_waits) == (2, 22.0)
    assert in_seconds(tally.resumption_waits) == (1, 21.0)
    assert tally.suspensions == 1
    assert tally.held_ns(told.now_ns) == (32 + 18 + 7) * NS_PER_S
    assert tally.session_held_ns(70 * NS_PER_S) == (32 + 18 + 7) * NS_PER_S
    out, into = tally.moved_out.totals(), tally.moved_in.totals()
    assert (out.moves, out.bytes_moved, out.seconds) == (2, 16.0 * GIB, 3.0)
    assert (into.moves, into.last_bytes_per_s) == (1, 4.0 * GIB)
    assert tally.waits_given_up == 0


def test_sessions_side_by_side_count_twice_and_the_gpu_once() -> None:
    told = Told("gpu 10 mode=off")
    told.do(0, "a joins; b joins; memory; a asks 1; b asks 1")
    told.do(10, "a ends 1")
    told.do(15, "b ends 1")
    assert told.tally.held_ns(20 * NS_PER_S) == 15 * NS_PER_S
    assert told.tally.session_held_ns(20 * NS_PER_S) == 25 * NS_PER_S


@pytest.mark.parametrize("end", ["b withdraws 1", "b dies", "b detaches", "b asks 2"])
def test_a_wait_that_is_given_up_is_no_wait(end: str) -> None:
    told = Told("gpu 10 mode=always")
    told.do(0, "a joins; b joins; memory; a asks 1; b asks 1")
    told.do(7, end)
    assert told.tally.waits_given_up == 1
    assert in_seconds(told.tally.first_waits) == (1, 0.0)


def test_a_client_that_comes_back_is_not_counted_again() -> None:
    told = Told("gpu 10 mode=always")
    told.do(0, "a joins; b joins; memory; a asks 1; b asks 1")
    told.do(3, "a asks 1; b asks 1")
    told.do(9, "a ends 1")
    assert in_seconds(told.tally.first_waits) == (2, 9.0)


def test_a_grant_that_only_tells_of_a_loss_is_none() -> None:
    told = Told("gpu 10")
    told.do(0, "a joins lost; memory")
    told.do(1, "a asks 1")
    assert count(told.tally.first_waits) == 0
    told.do(2, "a ends 1")
    assert told.tally.waits_given_up == 0


def test_what_an_earlier_daemon_suspended_waits_to_go_on() -> None:
    told = Told("gpu 10")
    told.do(0, "a joins locked 4 mid 3")
    told.do(2, "memory a=4")
    told.do(5, "#1 resumed")
    assert in_seconds(told.tally.resumption_waits) == (1, 5.0)
    assert count(told.tally.first_waits) == 0


def test_outcomes_that_nobody_ordered_are_not_counted() -> None:
    told = Told("gpu 10")
    tally = told.tally
    for event in (
        ev.PagedOut(op=OpId(7), moved_bytes=1, elapsed_ns=1),
        ev.PagedIn(op=OpId(7), moved_bytes=1, elapsed_ns=1),
        ev.PageOutLost(op=OpId(7)),
        ev.PageInRefused(op=OpId(7), reason=Reason.NO_ROOM),
        ev.OperationOverdue(op=OpId(7)),
    ):
        told.world.scheduler.handle(event, 5)
    assert tally.moved_out.moves == tally.moved_in.moves == tally.lost_out == tally.overdue == 0
    assert not tally.refusals


def test_a_burst_of_a_session_that_nobody_knows_is_not_counted() -> None:
    told = Told("gpu 10")
    told.do(0, "a asks 1; a withdraws 1; a dies")
    assert told.tally.waits_given_up == 0


def test_a_turn_that_ends_because_its_process_is_stopped_counts_as_a_suspension() -> None:
    told = Told("gpu 10 tq=10")
    told.do(0, "a joins; a unguarded; b joins; memory")
    told.do(1, "a asks 1; memory a=4")
    told.do(2, "b asks 1; a stops by Ctrl-Z")
    (view,) = [s for s in told.world.scheduler.view(told.now_ns).sessions if s.id == "a"]
    assert told.tally.suspensions == view.record.suspensions == 1


# --- numbers --------------------------------------------------------------------------------------


def test_a_wait_is_counted_below_its_bound() -> None:
    waits = Waits()
    for wait_ns in (0, 5 * NS_PER_MS, 5 * NS_PER_MS + 1, 600 * NS_PER_S, 601 * NS_PER_S):
        waits.add(wait_ns)
    counts = waits.histogram().counts
    assert counts[:2] == [2, 1]
    assert counts[-2:] == [1, 1]
    assert sum(counts) == 5
    assert len(counts) == len(wire.WAIT_BOUNDS_S) + 1


def test_operations_are_called_as_the_protocol_says() -> None:
    assert tuple(OPERATIONS.values()) == wire.OPERATIONS


def test_the_rest_of_a_page_out_that_was_cut_short_is_counted_once() -> None:
    """Each report has all bytes that are out by then."""
    told = Told("gpu 10")
    told.do(0, "a joins; b joins; memory")
    told.do(1, "memory a=8 owned=a; a releases")
    told.do(2, "#1 out 3 1s stays=5; memory a=5 owned=a; b wants 9")
    told.do(3, "#2 out 5 1s stays=3")
    assert (told.tally.moved_out.moves, told.tally.moved_out.bytes_moved) == (2, 5 * GIB)
