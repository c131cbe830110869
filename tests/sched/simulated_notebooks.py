"""The users and programs of the simulation: notebooks that think, ask, compute and grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulated_world import BYTES_PER_S, CONFIG, FIXED_NS, JITTER_NS, TOTAL_BYTES, Proc

from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.sched.model.policy import TurnSettings
from kiwi_core.sched.rules.unguarded_and_stopped import CANNOT_BE_HELD
from kiwi_core.states import AntiThrash, Notice
from kiwi_core.units import NS_PER_MS, NS_PER_S, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable


class Notebooks:
    def _arrive(self) -> None:
        if self.winding_down:
            return
        self.next_id += 1
        proc = Proc(SessionId(f"s{self.next_id}"))
        proc.owned = bool(self.plan.owned) and self.rng.random() < self.plan.owned
        proc.cramped = bool(self.plan.cramped) and self.rng.random() < self.plan.cramped
        self.procs[proc.id] = proc
        self.known_bytes[proc.id] = 0
        self.tell(ev.SessionJoined(session=proc.id, owner=self._owner(proc)))
        if self.plan.unguarded and self.rng.random() < self.plan.unguarded:
            proc.guarded = False
            self.tell(ev.GuardChanged(session=proc.id, guarded=False))
        self._think(proc)

    def _owner(self, proc: Proc) -> str:
        return f"u{int(proc.id[1:]) % self.plan.owners}" if self.plan.owners else ""

    def _think(self, proc: Proc) -> None:
        proc.phase = "idle"
        proc.token += 1
        seconds = (4, 30) if proc.cramped or self.plan.away else (0.05, 1, 4)
        pause_ns = int(self.rng.expovariate(1.0) * self.rng.choice(seconds) * NS_PER_S)
        self._at(pause_ns, self._guarded(proc, self._ask))

    def _guarded(self, proc: Proc, then: Callable[[Proc], None]) -> Callable[[], None]:
        """Return a call of ``then`` that does nothing if ``proc`` has done anything else since."""
        token = proc.token

        def happening() -> None:
            if proc.token != token or self.procs.get(proc.id) is not proc or self.winding_down:
                return
            if proc.stopped:
                self._at(50 * NS_PER_MS, happening)
            else:
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
        proc.overtime_ns = self._overtime_ns()
        self.tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))
        if proc.phase == "waiting" and self.rng.random() < self.plan.mischief:
            self._at(self.rng.randrange(3 * NS_PER_S), self._guarded(proc, self._withdraw))

    def _bound_ns(self) -> int | None:
        """Return the policy's own bound for a session that asks now."""
        if not self.plan.calm or self.mode is AntiThrash.OFF:
            return None
        swap_ns = 2 * (TOTAL_BYTES * NS_PER_S // BYTES_PER_S) + 4 * FIXED_NS
        st = self.scheduler._st
        others = self.plan.sessions - 1
        if self.plan.policy == "round-robin":  # only those ahead count
            others = len(st.queue) + st.holders + len(st.chosen) + 1
        if self.plan.owners:  # the most sessions that one of them has, times their number
            others = max(others, -(-self.plan.sessions // self.plan.owners) * self.plan.owners)
        turn_settings = TurnSettings(
            self.longest_tq_ns,
            CONFIG.min_run_ns,
            CONFIG.swap_floor_factor,
            CONFIG.tenancy_trips,
        )
        return st.policy.bound_ns(turn_settings, others, swap_ns + 2 * JITTER_NS)

    def _overtime_ns(self) -> int:
        """Return how long sessions without a gate have held the lease. Their turns cannot be ended,
        so a waiter's bound is longer by this time."""
        since = (proc.held_since_ns for proc in self.procs.values())
        return self.past_overtime_ns + sum(self.now_ns - at for at in since if at is not None)

    def _withdraw(self, proc: Proc) -> None:
        if proc.phase == "waiting":
            self._rests(proc)
            self.tell(ev.LeaseWithdrawn(session=proc.id, burst=proc.burst))
            self._think(proc)

    def _serialises_after(self, grant: act.Grant) -> bool:
        """Whether the scheduler changed the mode after it had decided on ``grant``, in the same
        pass: a session that leaves and comes back takes the room into which both might grow."""
        actions = self.journal[-1].actions
        later = actions[actions.index(grant) :]
        return any(isinstance(a, act.Notify) and a.notice is Notice.SERIALISING for a in later)

    def _granted(self, action: act.Grant) -> None:
        proc = self.procs[action.session]
        self.counts.grants += 1
        if proc.lost:
            if proc.phase != "idle":
                self._at(0, self._guarded(proc, self._fail))
            return
        assert not proc.out, f"{proc.id} was granted but its memory is out"
        assert not proc.held, f"{proc.id} was granted but is held"
        assert proc.flight is None, f"{proc.id} was granted in mid-operation"
        assert not proc.stopped or proc.id in self.holders, f"{proc.id} was granted but is stopped"
        assert action.burst == proc.burst
        others = {id_ for id_ in self.holders if id_ != proc.id and not self._excused(id_)}
        others -= proc.beside | self._refusing()
        proc.beside.clear()
        unheld = action.cause == CANNOT_BE_HELD and not proc.guarded
        goes_on = proc.id in self.holders
        assert not proc.kept_out or unheld or goes_on, f"{proc.id} was granted but is kept out"
        serialised = self.scheduler._st.serialised and not self._serialises_after(action)
        if serialised and proc.id not in self.holders and not unheld:
            assert not others, f"{proc.id} was granted beside {others} while serialised"
        self.counts.granted_in_parallel += bool(others)
        if not goes_on:
            proc.granted_ns = self.now_ns
        self.holders.add(proc.id)
        if not proc.guarded and proc.held_since_ns is None:
            proc.held_since_ns = self.now_ns
            self.counts.unguarded_grants += 1
        if proc.bound_ns is not None and proc.phase == "waiting":
            overtime_ns = self._overtime_ns() - proc.overtime_ns
            waited_ns = self.now_ns - proc.asked_ns - overtime_ns
            assert waited_ns <= proc.bound_ns, f"{proc.id} waited {waited_ns}, {proc.bound_ns=}"
        if proc.phase == "waiting":
            proc.phase = "running"
            proc.begun = True
            self._work(proc)
            self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, self._allocate))

    def _excused(self, session_id: SessionId) -> bool:
        """Return whether others need not wait for a session: the operation that stops it hangs, or
        the scheduler has ended its lingering burst."""
        proc = self.procs.get(session_id)
        hangs = proc is not None and proc.flight is not None and proc.flight.overdue
        lingers = proc is not None and proc.phase == "lingering"
        return hangs or (lingers and session_id not in self.scheduler._st.runners)

    def _work(self, proc: Proc) -> None:
        """Let ``proc`` compute until its work is done, unless it is stopped."""
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
        """Grow or shrink ``proc``, as frameworks do, which mostly keep their memory."""
        grow = self.rng.random() < 0.8
        wanted = self.rng.randrange(self.plan.bytes_max) if grow else proc.device_bytes // 2
        if wanted - proc.device_bytes <= self.free_bytes():
            proc.device_bytes = wanted
        elif self.plan.asks_for_room and proc.wanted is None:
            self._ask_for_room(proc, wanted - proc.device_bytes)
        else:
            self.counts.out_of_memory += 1

    def _ask_for_room(self, proc: Proc, size: int) -> None:
        self.requests += 1
        proc.wanted = (self.requests, size)
        self.tell(ev.RoomWanted(session=proc.id, request=self.requests, bytes=size))

    def _room_answered(self, answer: act.RoomAnswer) -> None:
        proc = self.procs[answer.session]
        assert proc.wanted is not None, "an answer that nobody waits for"
        request, size = proc.wanted
        assert answer.request == request
        proc.wanted = None
        if isinstance(answer, act.RoomDenied):
            self.counts.room_denied += 1
            self.counts.out_of_memory += 1
            return
        self.counts.room_made += 1
        assert proc.flight is None
        assert not proc.held or proc.out
        if proc.phase not in ("running", "lingering") or proc.out:
            return
        if size <= self.free_bytes():
            proc.device_bytes += size
        else:  # another process has grown since memory was read
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
        self._stops_holding_ungated(proc)
        self._rests(proc)
        proc.phase = "idle"
        ended_ns = self.now_ns if self.rng.random() < 0.2 else None  # its memory was not read
        self.tell(ev.BurstEnded(session=proc.id, burst=proc.burst, ended_ns=ended_ns))
        self._think(proc)

    def _stops_holding_ungated(self, proc: Proc) -> None:
        if proc.held_since_ns is not None:
            self.past_overtime_ns += self.now_ns - proc.held_since_ns
            proc.held_since_ns = None

    def _rests(self, proc: Proc) -> None:
        st = self.scheduler._st
        if proc.id in st.runners or proc.id in st.queue:  # otherwise its burst ended earlier
            proc.rested_ns = self.now_ns

    def _fail(self, proc: Proc) -> None:
        """Let the cell fail, since its memory is lost; later its user restarts or asks again."""
        self.tell(ev.BurstEnded(session=proc.id, burst=proc.burst))
        proc.phase = "idle"
        again = self._ask if self.rng.random() < 0.5 else self._kill
        self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, again))
