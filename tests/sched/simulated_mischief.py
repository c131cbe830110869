"""The periodic readings, and other events: kills, settings, a daemon's restart."""

from __future__ import annotations

from simulated_driver import OUTCOMES
from simulated_world import CONFIG, FIXED_NS, Proc

from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import names
from kiwi_core.states import AntiThrash, Priority, Residency
from kiwi_core.units import MIB, NS_PER_S, OpId, SessionId


class Mischief:
    def _observe(self) -> None:
        if not self.winding_down:
            self._at(CONFIG.observe_interval_ns, self._observe)
        self._report_memory()
        self._check_wishes()
        if not (self.winding_down or self.plan.away) and self.rng.random() < 0.5:
            self._look_at_a_notebook()
        if not self.winding_down and self.rng.random() < self.plan.mischief:
            more = OWNED_MISCHIEF * bool(self.plan.owned)
            more += UNGUARDED_MISCHIEF * bool(self.plan.unguarded)
            more += CRAMPED_MISCHIEF * bool(self.plan.cramped)
            self.rng.choice(MISCHIEF + more)(self)

    def _check_wishes(self) -> None:
        """Check that a session that runs alone, while nothing moves, soon hears about room."""
        st = self.scheduler._st
        for wanted in st.room_requests.values():
            if wanted.promised_ns is None and [*st.runners] == [wanted.session.id] and not st.ops:
                age_ns = self.now_ns - wanted.asked_ns
                assert age_ns <= CONFIG.room_patience_ns, f"{wanted.session.id} waits for room"

    def _report_memory(self) -> None:
        resting = {p.id: p for p in self.procs.values() if p.flight is None}
        if all(flight.overdue for flight in self.flights.values()):
            self.left_bytes = 0
            self.seen_outside_bytes = self.outside_bytes
        resident = {p.id: p.device_bytes for p in self.procs.values()}
        busy = {p.id: self.rng.random() < 0.5 for p in resting.values() if self.rng.random() < 0.7}
        # Otherwise idle memory would stay needlessly.
        if (self.plan.unguarded and self.plan.calm) or self.plan.cramped:
            busy = {
                id_: works and self.procs[id_].phase == "running" for id_, works in busy.items()
            }
        self.known_bytes.update({p.id: p.device_bytes for p in resting.values()})
        self.tell(
            ev.MemoryObserved(
                free_bytes=self.free_bytes(),
                resident_bytes=resident,
                busy=busy,
                owned=[p.id for p in self.procs.values() if p.owned],
                taken={p.id: p.taken_bytes for p in resting.values() if p.taken_bytes},
            )
        )
        for proc in self.procs.values():
            if proc.phase == "lingering" and proc.id not in self.scheduler._st.runners:
                self.holders.discard(proc.id)
        if not self.flights:
            seen = self.scheduler.view(self.now_ns).outside_bytes
            assert seen == self.outside_bytes, "what is outside was not seen right"

    def _look_at_a_notebook(self) -> None:
        """Let a user come back to a notebook, which gives a hint."""
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
        """Kill ``proc``. Its memory is freed at once, or when the operation on it ends."""
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
        proc.leaving, proc.kept_out = True, False
        proc.phase = "idle"
        proc.wanted = None
        proc.token += 1
        self.holders.discard(proc.id)
        at_rest = proc.flight is None and not proc.held and not proc.out
        if at_rest:
            self._off(proc)
        self.tell(ev.SessionDetached(session=proc.id))

    def _release_someone(self) -> None:
        if (proc := self._someone()) is not None:
            self.tell(ev.ReleaseRequested(session=proc.id))

    def _ask_again(self) -> None:
        """Repeat the requests, as a client does that reconnected."""
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

    def _another_process(self) -> None:
        """Start a process whose memory no library owns, or end it."""
        proc = self._someone()
        if proc is not None and proc.flight is None:
            proc.owned = not proc.owned

    def _free_while_out(self) -> None:
        """Free memory of sessions that are out, which a program may do although it is held."""
        for proc in self.procs.values():
            if proc.out and proc.flight is None:
                proc.device_bytes //= 2
                proc.host_bytes //= 2
                proc.taken_bytes = min(proc.taken_bytes, proc.host_bytes)

    def _gate_changes(self) -> None:
        """Let a session gain a process without a gate, or lose it."""
        proc = self._someone()
        if proc is not None:
            proc.guarded = not proc.guarded
            self.tell(ev.GuardChanged(session=proc.id, guarded=proc.guarded))

    def _stop_someone(self) -> None:
        proc = self._someone()
        if proc is not None:
            self._stop(proc, for_s=10)

    def _stop_one_with_too_little_ram(self) -> None:
        cramped = [proc for proc in self.procs.values() if proc.cramped and proc.device_bytes]
        if cramped:
            self._stop(self.rng.choice(cramped), for_s=30)

    def _stop(self, proc: Proc, for_s: int) -> None:
        """Stop ``proc`` for at most ``for_s`` seconds, unless it is stopped."""
        if not proc.stopped:
            self.counts.stops += 1
            proc.stopped = True
            self.tell(ev.SessionStopped(session=proc.id, why="stopped by Ctrl-Z"))
            self._at(self.rng.randrange(for_s * NS_PER_S), lambda: self._continue(proc))

    def _keep_someone_out(self) -> None:
        """Keep a session out for a while, in which no bound holds for it."""
        proc = self._someone()
        if proc is not None and not proc.leaving and not proc.kept_out:
            self.counts.kept_out += 1
            proc.kept_out, proc.bound_ns = True, None
            self.tell(ev.SuspensionRequested(session=proc.id, by="an admin"))
            self._at(self.rng.randrange(20 * NS_PER_S), lambda: self._let_go(proc))

    def _let_go(self, proc: Proc) -> None:
        proc.kept_out = False
        self.tell(ev.ResumptionRequested(session=proc.id))

    def _continue(self, proc: Proc) -> None:
        proc.stopped = False
        self.tell(ev.SessionContinued(session=proc.id))

    def _restart(self) -> None:
        """Kill the daemon. Operations in progress end in the driver without a report. The new
        daemon asks the driver, and the clients come back."""
        self.counts.restarts += 1
        self._all_end_unheard()
        self.holders.clear()
        self._new_scheduler(first_op=max(self.used_ops, default=0) + 1)
        procs = list(self.procs.values())
        self.known_bytes = {p.id: p.device_bytes for p in procs}
        self.left_bytes = self.seen_outside_bytes = 0
        for proc in procs:
            self._rejoin(proc)
        self._report_memory()
        for proc in procs:
            if proc.wanted is not None:
                request, size = proc.wanted
                self.tell(ev.RoomWanted(session=proc.id, request=request, bytes=size))
            if proc.phase == "waiting" and not proc.leaving:
                self.tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))
            elif proc.leaving and proc.id in self.procs:
                self._leave_again(proc)

    def _all_end_unheard(self) -> None:
        for flight in list(self.flights.values()):
            flight.done = True
            proc = self.procs.get(flight.action.session)
            if proc is not None:
                verdict = "refused" if flight.verdict == "no room" else "ok"
                OUTCOMES[type(flight.action)](self, proc, flight.action, verdict, FIXED_NS)
                proc.flight = None
            del self.flights[flight.action.op]
        for proc, _ in self.orphans:
            proc.flight = None
        self.orphans = []

    def _rejoin(self, proc: Proc) -> None:
        proc.brought_back_ns = -(10**18)  # the new daemon does not know about hints
        proc.stopped = False
        residency = Residency.RESIDENT
        if proc.lost:
            residency = Residency.LOST
        elif proc.out:
            residency = Residency.PAGED_OUT
        elif proc.held:
            residency = Residency.SUSPENDED
        self.tell(
            ev.SessionJoined(
                session=proc.id,
                residency=residency,
                resident_bytes=proc.device_bytes,
                paged_out_bytes=proc.host_bytes,
                mid_burst=proc.phase in ("running", "lingering") and not proc.lost,
                burst=proc.burst,
                guarded=None if proc.guarded else False,
                kept_out="an admin" if proc.kept_out and not proc.leaving else "",
                owner=self._owner(proc),
            )
        )

    def _leave_again(self, proc: Proc) -> None:
        at_rest = proc.flight is None and not proc.held and not proc.out
        if at_rest:
            self._off(proc)
        self.tell(ev.SessionDetached(session=proc.id))


MISCHIEF = (
    Mischief._kill_someone,
    Mischief._detach_someone,
    Mischief._release_someone,
    Mischief._ask_again,
    Mischief._strange_events,
    Mischief._change_settings,
    Mischief._change_priority,
    Mischief._change_budget,
    Mischief._outside_begins,
    Mischief._restart,
    Mischief._keep_someone_out,
)

OWNED_MISCHIEF = (
    Mischief._another_process,
    Mischief._free_while_out,
)

CRAMPED_MISCHIEF = (Mischief._stop_one_with_too_little_ram,) * 3

UNGUARDED_MISCHIEF = (
    Mischief._gate_changes,
    Mischief._stop_someone,
    Mischief._stop_someone,
)
