"""Tests of the accounts, against an independent count over the simulation with its faults."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Simulation
from world import World

from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.sched.model.accounts import Account
from kiwi_core.sched.model.happenings import SessionForgotten
from kiwi_core.units import GIB, NS_PER_S, SessionId

A, B = SessionId("a"), SessionId("b")


def account(world: World, session: SessionId) -> Account:
    return world.scheduler.accounts(world.now_ns)[session]


def test_a_burst_is_counted_while_it_goes_on() -> None:
    world = World("gpu 10")
    world.do(0, "a joins")
    world.do(1, "a asks 1")
    world.do(4, "memory")
    assert account(world, A) == Account(held_ns=3 * NS_PER_S, bursts=1)
    world.do(6, "a ends 1")
    world.do(9, "memory")
    assert account(world, A) == Account(held_ns=5 * NS_PER_S, bursts=1)


def test_a_wait_given_up_is_a_wait_and_no_burst() -> None:
    world = World("gpu 10 mode=always")
    world.do(0, "a joins; b joins")
    world.do(1, "a asks 1; b asks 1")
    world.do(3, "b withdraws 1")
    assert account(world, B) == Account(waited_ns=2 * NS_PER_S)


def test_a_suspension_is_told_from_a_first_wait_and_moves_are_added_up() -> None:
    world = World("gpu 10 tq=10 ram=64")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1; memory a=8")
    world.do(3, "b asks 1")
    answers = world.do(11, "time")
    assert "#1 page out a" in answers[-1], answers
    world.do(13, "#1 out 8 2s")
    assert account(world, A) == Account(
        held_ns=12 * NS_PER_S, moving_ns=2 * NS_PER_S, moved_out_bytes=8 * GIB, bursts=1,
        suspensions=1,
    )  # fmt: skip
    assert account(world, B) == Account(waited_ns=10 * NS_PER_S, bursts=1)
    world.do(20, "b ends 1")
    world.do(21, "#2 in 8 1s")
    now = account(world, A)
    assert now.waited_ns == now.suspended_ns == 8 * NS_PER_S
    assert (now.moved_in_bytes, now.moving_ns, now.bursts) == (8 * GIB, 3 * NS_PER_S, 1)


def test_the_final_sums_of_one_that_left_are_told() -> None:
    world = World("gpu 10")
    world.do(0, "a joins; b joins")
    world.do(1, "a asks 1")
    world.do(4, "a dies")
    final = SessionForgotten(A, Account(held_ns=3 * NS_PER_S, bursts=1))
    assert [one for one in world.scheduler.happenings if isinstance(one, SessionForgotten)] == [
        final
    ]
    assert A not in world.scheduler.accounts(world.now_ns)


def test_sums_can_be_added_and_subtracted() -> None:
    one, other = Account(held_ns=5, bursts=2), Account(held_ns=3, moved_in_bytes=7)
    assert one.plus(other) == Account(held_ns=8, moved_in_bytes=7, bursts=2)
    assert one.plus(other).since(other) == one


# --- over the simulation ------------------------------------------------------------------------


class Reckoning(Simulation):
    """Keeps accounts as the daemon does, and also sums up independently how long each session held
    and waited between events, and its moves."""

    def __init__(self, seed: int) -> None:
        self.kept: dict[SessionId, Account] = {}
        """The accounts of all sessions that ever were, by the scheduler's reports."""
        self.known: dict[SessionId, Account] = {}
        self.held_ns: Counter[SessionId] = Counter()
        self.waited_ns: Counter[SessionId] = Counter()
        self.bytes: Counter[tuple[SessionId, str]] = Counter()
        self.moves: dict[int, tuple[SessionId, str]] = {}
        self.seen_ns: int | None = None
        self.holding: tuple[SessionId, ...] = ()
        self.waiting: tuple[SessionId, ...] = ()
        super().__init__(seed)

    def _new_scheduler(self, first_op: int) -> None:
        self.known = {}  # a new daemon's scheduler counts from nothing
        self.holding = self.waiting = ()
        super()._new_scheduler(first_op)

    def tell(self, event: ev.Event) -> None:
        if self.seen_ns is not None:
            elapsed_ns = self.now_ns - self.seen_ns
            self.held_ns.update(dict.fromkeys(self.holding, elapsed_ns))
            self.waited_ns.update(dict.fromkeys(self.waiting, elapsed_ns))
        super().tell(event)
        self.seen_ns = self.now_ns
        if isinstance(event, ev.PagedOut | ev.PagedIn) and event.op in self.moves:
            self.bytes[self.moves.pop(event.op)] += event.moved_bytes
        for action in self.journal[-1].actions if self.journal else ():
            if isinstance(action, act.PageOut | act.PageIn):
                self.moves[action.op] = (action.session, type(action).__name__)
        view = self.scheduler.view(self.now_ns)
        self.holding = view.holders
        leaving = {s.id for s in view.sessions if s.record.leaving}  # they wait for no turn
        self.waiting = tuple(e.session for e in view.queue if e.session not in leaving)
        self._keep()

    def _keep(self) -> None:
        for one in self.scheduler.happenings:
            if isinstance(one, SessionForgotten):
                self._add(one.session, one.account)
                del self.known[one.session]
        for session, account in self.scheduler.accounts(self.now_ns).items():
            self._add(session, account)

    def _add(self, session: SessionId, account: Account) -> None:
        grown = account.since(self.known.get(session, Account()))
        assert min(grown) >= 0, (session, grown)
        self.known[session] = account
        self.kept[session] = self.kept.get(session, Account()).plus(grown)


@pytest.mark.seeded
@pytest.mark.parametrize("chunk", range(4))
def test_the_accounts_agree_with_who_held_and_waited(chunk: int) -> None:
    for seed in range(chunk * 6, chunk * 6 + 6):
        world = Reckoning(seed)
        world.run(350)
        for session, kept in world.kept.items():
            assert kept.held_ns == world.held_ns[session], (seed, session)
            assert kept.waited_ns == world.waited_ns[session], (seed, session)
            assert 0 <= kept.suspended_ns <= kept.waited_ns
            assert kept.moved_out_bytes <= world.bytes[session, "PageOut"]
            assert kept.moved_in_bytes <= world.bytes[session, "PageIn"]
        assert sum(kept.bursts for kept in world.kept.values()) > 0
