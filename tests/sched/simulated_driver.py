"""The simulated driver: performs actions, with faults, and checks that they make sense."""

from __future__ import annotations

from simulated_world import (
    BYTES_PER_S,
    CONFIG,
    FIXED_NS,
    REASONS,
    TOTAL_BYTES,
    Flight,
    Proc,
)

from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S, SessionId

COPIES = (act.PageOut, act.PageIn, act.BringResidueBack)


class Driver:
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
        self._check_may_be_moved(proc, action)
        self.used_ops.add(action.op)
        if action.cause.endswith("about to be used"):
            self._check_hinted(proc, action)
        verdict = self._verdict()
        if isinstance(action, act.PageOut) and proc.cramped and verdict == "ok":
            verdict = "cramped"
        flight = Flight(action, verdict)
        moved = proc.device_bytes + proc.host_bytes
        proc.beside = self._refusing()
        if isinstance(action, act.PageIn):
            self._verify_room(proc, action)
            self.counts.page_ins += 1
            moved = proc.host_bytes
            if action.need_bytes > self.free_bytes():
                self._no_room(flight)
            else:
                flight.incoming_bytes = action.need_bytes
        if isinstance(action, (act.PageOut, act.Suspend)):
            self._rest(proc)  # the lock comes first
        if isinstance(action, act.PageOut):
            self.counts.rests += proc.out
            self.counts.rests_early += self._check_early(proc, action)
        if isinstance(action, act.BringResidueBack):
            self._check_residue(proc, action)
            moved = proc.taken_bytes
            if proc.taken_bytes > self.free_bytes():
                self._no_room(flight)
            else:
                flight.incoming_bytes = proc.taken_bytes
        proc.flight = self.flights[action.op] = flight
        is_copy = isinstance(action, (act.PageOut, act.PageIn, act.BringResidueBack))
        took_ns = FIXED_NS + (moved * NS_PER_S // BYTES_PER_S if is_copy else 0)
        if flight.verdict == "hang":
            self._at(action.deadline_ns - self.now_ns, lambda: self._overdue(flight))
            took_ns = action.deadline_ns - self.now_ns + self.rng.randrange(30 * NS_PER_S)
        self._at(took_ns, lambda: self._land(proc, flight, took_ns))

    def _check_early(self, proc: Proc, action: act.PageOut) -> bool:
        """Check that nobody waits, and that its user has been away, if a rest is taken early."""
        if not action.cause.startswith("idle for long"):
            return False
        assert not self.scheduler._st.queue
        assert self.now_ns - proc.rested_ns >= CONFIG.residue_idle_ns
        return True

    def _check_residue(self, proc: Proc, action: act.BringResidueBack) -> None:
        """Check that what comes back is out, hinders nobody, and does not go back and forth."""
        st = self.scheduler._st
        assert proc.out, f"the contexts of {proc.id} cannot be out"
        assert proc.id not in self.holders
        assert proc.id not in st.queue
        assert not any(
            isinstance(f.action, COPIES) and not f.overdue for f in self.flights.values()
        )
        self.counts.rests_back += 1
        self.counts.rests_back_at_once += proc.stands
        if not proc.stands:
            assert self.now_ns - proc.taken_ns >= CONFIG.residue_pause_ns, (
                f"{proc.id} goes back and forth"
            )
        known = sum(self.known_bytes.values()) + self.left_bytes + action.need_bytes
        assert known <= TOTAL_BYTES - self.seen_outside_bytes, "no room for contexts"

    def _check_may_be_moved(self, proc: Proc, action: act.Operation) -> None:
        """Check that no session without a gate is stopped in mid-burst. A process that does not run
        is only moved out: at the end of its turn, or while it idles behind its gate."""
        stops = isinstance(action, (act.PageOut, act.Suspend))
        if stops and not proc.guarded:
            assert proc.phase != "running", f"{proc.id} has no gate and was stopped in mid-burst"
            assert proc.id not in self.scheduler._st.runners
        if proc.stopped:
            assert stops, f"an operation on {proc.id}, which is stopped"
            behind_its_gate = proc.guarded and isinstance(action, act.PageOut)
            assert proc.id in self.holders or behind_its_gate, f"{proc.id} is stopped"

    def _no_room(self, flight: Flight) -> None:
        """Refuse a page-in, since a process grew after the last reading. This voids the bounds."""
        flight.verdict = "no room"
        self.counts.no_room += 1
        for other in self.procs.values():
            other.bound_ns = None

    def _check_hinted(self, proc: Proc, action: act.Operation) -> None:
        """Check that ``action`` hinders no session, and comes not too often despite many hints."""
        view = self.scheduler.view(self.now_ns)
        assert not view.holders, "moved for a hint while somebody runs"
        waiting = [entry for entry in view.queue if not entry.kept_out]
        assert not waiting, "moved for a hint while somebody waits"
        assert proc.phase in ("idle", "lingering")  # (left-over threads whose burst was ended)
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
        """Check that, as far as the scheduler knows, there is room for all restores in progress."""
        assert action.need_bytes >= proc.host_bytes, "a restore without room reserved for all of it"
        known = sum(self.known_bytes.values()) + self.left_bytes
        known += sum(
            flight.action.need_bytes
            for flight in self.flights.values()
            if isinstance(flight.action, (act.PageIn, act.BringResidueBack))
        )
        capacity = TOTAL_BYTES - self.seen_outside_bytes
        assert known + action.need_bytes <= capacity, "a page-in without reserved room"

    def _refusing(self) -> set[SessionId]:
        """Return whom others need not wait for, because it cannot be stopped at its turn's end."""
        runners = self.scheduler._st.runners.values()
        return {s.id for s in runners if s.backoff_until_ns > self.now_ns and not s.draining}

    def _overdue(self, flight: Flight) -> None:
        if not flight.done:
            flight.overdue = True
            self.counts.overdue += 1
            self.tell(ev.OperationOverdue(op=flight.action.op))

    def _land(self, proc: Proc, flight: Flight, took_ns: int) -> None:
        """End the operation, first in reality, then by a report."""
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
        outcome = OUTCOMES[type(flight.action)](self, proc, flight.action, verdict, took_ns)
        self.tell(outcome)
        if self.plan.mischief and self.rng.random() < 0.05:
            self.tell(outcome)  # reported twice: the second one must change nothing

    def suspended(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict in ("refused", "gone", "lost"):
            self._go_on(proc)
            self._turn_over_if_stopped(proc)
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
        reason = self._page_out_refusal(proc, verdict)
        if reason is not None:
            if not proc.held:
                self._go_on(proc)
                self._turn_over_if_stopped(proc)
            if not proc.held and not proc.out:
                self._left(proc)
            return ev.PageOutRefused(op=action.op, reason=reason)
        moved = proc.device_bytes - self._staying_bytes(proc)
        if proc.owned and proc.out and moved <= self.plan.residue_bytes:
            proc.taken_bytes += moved
            proc.taken_ns = self.now_ns
            if self.rng.random() < 0.3:
                self._at(self.rng.randrange(5 * NS_PER_S), self._guarded(proc, self._stand))
        proc.host_bytes += moved
        proc.device_bytes -= moved
        proc.out = proc.held = True
        session = self.scheduler._st.sessions.get(proc.id)
        believes = session is not None and session.owned
        self.known_bytes[proc.id] = proc.device_bytes if believes else 0
        self._stopped(proc)
        if proc.owned:
            moved = proc.host_bytes
        return ev.PagedOut(
            op=action.op, moved_bytes=moved, elapsed_ns=took_ns, stays_bytes=proc.device_bytes
        )

    def _page_out_refusal(self, proc: Proc, verdict: str) -> Reason | None:
        """Return why a page-out is refused; ``None``: it is not."""
        reason = None
        if verdict == "cramped":
            reason = Reason.NO_JOB_MEMORY
            proc.cramped = self.rng.random() < 0.98
        elif verdict in ("refused", "gone"):
            reason = self._reason(verdict)
        return reason

    def _turn_over_if_stopped(self, proc: Proc) -> None:
        """End the turn of a stopped process: it does not run, so others need not wait for it."""
        if proc.stopped:
            self.holders.discard(proc.id)

    def _staying_bytes(self, proc: Proc) -> int:
        """Return the bytes that a library leaves in the GPU: its context, and sometimes what an
        interrupted page-out could not move. The next page-out takes them."""
        if not proc.owned or proc.out:
            return 0
        if self.plan.refuse and self.rng.random() < 0.1:
            return proc.device_bytes // 2
        return min(proc.device_bytes, self.rng.randrange(self.plan.residue_bytes))

    def paged_in(self, proc: Proc, action: act.Operation, verdict: str, took_ns: int) -> ev.Event:
        if verdict == "lost":
            self._lose(proc)
            return ev.PageInLost(op=action.op, detail="simulated")
        if verdict in ("refused", "gone", "no room"):
            return ev.PageInRefused(op=action.op, reason=self._reason(verdict))
        moved = proc.host_bytes
        proc.device_bytes += moved
        proc.host_bytes = proc.taken_bytes = 0
        proc.stands = False
        proc.out = proc.held = False
        self.known_bytes[proc.id] = proc.device_bytes
        if action.cause == "about to be used" and proc.id not in self.scheduler._st.queue:
            proc.brought_back_ns = self.now_ns
        self._go_on(proc)
        self._left(proc)
        return ev.PagedIn(op=action.op, moved_bytes=moved, elapsed_ns=took_ns)

    def residue_back(
        self, proc: Proc, action: act.Operation, verdict: str, took_ns: int
    ) -> ev.Event:
        if verdict == "lost":
            self._lose(proc)
            return ev.PageInLost(op=action.op, detail="simulated")
        if verdict in ("refused", "gone", "no room"):
            return ev.ResidueRefused(op=action.op, reason=self._reason(verdict))
        moved, proc.taken_bytes, proc.stands = proc.taken_bytes, 0, False
        proc.host_bytes -= moved
        proc.device_bytes += moved
        if proc.id in self.procs:
            self.known_bytes[proc.id] = proc.device_bytes
        return ev.ResidueBack(op=action.op, moved_bytes=moved, elapsed_ns=took_ns)

    def _stand(self, proc: Proc) -> None:
        """Make a call that is none of CUDA: it waits while the driver has the process."""
        if proc.taken_bytes:
            proc.stands = True
            self.tell(ev.ResidueWanted(session=proc.id))

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
        """Forget a detached process whose memory is back: it is now a program outside Kiwi."""
        if proc.leaving and self.procs.get(proc.id) is proc:
            self._off(proc)

    def _off(self, proc: Proc) -> None:
        del self.procs[proc.id]
        # The scheduler counts its known bytes until the next reading without operations.
        self.left_bytes += self.known_bytes.pop(proc.id, 0)
        self.outside_bytes += proc.device_bytes
        self._at(self.rng.randrange(20 * NS_PER_S), lambda: self._outside_ends(proc.device_bytes))
        self._at(self.rng.randrange(3 * NS_PER_S), self._arrive)

    def _outside_ends(self, size_bytes: int) -> None:
        self.outside_bytes -= size_bytes

    def _lose(self, proc: Proc) -> None:
        self.counts.lost += 1
        proc.lost = True
        proc.device_bytes = proc.host_bytes = proc.taken_bytes = 0
        proc.out = proc.held = proc.stands = False
        self.known_bytes[proc.id] = 0
        self.holders.discard(proc.id)
        if proc.leaving and self.procs.get(proc.id) is proc:
            self._off(proc)
        elif proc.begun and proc.phase != "idle":
            proc.token += 1
            self._at(self.rng.randrange(NS_PER_S), self._guarded(proc, self._fail))


OUTCOMES = {
    act.Suspend: Driver.suspended,
    act.Resume: Driver.resumed,
    act.PageOut: Driver.paged_out,
    act.PageIn: Driver.paged_in,
    act.BringResidueBack: Driver.residue_back,
}
