"""A whole simulated machine around one ``Scheduler``: notebooks, driver, faults, a virtual clock.

Everything comes from one seed. After every event the books are recomputed, and an independent
model of the GPU (who has how many bytes where, who is held) is compared with what the scheduler
ordered. Run with ``Simulation(seed, plan).run(events)``.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import names
from kiwi_core.sched.policy.api import Terms
from kiwi_core.sched.replay import JournalEntry, JournalHeader
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.sched.session import Home
from kiwi_core.states import AntiThrash, Notice, Priority, Reason, Residency, SessionState
from kiwi_core.units import MIB, NS_PER_MS, NS_PER_S, OpId, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

TOTAL_BYTES = 1000 * MIB
CONFIG = replace(
    DEFAULTS,
    min_run_ns=500 * NS_PER_MS,
    lingering_idle_ns=NS_PER_S,
    hint_interval_ns=4 * NS_PER_S,
    hint_protect_ns=NS_PER_S,
    room_patience_ns=3 * NS_PER_S,
)
BYTES_PER_S = 2000 * MIB
FIXED_NS = 2 * NS_PER_MS
JITTER_NS = 5 * NS_PER_MS
REASONS = (
    Reason.LOCK_TIMEOUT, Reason.DRIVER, Reason.NO_HOST_MEMORY, Reason.UNSUPPORTED,
    Reason.NOT_PERMITTED,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What kind of world it is. Probabilities are per operation or per occasion."""

    sessions: int = 5
    mode: AntiThrash = AntiThrash.ON
    policy: str = "round-robin"
    tq_ns: int = 2 * NS_PER_S
    bytes_max: int = 700 * MIB
    host_budget_bytes: int = 1 << 40
    refuse: float = 0.0
    lose: float = 0.0
    hang: float = 0.0
    mischief: float = 0.0
    """Chance, at each observation, of a kill, withdrawal, detachment, setting, restart …"""

    asks_for_room: bool = False
    """Programs that find no room for an allocation ask for it."""

    @property
    def calm(self) -> bool:
        """Nothing goes wrong: the bound on waits must hold."""
        faults = self.refuse or self.lose or self.hang or self.mischief
        return not faults and self.host_budget_bytes > 1 << 36


def plan_of(seed: int) -> Plan:
    """A different world for each seed; every third one is calm."""
    rng = random.Random(seed ^ 0x5EED)
    modes = (AntiThrash.ON, AntiThrash.ON, AntiThrash.ALWAYS, AntiThrash.OFF)
    plan = Plan(
        sessions=rng.randint(2, 9),
        mode=rng.choice(modes),
        policy=names()[seed % len(names())],
        tq_ns=rng.choice((NS_PER_S // 2, 2 * NS_PER_S, 6 * NS_PER_S)),
        bytes_max=rng.choice((200, 450, 700, 950)) * MIB,
        asks_for_room=rng.random() < 0.5,
    )
    if seed % 3 == 0:
        return plan
    return replace(
        plan,
        refuse=rng.choice((0.0, 0.1, 0.4)),
        lose=rng.choice((0.0, 0.03)),
        hang=rng.choice((0.0, 0.05)),
        mischief=rng.choice((0.02, 0.2)),
        host_budget_bytes=rng.choice((300 * MIB, 1500 * MIB, 1 << 40)),
    )


@dataclass(eq=False)
class Flight:
    """An operation in the simulated driver."""

    action: act.Operation
    verdict: str
    incoming_bytes: int = 0
    done: bool = False
    overdue: bool = False


@dataclass(eq=False)
class Proc:
    """One notebook's process, as it really is."""

    id: SessionId
    home: str = "in"
    held: bool = False
    device_bytes: int = 0
    host_bytes: int = 0
    flight: Flight | None = None

    phase: str = "idle"
    """idle · waiting · running · lingering"""
    burst: int = 0
    begun: bool = False
    work_ns: int = 0
    since_ns: int = 0
    token: int = 0
    wish: tuple[int, int] | None = None
    """Number and bytes of its request for room."""
    asked_ns: int = 0
    bound_ns: int | None = None
    rested_ns: int = -(10**18)
    brought_back_ns: int = -(10**18)
    lost: bool = False
    leaving: bool = False


@dataclass
class Counts:
    events: int = 0
    grants: int = 0
    suspensions: int = 0
    page_ins: int = 0
    refusals: int = 0
    no_room: int = 0
    overdue: int = 0
    lost: int = 0
    kills: int = 0
    restarts: int = 0
    out_of_memory: int = 0
    room_made: int = 0
    room_denied: int = 0
    granted_in_parallel: int = 0
    brought_back: int = 0
    notices: dict[Notice, int] = field(default_factory=dict)


class Simulation:
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
        self.winding_down = False
        self.used_ops: set[OpId] = set()
        self.requests = 0
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
        for action in actions:
            self._perform(action)
        self._check_physics()
        self._check_work_conserving()

    # --- invariants -----------------------------------------------------------------------------

    def _check_physics(self) -> None:
        assert self.free_bytes() >= 0, "more bytes resident than the GPU has"

    def _check_work_conserving(self) -> None:
        st = self.scheduler._st
        busy = st.runners or any(not s.stuck for s in st.ops.values())
        if st.queue and not busy and st.observed:
            idle_for = [s.id for s in st.queue.values() if s.blocked is None]
            assert not idle_for, f"idle GPU, nothing under way, and {idle_for} wait unblocked"
            assert self._will_wake(), "all waiters are blocked and nobody will look again"

    def _will_wake(self) -> bool:
        """Either a deadline is set, or only an observation or an outcome can change anything."""
        st = self.scheduler._st
        in_backoff = any(
            # One that is in does not wait for its own back-off; others may, for its memory.
            s.backoff_until_ns > self.now_ns
            and (s.home is not Home.IN or (s.resident_bytes > 0 and len(st.queue) > 1))
            for s in st.queue.values()
            if not s.op
        )
        return st.wake_ns is not None or not in_backoff

    def free_bytes(self) -> int:
        procs = [*self.procs.values(), *(proc for proc, _ in self.orphans)]
        used = sum(proc.device_bytes for proc in procs)
        incoming = sum(flight.incoming_bytes for flight in self.flights.values())
        return TOTAL_BYTES - self.outside_bytes - used - incoming

    # --- time -----------------------------------------------------------------------------------

    def _at(self, delay_ns: int, happening: Callable[[], None]) -> None:
        self.seq += 1
        heapq.heappush(self.heap, (self.now_ns + delay_ns, self.seq, happening))

    def run(self, events: int) -> Counts:
        """Until so many events have been handled; then everything ends and the books must close."""
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

    # --- notebooks ------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if self.winding_down:
            return
        self.next_id += 1
        proc = Proc(SessionId(f"s{self.next_id}"))
        self.procs[proc.id] = proc
        self.known_bytes[proc.id] = 0
        self.tell(ev.SessionJoined(session=proc.id))
        self._think(proc)

    def _think(self, proc: Proc) -> None:
        proc.phase = "idle"
        proc.token += 1
        pause_ns = int(self.rng.expovariate(1.0) * self.rng.choice((0.05, 1, 4)) * NS_PER_S)
        self._at(pause_ns, self._guarded(proc, self._ask))

    def _guarded(self, proc: Proc, then: Callable[[Proc], None]) -> Callable[[], None]:
        """Only if nothing else has happened to it in the meantime."""
        token = proc.token

        def happening() -> None:
            if proc.token == token and self.procs.get(proc.id) is proc and not self.winding_down:
                then(proc)

        return happening

    def _ask(self, proc: Proc) -> None:
        if proc.leaving:
            return
        proc.burst += 1
        proc.phase = "waiting"
        proc.begun = False
        proc.asked_ns = self.now_ns
        proc.work_ns = int(self.rng.expovariate(1.0) * self.rng.choice((0.1, 1, 5)) * NS_PER_S)
        proc.bound_ns = self._bound_ns()
        self.tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))
        if proc.phase == "waiting" and self.rng.random() < self.plan.mischief:
            self._at(self.rng.randrange(3 * NS_PER_S), self._guarded(proc, self._withdraw))

    def _bound_ns(self) -> int | None:
        """The policy's own bound for somebody who asks now."""
        if not self.plan.calm or self.mode is AntiThrash.OFF:
            return None
        swap_ns = 2 * (TOTAL_BYTES * NS_PER_S // BYTES_PER_S) + 4 * FIXED_NS
        st = self.scheduler._st
        others = self.plan.sessions - 1
        if self.plan.policy == "round-robin":  # only those ahead count
            others = len(st.queue) + st.holders + len(st.chosen) + 1
        terms = Terms(self.longest_tq_ns, CONFIG.min_run_ns, CONFIG.swap_floor_factor)
        return st.policy.bound_ns(terms, others, swap_ns + 2 * JITTER_NS)

    def _withdraw(self, proc: Proc) -> None:
        if proc.phase == "waiting":
            self._rests(proc)
            self.tell(ev.LeaseWithdrawn(session=proc.id, burst=proc.burst))
            self._think(proc)

    def _granted(self, action: act.Grant) -> None:
        proc = self.procs[action.session]
        self.counts.grants += 1
        if proc.lost:
            if proc.phase != "idle":
                self._at(0, self._guarded(proc, self._fail))
            return
        assert proc.home == "in", f"{proc.id} was granted but its memory is {proc.home}"
        assert not proc.held, f"{proc.id} was granted but is held"
        assert proc.flight is None, f"{proc.id} was granted in mid-operation"
        assert action.burst == proc.burst
        others = {id_ for id_ in self.holders if id_ != proc.id and not self._excused(id_)}
        if self.scheduler._st.serialised and proc.id not in self.holders:
            assert not others, f"{proc.id} was granted beside {others} while serialised"
        self.counts.granted_in_parallel += bool(others)
        self.holders.add(proc.id)
        if proc.bound_ns is not None and proc.phase == "waiting":
            waited_ns = self.now_ns - proc.asked_ns
            assert waited_ns <= proc.bound_ns, f"{proc.id} waited {waited_ns}, {proc.bound_ns=}"
        if proc.phase == "waiting":
            proc.phase = "running"
            proc.begun = True
            self._work(proc)
            self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, self._allocate))

    def _excused(self, session_id: SessionId) -> bool:
        """Nobody waits for one whose stopping hangs, nor for left-over threads given up on."""
        proc = self.procs.get(session_id)
        hangs = proc is not None and proc.flight is not None and proc.flight.overdue
        lingers = proc is not None and proc.phase == "lingering"
        return hangs or (lingers and session_id not in self.scheduler._st.runners)

    def _work(self, proc: Proc) -> None:
        """It computes until its work is done, unless it is stopped."""
        proc.token += 1
        proc.since_ns = self.now_ns
        self._at(proc.work_ns, self._guarded(proc, self._finish))

    def _rest(self, proc: Proc) -> None:
        if proc.phase == "running":
            proc.work_ns = max(0, proc.work_ns - (self.now_ns - proc.since_ns))
            proc.token += 1

    def _go_on(self, proc: Proc) -> None:
        if proc.phase == "running":
            self._work(proc)
            self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, self._allocate))

    def _allocate(self, proc: Proc) -> None:
        """Frameworks ask for memory and mostly keep it."""
        grow = self.rng.random() < 0.8
        wish = self.rng.randrange(self.plan.bytes_max) if grow else proc.device_bytes // 2
        if wish - proc.device_bytes <= self.free_bytes():
            proc.device_bytes = wish
        elif self.plan.asks_for_room and proc.wish is None:
            self._ask_for_room(proc, wish - proc.device_bytes)
        else:
            self.counts.out_of_memory += 1

    def _ask_for_room(self, proc: Proc, size: int) -> None:
        self.requests += 1
        proc.wish = (self.requests, size)
        self.tell(ev.RoomWanted(session=proc.id, request=self.requests, bytes=size))

    def _room_answered(self, answer: act.RoomAnswer) -> None:
        proc = self.procs[answer.session]
        assert proc.wish is not None, "an answer that nobody waits for"
        request, size = proc.wish
        assert answer.request == request
        proc.wish = None
        if isinstance(answer, act.RoomDenied):
            self.counts.room_denied += 1
            self.counts.out_of_memory += 1
            return
        self.counts.room_made += 1
        assert proc.flight is None
        assert not proc.held or proc.home == "out"
        if proc.phase not in ("running", "lingering") or proc.home == "out":
            return
        if size <= self.free_bytes():
            proc.device_bytes += size
        else:  # somebody has grown since memory was read
            self._at(NS_PER_MS, self._guarded(proc, lambda p: self._ask_for_room(p, size)))

    def _finish(self, proc: Proc) -> None:
        if self.plan.mischief and self.rng.random() < 0.2:
            proc.phase = "lingering"
            self.tell(ev.BurstLingered(session=proc.id, burst=proc.burst))
            self._at(self.rng.randrange(8 * NS_PER_S), self._guarded(proc, self._finish_lingering))
            return
        self._finish_lingering(proc)

    def _finish_lingering(self, proc: Proc) -> None:
        self.holders.discard(proc.id)
        self._rests(proc)
        self.tell(ev.BurstEnded(session=proc.id, burst=proc.burst))
        self._think(proc)

    def _rests(self, proc: Proc) -> None:
        st = self.scheduler._st
        if proc.id in st.runners or proc.id in st.queue:  # else it was given up earlier
            proc.rested_ns = self.now_ns

    def _fail(self, proc: Proc) -> None:
        """Its memory is lost: the cell raises; later its user restarts the kernel."""
        self.tell(ev.BurstEnded(session=proc.id, burst=proc.burst))
        proc.phase = "idle"
        again = self._ask if self.rng.random() < 0.5 else self._kill
        self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, again))

    # --- the driver -----------------------------------------------------------------------------

    def _perform(self, action: act.Action) -> None:
        if isinstance(action, act.Grant):
            self._granted(action)
        elif isinstance(action, act.Notify):
            counts = self.counts.notices
            counts[action.notice] = counts.get(action.notice, 0) + 1
        elif isinstance(action, act.RoomAnswer):
            self._room_answered(action)
        else:
            self._start(action)

    def _start(self, action: act.Operation) -> None:
        proc = self.procs[action.session]
        assert action.op not in self.used_ops, "an operation id was used twice"
        assert action.deadline_ns > self.now_ns
        assert proc.flight is None, f"two operations on {proc.id}"
        assert not proc.lost, f"an operation on {proc.id}, whose memory is lost"
        self.used_ops.add(action.op)
        if action.cause.endswith("about to be used"):
            self._check_hinted(proc, action)
        verdict = self._verdict()
        flight = Flight(action, verdict)
        moved = proc.device_bytes + proc.host_bytes
        if isinstance(action, act.PageIn):
            self._verify_room(proc, action)
            self.counts.page_ins += 1
            moved = proc.host_bytes
            if action.need_bytes > self.free_bytes():
                flight.verdict = "no room"
                self.counts.no_room += 1
                # Somebody grew since memory was read: a fault, after which the bound is void.
                for other in self.procs.values():
                    other.bound_ns = None
            else:
                flight.incoming_bytes = action.need_bytes
        if isinstance(action, (act.PageOut, act.Suspend)):
            self._rest(proc)  # the lock comes first
        proc.flight = self.flights[action.op] = flight
        is_copy = isinstance(action, (act.PageOut, act.PageIn))
        took_ns = FIXED_NS + (moved * NS_PER_S // BYTES_PER_S if is_copy else 0)
        if flight.verdict == "hang":
            self._at(action.deadline_ns - self.now_ns, lambda: self._overdue(flight))
            took_ns = action.deadline_ns - self.now_ns + self.rng.randrange(30 * NS_PER_S)
        self._at(took_ns, lambda: self._land(proc, flight, took_ns))

    def _check_hinted(self, proc: Proc, action: act.Operation) -> None:
        """In nobody's way, and not too often, however many hints come."""
        view = self.scheduler.view(self.now_ns)
        assert not view.holders, "moved for a hint while somebody runs"
        assert not view.queue, "moved for a hint while somebody waits"
        assert proc.phase in ("idle", "lingering")  # (left-over threads that were given up)
        if isinstance(action, act.PageIn):
            self.counts.brought_back += 1
            if proc.brought_back_ns > proc.rested_ns:
                pause_ns = self.now_ns - proc.brought_back_ns
                assert pause_ns >= CONFIG.hint_interval_ns, f"{proc.id} was brought back twice"
        else:
            last_ns = max(proc.rested_ns, proc.brought_back_ns)
            assert self.now_ns - last_ns >= CONFIG.hint_protect_ns, f"{proc.id} was just in use"

    def _verdict(self) -> str:
        if self.winding_down:
            return "ok"
        draw = self.rng.random()
        for name, chance in (
            ("refused", self.plan.refuse), ("lost", self.plan.lose), ("hang", self.plan.hang)
        ):  # fmt: skip
            if draw < chance:
                return name
            draw -= chance
        return "ok"

    def _verify_room(self, proc: Proc, action: act.PageIn) -> None:
        """By what the scheduler was told, there must be room for all restores under way."""
        assert action.need_bytes >= proc.host_bytes, "a restore without room reserved for all of it"
        known = sum(self.known_bytes.values()) + self.left_bytes
        known += sum(
            flight.action.need_bytes
            for flight in self.flights.values()
            if isinstance(flight.action, act.PageIn)
        )
        capacity = TOTAL_BYTES - self.seen_outside_bytes
        assert known + action.need_bytes <= capacity, "a page-in without reserved room"

    def _overdue(self, flight: Flight) -> None:
        if not flight.done:
            flight.overdue = True
            self.counts.overdue += 1
            self.tell(ev.OperationOverdue(op=flight.action.op))

    def _land(self, proc: Proc, flight: Flight, took_ns: int) -> None:
        """The operation ends, in reality and then in a report."""
        if flight.done:
            return
        flight.done = True
        del self.flights[flight.action.op]
        proc.flight = None
        dead = self.procs.get(proc.id) is not proc
        verdict = flight.verdict
        if verdict == "hang":
            verdict = self.rng.choice(("ok", "refused")) if not self.winding_down else "ok"
        if dead:
            self.orphans = [pair for pair in self.orphans if pair[1] is not flight]
            proc.device_bytes = 0
            verdict = "gone" if verdict != "lost" else "lost"
        outcome = _OUTCOMES[type(flight.action)](self, proc, flight.action, verdict, took_ns)
        self.tell(outcome)
        if self.plan.mischief and self.rng.random() < 0.05:
            self.tell(outcome)  # reported twice: the second one must change nothing

    def suspended(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict in ("refused", "gone", "lost"):
            self._go_on(proc)
            self._left(proc)
            return ev.SuspendRefused(op=action.op, reason=self._reason(verdict))
        proc.held = True
        self._stopped(proc)
        if not self.plan.calm and self.rng.random() < 0.3:
            return ev.Suspended(op=action.op)  # its memory could not be read
        if proc.id in self.procs:
            self.known_bytes[proc.id] = proc.device_bytes
        return ev.Suspended(op=action.op, resident_bytes=proc.device_bytes)

    def resumed(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict in ("refused", "gone", "lost"):
            return ev.ResumeFailed(op=action.op, reason=self._reason(verdict))
        proc.held = False
        self._go_on(proc)
        self._left(proc)
        return ev.Resumed(op=action.op)

    def paged_out(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict == "lost":
            self._lose(proc)
            return ev.PageOutLost(op=action.op, detail="simulated")
        if verdict in ("refused", "gone"):
            if not proc.held:
                self._go_on(proc)
            if not proc.held and proc.home == "in":
                self._left(proc)
            return ev.PageOutRefused(op=action.op, reason=self._reason(verdict))
        moved = proc.device_bytes
        proc.host_bytes += moved
        proc.device_bytes = 0
        proc.home, proc.held = "out", True
        self.known_bytes[proc.id] = 0
        self._stopped(proc)
        return ev.PagedOut(op=action.op, moved_bytes=moved, elapsed_ns=took_ns)

    def paged_in(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict == "lost":
            self._lose(proc)
            return ev.PageInLost(op=action.op, detail="simulated")
        if verdict in ("refused", "gone", "no room"):
            return ev.PageInRefused(op=action.op, reason=self._reason(verdict))
        moved = proc.host_bytes
        proc.device_bytes += moved
        proc.host_bytes = 0
        proc.home, proc.held = "in", False
        self.known_bytes[proc.id] = proc.device_bytes
        if action.cause == "about to be used" and proc.id not in self.scheduler._st.queue:
            proc.brought_back_ns = self.now_ns
        self._go_on(proc)
        self._left(proc)
        return ev.PagedIn(op=action.op, moved_bytes=moved, elapsed_ns=took_ns)

    def _reason(self, verdict: str) -> Reason:
        self.counts.refusals += 1
        if verdict == "no room":
            return Reason.NO_ROOM
        return Reason.GONE if verdict == "gone" else self.rng.choice(REASONS)

    def _stopped(self, proc: Proc) -> None:
        if proc.id in self.holders:
            self.counts.suspensions += 1
        self.holders.discard(proc.id)

    def _left(self, proc: Proc) -> None:
        """A detached process that is whole again is a program like any other from now on."""
        if proc.leaving and self.procs.get(proc.id) is proc:
            self._off(proc)

    def _off(self, proc: Proc) -> None:
        del self.procs[proc.id]
        # What the scheduler knew of it stays known until the next look at rest.
        self.left_bytes += self.known_bytes.pop(proc.id, 0)
        self.outside_bytes += proc.device_bytes
        self._at(self.rng.randrange(20 * NS_PER_S), lambda: self._outside_ends(proc.device_bytes))
        self._at(self.rng.randrange(3 * NS_PER_S), self._arrive)

    def _outside_ends(self, size_bytes: int) -> None:
        self.outside_bytes -= size_bytes

    def _lose(self, proc: Proc) -> None:
        self.counts.lost += 1
        proc.lost = True
        proc.device_bytes = proc.host_bytes = 0
        proc.home, proc.held = "in", False
        self.known_bytes[proc.id] = 0
        self.holders.discard(proc.id)
        if proc.leaving and self.procs.get(proc.id) is proc:
            self._off(proc)
        elif proc.begun and proc.phase != "idle":
            proc.token += 1
            self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, self._fail))

    # --- what is read now and then, and mischief ------------------------------------------------

    def _observe(self) -> None:
        if not self.winding_down:
            self._at(CONFIG.observe_interval_ns, self._observe)
        self._report_memory()
        self._check_wishes()
        if not self.winding_down and self.rng.random() < 0.5:
            self._look_at_a_notebook()
        if not self.winding_down and self.rng.random() < self.plan.mischief:
            self.rng.choice(_MISCHIEF)(self)

    def _check_wishes(self) -> None:
        """Who runs alone, while nothing moves, hears soon whether there is room."""
        st = self.scheduler._st
        for wish in st.wishes.values():
            if wish.promised_ns is None and [*st.runners] == [wish.session.id] and not st.ops:
                age_ns = self.now_ns - wish.asked_ns
                assert age_ns <= CONFIG.room_patience_ns, f"{wish.session.id} waits for room"

    def _report_memory(self) -> None:
        resting = {p.id: p for p in self.procs.values() if p.flight is None}
        if all(flight.overdue for flight in self.flights.values()):
            self.left_bytes = 0
            self.seen_outside_bytes = self.outside_bytes
        resident = {p.id: p.device_bytes for p in self.procs.values()}
        busy = {p.id: self.rng.random() < 0.5 for p in resting.values() if self.rng.random() < 0.7}
        self.known_bytes.update({p.id: p.device_bytes for p in resting.values()})
        self.tell(
            ev.MemoryObserved(free_bytes=self.free_bytes(), resident_bytes=resident, busy=busy)
        )
        for proc in self.procs.values():
            if proc.phase == "lingering" and proc.id not in self.scheduler._st.runners:
                self.holders.discard(proc.id)
        if not self.flights:
            seen = self.scheduler.view(self.now_ns).outside_bytes
            assert seen == self.outside_bytes, "what is outside was not seen right"

    def _look_at_a_notebook(self) -> None:
        """Its user comes back to it."""
        proc = self._someone()
        if proc is None:
            return
        why = self.scheduler.hint_hindrance(proc.id, self.now_ns)
        self.tell(ev.UseExpected(session=proc.id))
        hinted = [a for a in self.journal[-1].actions if a.cause.endswith("about to be used")]
        assert bool(hinted) == (not why), f"{why!r}, but {hinted}"

    def _someone(self) -> Proc | None:
        return self.rng.choice(list(self.procs.values())) if self.procs else None

    def _kill_someone(self) -> None:
        if (proc := self._someone()) is not None:
            self._kill(proc)

    def _kill(self, proc: Proc) -> None:
        """Its memory goes at once, unless an operation is under way: then when that ends."""
        self.counts.kills += 1
        del self.procs[proc.id]
        self.holders.discard(proc.id)
        if proc.flight is None:
            self.known_bytes.pop(proc.id)
        else:
            self.orphans.append((proc, proc.flight))
            self.known_bytes.pop(proc.id)
            self.known_bytes[proc.id] = 0
        self.tell(ev.SessionLost(session=proc.id))
        if proc.flight is None:
            proc.device_bytes = proc.host_bytes = 0
        self._at(self.rng.randrange(3 * NS_PER_S), self._arrive)

    def _detach_someone(self) -> None:
        proc = self._someone()
        if proc is None or proc.leaving:
            return
        proc.leaving = True
        proc.phase = "idle"
        proc.wish = None
        proc.token += 1
        self.holders.discard(proc.id)
        at_rest = proc.flight is None and not proc.held and proc.home == "in"
        if at_rest:
            self._off(proc)
        self.tell(ev.SessionDetached(session=proc.id))

    def _release_someone(self) -> None:
        if (proc := self._someone()) is not None:
            self.tell(ev.ReleaseRequested(session=proc.id))

    def _ask_again(self) -> None:
        """A client that reconnected."""
        for proc in list(self.procs.values()):
            if proc.phase in ("waiting", "running") and not proc.leaving and not proc.lost:
                self.tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))

    def _strange_events(self) -> None:
        nobody = SessionId("nobody")
        for event in (
            ev.LeaseRequested(session=nobody, burst=1),
            ev.BurstEnded(session=nobody, burst=1),
            ev.SessionLost(session=nobody),
            ev.PagedIn(op=OpId(10**9), moved_bytes=1, elapsed_ns=1),
            ev.OperationOverdue(op=OpId(10**9)),
        ):
            self.tell(event)

    def _change_settings(self) -> None:
        self.tq_ns = self.rng.choice((NS_PER_S // 2, NS_PER_S, 5 * NS_PER_S))
        self.longest_tq_ns = max(self.longest_tq_ns, self.tq_ns)
        mode = self.rng.choice((None, AntiThrash.ON, AntiThrash.ALWAYS, AntiThrash.OFF))
        self.mode = mode or self.mode
        policy = self.rng.choice((None, *names()))
        self.tell(ev.SettingsChanged(tq_ns=self.tq_ns, anti_thrash=mode, policy=policy))

    def _change_priority(self) -> None:
        if (proc := self._someone()) is not None:
            priority = self.rng.choice(list(Priority))
            self.tell(ev.PriorityChanged(session=proc.id, priority=priority))

    def _change_budget(self) -> None:
        budget = self.rng.choice((0, 300 * MIB, 1500 * MIB, 1 << 40))
        self.tell(ev.HostBudgetObserved(budget_bytes=budget))

    def _outside_begins(self) -> None:
        size = self.rng.randrange(300 * MIB)
        if size <= self.free_bytes():
            self.outside_bytes += size
            self._at(self.rng.randrange(10 * NS_PER_S), lambda: self._outside_ends(size))

    def _restart(self) -> None:
        """The daemon is killed; operations under way end in the driver, nobody hears of it. The
        new daemon asks the driver, and the clients come back."""
        self.counts.restarts += 1
        for flight in list(self.flights.values()):
            flight.done = True
            proc = self.procs.get(flight.action.session)
            if proc is not None:
                verdict = "refused" if flight.verdict == "no room" else "ok"
                _OUTCOMES[type(flight.action)](self, proc, flight.action, verdict, FIXED_NS)
                proc.flight = None
            del self.flights[flight.action.op]
        for proc, _ in self.orphans:
            proc.flight = None
        self.orphans = []
        self.holders.clear()
        self._new_scheduler(first_op=max(self.used_ops, default=0) + 1)
        procs = list(self.procs.values())
        self.known_bytes = {p.id: p.device_bytes for p in procs}
        self.left_bytes = self.seen_outside_bytes = 0
        for proc in procs:
            self._rejoin(proc)
        self._report_memory()
        for proc in procs:
            if proc.wish is not None:
                request, size = proc.wish
                self.tell(ev.RoomWanted(session=proc.id, request=request, bytes=size))
            if proc.phase == "waiting" and not proc.leaving:
                self.tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))
            elif proc.leaving and proc.id in self.procs:
                self._leave_again(proc)

    def _rejoin(self, proc: Proc) -> None:
        proc.brought_back_ns = -(10**18)  # the new daemon knows of no hint
        residency = Residency.RESIDENT
        if proc.lost:
            residency = Residency.LOST
        elif proc.home == "out":
            residency = Residency.PAGED_OUT
        elif proc.held:
            residency = Residency.LOCKED
        self.tell(
            ev.SessionJoined(
                session=proc.id,
                residency=residency,
                resident_bytes=proc.device_bytes,
                paged_out_bytes=proc.host_bytes,
                mid_burst=proc.phase in ("running", "lingering") and not proc.lost,
                burst=proc.burst,
            )
        )

    def _leave_again(self, proc: Proc) -> None:
        at_rest = proc.flight is None and not proc.held and proc.home == "in"
        if at_rest:
            self._off(proc)
        self.tell(ev.SessionDetached(session=proc.id))

    # --- the end --------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Everybody dies, every operation reports: nothing may be left on any book."""
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


_OUTCOMES = {
    act.Suspend: Simulation.suspended,
    act.Resume: Simulation.resumed,
    act.PageOut: Simulation.paged_out,
    act.PageIn: Simulation.paged_in,
}

_MISCHIEF = (
    Simulation._kill_someone,
    Simulation._detach_someone,
    Simulation._release_someone,
    Simulation._ask_again,
    Simulation._strange_events,
    Simulation._change_settings,
    Simulation._change_priority,
    Simulation._change_budget,
    Simulation._outside_begins,
    Simulation._restart,
)

STATES = frozenset(SessionState)
