"""A whole simulated machine around one ``Scheduler``: notebooks, driver, faults, a virtual clock.

Everything follows from one seed. After every event the derived counts are recomputed, and an
independent model of the GPU (bytes of each process in each place, held processes) is compared with
the scheduler's actions. Run with ``Simulation(seed, plan).run(events)``.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

from simulated_driver import Driver
from simulated_mischief import Mischief
from simulated_notebooks import Notebooks
from simulated_world import (
    CONFIG,
    JITTER_NS,
    TOTAL_BYTES,
    Counts,
    Flight,
    Plan,
    Proc,
    away_plan_of,
    cramped_plan_of,
    owned_plan_of,
    plan_of,
    unguarded_plan_of,
)

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.replay import JournalEntry, JournalHeader
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import Notice, Residency
from kiwi_core.units import NS_PER_S, OpId, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.state import PlaceKept

__all__ = [
    "Plan",
    "Simulation",
    "away_plan_of",
    "cramped_plan_of",
    "owned_plan_of",
    "plan_of",
    "unguarded_plan_of",
]


class Simulation(Notebooks, Driver, Mischief):
    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.plan = plan_of(seed) if plan is None else plan
        self.rng = random.Random(seed)
        self.now_ns = self.rng.randrange(10**12)
        self.counts = Counts()
        self.procs: dict[SessionId, Proc] = {}
        self.flights: dict[OpId, Flight] = {}
        self.orphans: list[tuple[Proc, Flight]] = []
        self.holders: set[SessionId] = set()
        self.outside_bytes = 0
        self.known_bytes: dict[SessionId, int] = {}
        self.left_bytes = 0
        self.seen_outside_bytes = 0
        self.next_id = 0
        self.seq = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.winding_down = self.reading = False
        self.used_ops: set[OpId] = set()
        self.requests = 0
        self.past_overtime_ns = 0
        self.limit = 0
        self._new_scheduler(first_op=1)
        for _ in range(self.plan.sessions):
            self._at(self.rng.randrange(NS_PER_S), self._arrive)
        self._at(0, self._observe)

    # --- the scheduler under test ---------------------------------------------------------------

    def _new_scheduler(self, first_op: int) -> None:
        plan = self.plan
        self.mode = plan.mode
        self.tq_ns = self.longest_tq_ns = plan.tq_ns
        self.scheduler = Scheduler(
            TOTAL_BYTES,
            config=CONFIG,
            tq_ns=plan.tq_ns,
            anti_thrash=plan.mode,
            host_budget_bytes=plan.host_budget_bytes,
            first_op=first_op,
            policy=plan.policy,
            checks=True,
        )
        self.header = JournalHeader(
            total_bytes=TOTAL_BYTES,
            tq_ns=plan.tq_ns,
            anti_thrash=plan.mode,
            host_budget_bytes=plan.host_budget_bytes,
            gpu_uuid="GPU-simulated",
            wall_time_s=0.0,
            first_op=first_op,
            config=CONFIG,
            policy=plan.policy,
        )
        self.journal: list[JournalEntry] = []

    def tell(self, event: ev.Event) -> None:
        actions = self.scheduler.handle(event, self.now_ns)
        self.counts.events += 1
        self.journal.append(JournalEntry(now_ns=self.now_ns, event=event, actions=actions))
        self._note_turns_left_where_they_are()
        for action in actions:
            self._perform(action)
        self._check_physics()
        self._check_work_conserving()
        if self.scheduler.waiting and self.scheduler.unread and not self.reading:
            self.reading = True
            self._at(self.rng.randrange(JITTER_NS), self._read_unread)

    def _note_turns_left_where_they_are(self) -> None:
        """End the turns of stopped processes without a gate, which end once others wait."""
        for proc in self.procs.values():
            if proc.stopped and not proc.guarded and proc.id not in self.scheduler._st.runners:
                self.holders.discard(proc.id)
                self._stops_holding_ungated(proc)

    def _read_unread(self) -> None:
        """Report memory, since a session may wait for what another has left in the GPU. Unless the
        world is calm, the reading is sometimes omitted."""
        self.reading = False
        if self.plan.calm or self.rng.random() < 0.9:
            self._report_memory()

    # --- invariants -----------------------------------------------------------------------------

    def _check_physics(self) -> None:
        assert self.free_bytes() >= 0, "more bytes resident than the GPU has"

    def _check_work_conserving(self) -> None:
        st = self.scheduler._st
        busy = st.runners or any(not s.stuck for s in st.ops.values())
        if st.queue and not busy and st.observed and not self._awaits_reading():
            idle_for = [s.id for s in st.queue.values() if s.blocked is None]
            if idle_for and st.keeps is not None:
                self._check_place_kept(st.keeps)
                return
            assert not idle_for, f"idle GPU, nothing under way, and {idle_for} wait unblocked"
            assert self._will_wake(), "all waiters are blocked and nobody will look again"
            for waiter in st.queue.values():
                barred = (
                    waiter.residency is Residency.SUSPENDED
                    and waiter.blocked is Notice.PAGE_OUT_REFUSED
                )
                assert not barred, f"a refused page-out keeps {waiter.id} from going on"

    def _check_place_kept(self, kept: PlaceKept) -> None:
        """Check that the GPU idles only for the user of a session who may be back soon: for at most
        the time of a switch there and back after the burst, and no longer than a tenancy."""
        st, session = self.scheduler._st, kept.session
        away_ns = 0
        for waiter in st.queue.values():
            moves_ns = st.speed.round_trip_ns(session.footprint_bytes + waiter.footprint_bytes)
            away_ns = max(away_ns, moves_ns + st.policy.floor_ns(st, waiter))
        assert session.want is Want.NONE
        assert self.now_ns < kept.until_ns <= min(session.rested_ns + away_ns, kept.ends_ns)
        assert kept.ends_ns - max(session.tenant_ns, st.contended_ns) <= max(
            self.tq_ns, st.config.tenancy_trips * away_ns
        )
        assert st.wake_ns is not None
        assert st.wake_ns <= kept.until_ns

    def _awaits_reading(self) -> bool:
        st = self.scheduler._st
        patience_ns = st.config.reading_patience_ns
        return any(s.left_ns + patience_ns > self.now_ns for s in st.unread.values())

    def _will_wake(self) -> bool:
        """Return whether a deadline is set, or none is needed: only reports change anything."""
        st = self.scheduler._st
        others = sum(not waiter.stuck for waiter in st.queue.values()) - 1
        in_backoff = any(
            # A session in the GPU does not wait for its own back-off; others may, for its memory.
            s.backoff_until_ns > self.now_ns
            and (s.may_not_come_yet(self.now_ns) or (s.resident_bytes > 0 and others > 0))
            for s in st.queue.values()
            if not s.op and not s.stopped and not must_stay(s)
        )
        return st.wake_ns is not None or not in_backoff

    def free_bytes(self) -> int:
        used = sum(proc.device_bytes for proc in self._everybody())
        incoming = sum(flight.incoming_bytes for flight in self.flights.values())
        return TOTAL_BYTES - self.outside_bytes - used - incoming

    def _everybody(self) -> list[Proc]:
        """Return all processes, including dead ones with an operation in progress."""
        return [*self.procs.values(), *(proc for proc, _ in self.orphans)]

    # --- time -----------------------------------------------------------------------------------

    def _at(self, delay_ns: int, happening: Callable[[], None]) -> None:
        self.seq += 1
        heapq.heappush(self.heap, (self.now_ns + delay_ns, self.seq, happening))

    def run(self, events: int) -> Counts:
        """Run until ``events`` events have been handled, then wind down."""
        self.limit = events
        while self.counts.events < events:
            self._step()
        self.wind_down()
        return self.counts

    def _step(self) -> None:
        deadline_ns = self.scheduler.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self.heap[0][0]:
            assert deadline_ns > self.now_ns or self.counts.events < 2
            self.now_ns = max(self.now_ns, deadline_ns + self.rng.randrange(JITTER_NS))
            self.tell(ev.DeadlinePassed())
            return
        at_ns, _, happening = heapq.heappop(self.heap)
        self.now_ns = max(self.now_ns, at_ns)
        happening()

    # --- the end --------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Kill all processes, let all operations report, and check that nothing is left counted."""
        self.winding_down = True
        for proc in list(self.procs.values()):
            self._kill(proc)
        for _ in range(100_000):
            if not self.flights and not self.heap:
                break
            self._step()
        self._report_memory()
        view = self.scheduler.view(self.now_ns)
        assert view.sessions == ()
        assert view.queue == ()
        assert view.holders == ()
        assert view.paged_out_bytes == 0
        assert view.free_bytes == TOTAL_BYTES - self.outside_bytes
        st = self.scheduler._st
        assert (st.claimed_bytes, st.host_claimed_bytes, st.active_need_bytes) == (0, 0, 0)
        assert not st.ops
        assert self.scheduler.next_deadline_ns() is None
