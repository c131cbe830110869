"""Tests of the turns of programs that ask at a gate without having started the driver.

The scheduler, the gates and the back-off are real. The test itself makes the event loop's periodic
looks at sessions, so that no test waits for a clock.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.links.link import Link
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.daemon.sessions.gates import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    CONTEXT_BACKOFF_MAX_S,
    CONTEXT_BACKOFF_S,
    EmptyTurns,
    Gates,
)
from kiwi_core.daemon.sessions.rooms import RoomRequests
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.peer_limits import ROOM_REQUESTS
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import Residency
from kiwi_core.units import GIB, NS_PER_MS, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


FLOODER, OTHER = SessionId("flooder"), SessionId("other")


# --- the back-off --------------------------------------------------------------------------------


def test_the_back_off_doubles_up_to_its_bound_and_ends_with_a_real_use() -> None:
    turns = EmptyTurns()
    assert turns.left_s(FLOODER, 0.0) == 0, "nobody is put off before an empty turn"
    waits = []
    for _ in range(12):
        turns.was_empty(FLOODER, 100.0)
        waits.append(turns.left_s(FLOODER, 100.0))
    assert waits[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert waits[-1] == max(waits) == BACKOFF_MAX_S
    assert turns.left_s(OTHER, 100.0) == 0
    assert turns.left_s(FLOODER, 100.0 + BACKOFF_MAX_S) == 0
    turns.forget(FLOODER)
    turns.was_empty(FLOODER, 200.0)
    assert turns.left_s(FLOODER, 200.0) == BACKOFF_S


# --- with the scheduler and the gates ------------------------------------------------------------


class Stage:
    """A real scheduler and real gates. The stage also replaces the core, the links, the registry
    and the bursts."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(GIB, host_budget_bytes=GIB)
        self.now_ns = 1
        self.granted: list[SessionId] = []
        self.looks: list[Callable[[], None]] = []
        self.with_driver: set[SessionId] = set()
        self.records = {
            name: SessionRecord(name, ProcessRef(number, 1), 1000)
            for number, name in enumerate((FLOODER, OTHER), start=1)
        }
        self.link = Link(ProcessRef(1, 1), 1000, session=FLOODER)
        self.linked = True
        played: Any = self
        rooms = RoomRequests(played, played, played, Shares()[ROOM_REQUESTS])
        uses_driver = self.with_driver.__contains__
        self.gates = Gates(played, played, played, played, rooms, uses_driver)
        for name in self.records:
            self.feed(ev.SessionJoined(session=name, residency=Residency.RESIDENT))

    # --- the core ---

    def feed(self, event: ev.Event) -> None:
        self.now_ns += NS_PER_MS
        actions = self.scheduler.handle(event, self.now_ns)
        for action in actions:
            if isinstance(action, Grant):
                self.granted.append(action.session)
        self.gates.after(Step(event, actions, self.scheduler.holders, self.now_ns))

    def in_burst(self, record: SessionRecord) -> bool:
        known = self.scheduler.session(record.id)
        return known is not None and known.in_burst

    def after_a_look(self, _record: SessionRecord, go_on: Callable[[], None]) -> None:
        self.looks.append(go_on)

    def look(self) -> None:
        looks, self.looks = self.looks, []
        for go_on in looks:
            go_on()

    # --- the links and the registry ---

    sessions = (FLOODER,)

    def of(self, session: SessionId) -> Sequence[Link]:
        return (self.link,) if session == FLOODER and self.linked else ()

    def get(self, session: SessionId) -> SessionRecord | None:
        return self.records.get(session)

    # --- the bursts ---

    def request(self, record: SessionRecord, client_burst: int) -> None:
        known = self.scheduler.session(record.id)
        assert known is not None
        again = client_burst == record.client_burst and (known.waits or known.in_burst)
        record.client_burst = client_burst
        self.feed(ev.LeaseRequested(session=record.id, burst=known.burst + (not again)))

    # --- what happens ---

    def other_asks(self, burst: int) -> None:
        self.request(self.records[OTHER], burst)

    def other_is_done(self) -> None:
        known = self.scheduler.session(OTHER)
        assert known is not None
        self.feed(ev.BurstEnded(session=OTHER, burst=known.burst))


def staged(play: Callable[[Stage], None]) -> None:
    async def run() -> None:
        play(Stage())

    asyncio.run(run())


def test_a_turn_of_a_program_without_the_driver_ends_when_somebody_waits() -> None:
    def play(stage: Stage) -> None:
        stage.gates.lease_wanted(stage.link)
        assert stage.granted == [FLOODER]
        stage.look()
        assert stage.scheduler.holders == (FLOODER,), "it disturbs nobody"
        stage.other_asks(1)
        assert stage.granted == [FLOODER], "its needs are unknown: it has the GPU for itself"
        stage.look()
        assert stage.granted == [FLOODER, OTHER]
        assert stage.scheduler.holders == (OTHER,)

    staged(play)


def test_the_next_request_after_an_empty_turn_is_put_off() -> None:
    def play(stage: Stage) -> None:
        stage.gates.lease_wanted(stage.link)
        stage.other_asks(1)
        stage.look()
        stage.other_is_done()
        for _ in range(100):
            stage.link.gate_open = False
            stage.gates.lease_wanted(stage.link)
        assert stage.granted == [FLOODER, OTHER], "not asked for before the back-off is over"
        stage.other_asks(2)
        assert stage.granted == [FLOODER, OTHER, OTHER], "nobody is in the way"

    staged(play)


def test_the_turn_of_a_program_that_dies_in_it_ends_once() -> None:
    """On an H100 the daemon looked at such a session again and again, as long as it existed."""

    def play(stage: Stage) -> None:
        stage.gates.lease_wanted(stage.link)
        stage.linked = False
        stage.other_asks(1)
        stage.look()
        assert stage.scheduler.holders == (OTHER,)
        stage.other_asks(2)
        assert not stage.looks
        assert not stage.in_burst(stage.records[FLOODER])

    staged(play)


def test_a_program_that_has_started_the_driver_keeps_its_turn() -> None:
    """Its call may be inside the driver, where it makes the context."""

    def play(stage: Stage) -> None:
        stage.with_driver.add(FLOODER)
        stage.gates.lease_wanted(stage.link)
        stage.other_asks(1)
        stage.look()
        assert stage.scheduler.holders == (FLOODER,)
        stage.other_asks(1)
        assert not stage.looks, "once known, it is not looked at for this again"
        stage.feed(ev.BurstEnded(session=FLOODER, burst=1))
        stage.other_is_done()
        stage.gates.lease_wanted(stage.link)
        assert stage.granted == [FLOODER, OTHER, FLOODER], "nobody puts it off"

    staged(play)


def test_a_real_use_ends_the_back_off() -> None:
    def play(stage: Stage) -> None:
        stage.gates.lease_wanted(stage.link)
        stage.feed(ev.BurstEnded(session=FLOODER, burst=1))  # it lingered until it counted as idle
        stage.gates.lease_wanted(stage.link)
        assert stage.granted == [FLOODER], "put off: that turn was empty, too"
        stage.with_driver.add(FLOODER)
        stage.look()
        assert stage.granted == [FLOODER, FLOODER]

    staged(play)


# --- turns that calls of NVML ask for -------------------------------------------------------------


def test_a_monitor_does_not_take_turns_for_ever() -> None:
    """The driver moves all memory of its program, so its call needs a turn. The pause between two
    such turns doubles; what uses the GPU is never put off by it."""

    def play(stage: Stage) -> None:
        stage.with_driver.add(FLOODER)
        stage.link.owns = False
        for number in range(100):
            stage.gates.context_wanted(stage.link)
            if number == 0:
                assert stage.granted == [FLOODER]
                stage.feed(ev.BurstEnded(session=FLOODER, burst=1))
            stage.link.gate_open = False
        assert stage.granted == [FLOODER]
        stage.gates.lease_wanted(stage.link)
        assert stage.granted == [FLOODER, FLOODER], "a call of CUDA"
        stage.feed(ev.BurstEnded(session=FLOODER, burst=2))
        stage.link.gate_open = stage.link.wants_lease = False
        stage.gates.context_wanted(stage.link)
        assert stage.granted == [FLOODER, FLOODER, FLOODER], "the program works again"

    staged(play)


def test_a_context_that_can_come_alone_takes_no_turn_at_once() -> None:
    def play(stage: Stage) -> None:
        for _ in range(100):
            stage.gates.context_wanted(stage.link)
        assert stage.granted == []
        stage.link.gate_open = True
        stage.gates.context_wanted(stage.link)
        stage.link.session = None
        stage.gates.context_wanted(stage.link)
        assert stage.granted == [], "its gate opens anyway, or it shares nothing"

    staged(play)


def test_the_pause_between_such_turns_doubles_up_to_its_bound() -> None:
    turns = EmptyTurns(CONTEXT_BACKOFF_S, CONTEXT_BACKOFF_MAX_S)
    waits = []
    for _ in range(12):
        turns.was_empty(FLOODER, 100.0)
        waits.append(turns.left_s(FLOODER, 100.0))
    assert waits[:3] == [CONTEXT_BACKOFF_S, 2 * CONTEXT_BACKOFF_S, 4 * CONTEXT_BACKOFF_S]
    assert waits[-1] == CONTEXT_BACKOFF_MAX_S
