"""Hypothesis looks for the shortest sequence of events that breaks an invariant.

Seeds give breadth; this gives short counter-examples. The scheduler audits itself after each event
(``checks=True``); the machine knows what the driver did and which processes hold what.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import names
from kiwi_core.sched.rules.unguarded_and_stopped import CANNOT_BE_HELD
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Notice, Priority, Reason, Residency
from kiwi_core.units import GIB, NS_PER_S

TOTAL = 10 * GIB
CONTEXT = GIB // 8
NAMES = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.integers(0, 7).map(lambda gib: gib * GIB)
FAULTS = st.sampled_from(
    [Reason.LOCK_TIMEOUT, Reason.UNSUPPORTED, Reason.DRIVER, Reason.NO_JOB_MEMORY]
)


class Machine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(list(AntiThrash)),
        budget=st.sampled_from([0, 5 * GIB, 100 * GIB]),
        policy=st.sampled_from(names()),
        cramped=st.sets(NAMES),
    )
    def begin(self, mode, budget, policy, cramped):
        self.cramped = cramped  # names whose jobs have too little RAM for a page-out
        self.scheduler = Scheduler(
            TOTAL,
            anti_thrash=mode,
            host_budget_bytes=budget,
            checks=True,
            tq_ns=10 * NS_PER_S,
            policy=policy,
        )
        self.now_ns = 0
        self.next_id = 0
        self.ids = {}  # name -> session id of the process that has it now
        self.bursts = {}
        self.device = {}
        self.host = {}
        self.held = set()
        self.requests = 0
        self.asked = {}  # bytes, by session and number of the request
        self.flying = {}
        self.holders = set()
        self.granted_ns = {}  # when the session was last granted the lease, and for which burst
        self.granted_burst = {}
        self.used = {}  # when the session's last burst ended
        self.back = {}  # when the session's last page-in for a hint ended
        self.owned = set()  # sessions whose memory a library owns
        self.unsized = set()  # sessions of which nobody says what they have in the GPU
        self.unguarded = set()
        self.stopped = set()  # sessions whose process does not run
        self.have_stood = set()  # all that were stopped at any time
        self.kept_out = set()
        self.taken = {}  # bytes that the driver took of what a library had left in the GPU
        self.taken_ns = {}
        self.stands = set()  # sessions with a call that is known to wait for that

    def feed(self, event):
        actions = self.scheduler.handle(event, self.now_ns)
        # The turn of a stopped session without a gate ends once others wait.
        self.holders -= (self.stopped & self.unguarded) - set(self.scheduler.holders)
        for action in actions:
            if isinstance(action, act.Grant):
                self.granted(action)
            elif isinstance(action, act.RoomAnswer):
                self.answered(action)
            elif isinstance(action, act.Operation):
                self.ordered(action)

    def answered(self, answer):
        size = self.asked.pop((answer.session, answer.request))
        if isinstance(answer, act.RoomMade):
            assert all(order.session != answer.session for order in self.flying.values())
            held = sum(s.record.resident_bytes for s in self.scheduler.view(self.now_ns).sessions)
            assert held + size <= TOTAL, "room was promised that others are known to hold"

    def who_keeps_out(self, session):
        known = self.scheduler.view(self.now_ns).session(session)
        return known.record.kept_out if known is not None else ""

    def granted(self, action):
        session = action.session
        if self.scheduler.view(self.now_ns).session(session).state.value == "lost":
            return
        assert session not in self.held
        assert session not in self.stopped or session in self.holders
        assert not self.host.get(session)
        assert all(order.session != session for order in self.flying.values())
        unheld = action.cause == CANNOT_BE_HELD and session in self.unguarded
        assert unheld or session in self.holders or not self.who_keeps_out(session)
        serialised = self.scheduler.view(self.now_ns).serialised
        if serialised and session not in self.holders and not unheld:
            unstoppable = {
                s.id
                for s in self.scheduler.view(self.now_ns).sessions
                if s.record.problem in (Notice.STUCK, Notice.PAGE_OUT_REFUSED)
            }
            assert self.holders - unstoppable <= set(), "two holders while serialised"
        self.holders.add(session)
        self.granted_ns[session] = self.now_ns
        self.granted_burst[session] = action.burst

    def ordered(self, action):
        assert action.op not in self.flying
        assert all(order.session != action.session for order in self.flying.values())
        self.check_may_be_moved(action)
        if isinstance(action, act.PageIn):
            assert action.need_bytes >= self.host[action.session]
            taken = sum(self.device.values()) + self.coming_bytes()
            assert taken + action.need_bytes <= TOTAL
        if isinstance(action, act.BringResidueBack):
            self.check_residue(action)
        if action.cause.endswith("about to be used"):
            view = self.scheduler.view(self.now_ns)
            assert not view.holders
            assert all(entry.kept_out for entry in view.queue)
            self.check_not_too_often(action)
        self.flying[action.op] = action

    def check_may_be_moved(self, action):
        """Check that no session without a gate is stopped in mid-burst. A process that is stopped
        is only moved out: at the end of its turn, or while it idles behind its gate."""
        session, stops = action.session, isinstance(action, (act.Suspend, act.PageOut))
        if session in self.stopped:
            assert stops
            behind_its_gate = session not in self.unguarded and isinstance(action, act.PageOut)
            assert session in self.holders or behind_its_gate
        if stops and session in self.unguarded:
            assert session not in self.holders
            view = self.scheduler.view(self.now_ns).session(session)
            assert not view.record.mid_burst

    def check_residue(self, action):
        """Check that contexts come back for a session that is out and wants nothing, into room that
        is free, and not back and forth."""
        session = action.session
        assert session in self.held
        assert session not in self.holders
        assert session not in self.waiting()
        assert sum(self.device.values()) + self.coming_bytes() + action.need_bytes <= TOTAL
        if session not in self.stands:
            assert self.now_ns - self.taken_ns[session] >= DEFAULTS.residue_pause_ns

    def coming_bytes(self):
        """Return how much free memory the page-ins in progress may take."""
        comes = act.PageIn | act.BringResidueBack
        return sum(o.need_bytes for o in self.flying.values() if isinstance(o, comes))

    def check_not_too_often(self, action):
        """Check that, despite many hints, memory that was just used or brought back stays, and
        memory that was brought back for nothing is not brought back again soon."""
        used_ns, back_ns = self.used.get(action.session), self.back.get(action.session)
        if isinstance(action, act.PageIn):
            unused = back_ns is not None and (used_ns is None or used_ns < back_ns)
            assert not unused or self.now_ns - back_ns >= 30 * NS_PER_S
        else:
            assert all(at is None or self.now_ns - at >= 10 * NS_PER_S for at in (used_ns, back_ns))

    def waiting(self):
        return {entry.session for entry in self.scheduler.view(self.now_ns).queue}

    @rule(name=NAMES)
    def join(self, name):
        if name not in self.ids:
            self.next_id += 1
            session = self.ids[name] = f"{name}{self.next_id}"
            self.bursts[session] = self.device[session] = self.host[session] = 0
            owner = {"a": "", "b": "bob", "c": "", "d": "bob"}[name]
            self.feed(ev.SessionJoined(session=session, residency=Residency.RESIDENT, owner=owner))

    @rule(name=NAMES)
    def join_and_fill(self, name):
        """Join, ask, and take most of the GPU if the lease comes at once, as many stories begin."""
        self.join(name)
        self.ask(name)
        self.grow(name, 7 * GIB)

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def ask(self, name):
        if (session := self.ids.get(name)) is not None:
            self.holders.discard(session)
            self.bursts[session] += 1
            self.back.pop(session, None)
            self.feed(ev.LeaseRequested(session=session, burst=self.bursts[session]))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, how=st.sampled_from([ev.BurstEnded, ev.LeaseWithdrawn, ev.BurstLingered]))
    def finish(self, name, how):
        if (session := self.ids.get(name)) is not None:
            if how is not ev.BurstLingered:
                self.holders.discard(session)
                view = self.scheduler.view(self.now_ns)
                if session in view.holders or session in self.waiting():
                    self.used[session] = self.now_ns
            self.feed(how(session=session, burst=self.bursts[session]))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def release(self, name):
        if (session := self.ids.get(name)) is not None:
            self.feed(ev.ReleaseRequested(session=session))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def hint(self, name):
        if (session := self.ids.get(name)) is not None:
            why = self.scheduler.hint_hindrance(session, self.now_ns)
            before = set(self.flying)
            self.feed(ev.UseExpected(session=session))
            new = [order for op, order in self.flying.items() if op not in before]
            assert any(order.cause.endswith("about to be used") for order in new) == (not why)

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def die(self, name):
        if (session := self.ids.pop(name, None)) is not None:
            self.holders.discard(session)
            self.asked = {key: size for key, size in self.asked.items() if key[0] != session}
            if all(order.session != session for order in self.flying.values()):
                self.device.pop(session)
                self.host.pop(session)
            self.feed(ev.SessionLost(session=session))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, size=SIZES)
    def grow(self, name, size):
        """Let a runner allocate or free as far as there is room, and read the memory."""
        session = self.ids.get(name)
        flying = {order.session for order in self.flying.values()}
        if session in self.holders and session not in flying:
            others = sum(self.device.values()) - self.device[session]
            self.device[session] = min(size, max(0, TOTAL - others - self.coming_bytes()))
        self.look()

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, size=SIZES)
    def ask_for_room(self, name, size):
        if (session := self.ids.get(name)) is not None:
            self.requests += 1
            self.asked[session, self.requests] = size
            self.feed(ev.RoomWanted(session=session, request=self.requests, bytes=size))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def no_longer_ask(self, data):
        session, request = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[session, request]
        self.feed(ev.RoomNoLongerWanted(session=session, request=request))

    @rule()
    def look(self):
        present = {s: self.device[s] for s in self.ids.values()}
        self.feed(
            ev.MemoryObserved(
                free_bytes=TOTAL - sum(self.device.values()),
                resident_bytes=present,
                owned=[session for session in present if session in self.owned],
                unsized=[session for session in present if session in self.unsized],
                taken={s: self.taken[s] for s in present if self.taken.get(s)},
            )
        )
        running = set(self.scheduler.view(self.now_ns).holders)
        self.holders &= running  # lingering bursts that the scheduler has ended

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def a_library_owns_its_memory(self, name):
        """Toggle whether a library owns the session's memory."""
        if (session := self.ids.get(name)) is not None:
            self.owned ^= {session}
            self.look()

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def its_size_is_unknown(self, name):
        """Toggle whether anybody says what the session has in the GPU."""
        if (session := self.ids.get(name)) is not None:
            self.unsized ^= {session}
            self.look()

    @precondition(lambda self: not self.ids)
    @rule(name=NAMES, other=NAMES, ends=st.booleans())
    def contexts_are_taken(self, name, other, ends):
        """Let ``name`` go out, whose library leaves its context, and ``other`` fill the GPU, so
        that the driver takes the context, too: many stories of contexts begin like this. ``ends``:
        the other one ends, which makes room."""
        if name == other:
            return
        self.budget(100 * GIB)
        self.join_and_fill(name)
        self.owned.add(self.ids[name])
        self.look()
        self.finish(name, ev.BurstEnded)
        self.release(name)
        self.report_all(name)
        self.look()
        self.join_and_fill(other)
        self.report_all(name)
        self.grow(other, TOTAL)
        if self.ids[other] in self.holders:
            self.ask_for_room(other, CONTEXT // 2)
        self.report_all(name)
        if ends:
            self.die(other)
        self.look()

    def report_all(self, name):
        """Let the operations on ``name`` succeed, as far as they can."""
        for op, order in sorted(self.flying.items()):
            too_little = isinstance(order, act.PageOut) and name in self.cramped
            if order.session == self.ids[name] and not too_little:
                del self.flying[op]
                self.feed(self.done(order))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def stand(self, data):
        """Make a call that is none of CUDA in a program whose contexts the driver has."""
        session = data.draw(st.sampled_from(sorted(self.taken)))
        if session in self.ids.values():
            self.stands.add(session)
            self.feed(ev.ResidueWanted(session=session))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, gib=st.integers(0, 12))
    def report_a_need(self, name, gib):
        if (session := self.ids.get(name)) is not None:
            self.feed(ev.NeedReported(session=session, need_bytes=gib * GIB))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def gate_changes(self, name):
        if (session := self.ids.get(name)) is not None:
            self.unguarded ^= {session}
            guarded = session not in self.unguarded
            self.feed(ev.GuardChanged(session=session, guarded=guarded))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def stop_or_continue(self, name):
        if (session := self.ids.get(name)) is None:
            return
        self.stopped ^= {session}
        if session in self.stopped:
            self.have_stood.add(session)
            self.feed(ev.SessionStopped(session=session, why="stopped by Ctrl-Z"))
        else:
            self.feed(ev.SessionContinued(session=session))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, by=st.sampled_from(["an admin", "its user"]))
    def keep_out(self, name, by):
        if (session := self.ids.get(name)) is not None:
            self.kept_out.add(session)
            self.feed(ev.SuspensionRequested(session=session, by=by))
            self.kept_out &= {s for s in self.kept_out if self.who_keeps_out(s)}  # it leaves

    @precondition(lambda self: self.kept_out)
    @rule(data=st.data())
    def let_go(self, data):
        session = data.draw(st.sampled_from(sorted(self.kept_out)))
        self.kept_out.discard(session)
        self.feed(ev.ResumptionRequested(session=session))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES)
    def be_busy(self, name):
        if (session := self.ids.get(name)) is not None:
            busy = {session: session not in self.used}
            free = TOTAL - sum(self.device.values())
            self.feed(ev.MemoryObserved(free_bytes=free, busy=busy))

    @rule(seconds=st.sampled_from([1, 5, 11, 40]))
    def wait(self, seconds):
        self.now_ns += seconds * NS_PER_S
        self.feed(ev.DeadlinePassed())
        self.holders &= set(self.scheduler.view(self.now_ns).holders)

    @rule(
        tq=st.sampled_from([1, 10, 60]),
        mode=st.sampled_from([None, *AntiThrash]),
        policy=st.sampled_from([None, *names()]),
    )
    def set(self, tq, mode, policy):
        self.feed(ev.SettingsChanged(tq_ns=tq * NS_PER_S, anti_thrash=mode, policy=policy))

    @precondition(lambda self: self.ids)
    @rule(name=NAMES, priority=st.sampled_from(Priority))
    def prioritise(self, name, priority):
        if (session := self.ids.get(name)) is not None:
            self.feed(ev.PriorityChanged(session=session, priority=priority))

    @rule(budget=st.sampled_from([0, 5 * GIB, 100 * GIB]))
    def budget(self, budget):
        self.feed(ev.HostBudgetObserved(budget_bytes=budget))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def hang(self, data):
        self.feed(ev.OperationOverdue(op=data.draw(st.sampled_from(sorted(self.flying)))))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "refused", "lost"]))
    def report(self, data, outcome):
        op = data.draw(st.sampled_from(sorted(self.flying)))
        order = self.flying.pop(op)
        session = order.session
        dead = session not in self.ids.values()
        copy = isinstance(order, (act.PageOut, act.PageIn, act.BringResidueBack))
        too_little = isinstance(order, act.PageOut) and session[0] in self.cramped
        if outcome == "done" and not too_little:
            event = self.done(order)
        elif outcome == "lost" and copy:
            self.device[session] = self.host[session] = 0
            self.taken.pop(session, None)
            self.held.discard(session)
            self.holders.discard(session)
            event = (ev.PageOutLost if isinstance(order, act.PageOut) else ev.PageInLost)(op=op)
        else:
            reason = Reason.NO_JOB_MEMORY if too_little else data.draw(FAULTS)
            reason = Reason.GONE if dead else reason
            if session in self.stopped and isinstance(order, (act.Suspend, act.PageOut)):
                self.holders.discard(session)  # its turn ends although this was refused
            event = _REFUSED[type(order)](op=op, reason=reason)
        if dead:
            self.device.pop(session)
            self.host.pop(session)
        self.feed(event)
        self.feed(event)  # a second time it must change nothing

    @precondition(lambda self: self.cramped)
    @rule(times=st.integers(1, 5))
    def time_passes_without_ram(self, times):
        """Let time pass in which every page-out of a cramped job is refused."""
        for _ in range(times):
            for op, order in sorted(self.flying.items()):
                cramped = isinstance(order, act.PageOut) and order.session[0] in self.cramped
                if cramped and order.session in self.ids.values():
                    del self.flying[op]
                    if order.session in self.stopped:
                        self.holders.discard(order.session)
                    self.feed(ev.PageOutRefused(op=op, reason=Reason.NO_JOB_MEMORY))
            self.wait(5)

    def done(self, order):
        session, op = order.session, order.op
        if isinstance(order, act.Suspend):
            self.held.add(session)
            self.holders.discard(session)
            return ev.Suspended(op=op, resident_bytes=self.device[session])
        if isinstance(order, act.Resume):
            self.held.discard(session)
            return ev.Resumed(op=op)
        if isinstance(order, act.PageOut):
            # A library leaves a context; a second page-out has the driver move that, too.
            known = self.scheduler._st.sessions.get(session)
            owned = known is not None and known.owned
            stays = CONTEXT if owned and not self.host[session] else 0
            stays = min(stays, self.device[session])
            moved = self.device[session] - stays
            if owned and self.host[session] and moved <= CONTEXT:
                self.taken[session] = self.taken.get(session, 0) + moved
                self.taken_ns[session] = self.now_ns
                self.stands.discard(session)
            self.host[session] += moved
            self.device[session] = stays
            self.held.add(session)
            self.holders.discard(session)
            if owned:
                moved = self.host[session]
            return ev.PagedOut(op=op, moved_bytes=moved, elapsed_ns=NS_PER_S, stays_bytes=stays)
        self.stands.discard(session)
        if isinstance(order, act.BringResidueBack):
            moved = self.taken.pop(session, 0)
            self.host[session] -= moved
            self.device[session] += moved
            return ev.ResidueBack(op=op, moved_bytes=moved, elapsed_ns=NS_PER_S)
        if order.cause == "about to be used" and session not in self.waiting():
            self.back[session] = self.now_ns
        moved = self.host[session]
        self.device[session] += moved
        self.host[session] = 0
        self.taken.pop(session, None)
        self.held.discard(session)
        return ev.PagedIn(op=op, moved_bytes=moved, elapsed_ns=NS_PER_S)

    @invariant()
    def physics(self):
        if hasattr(self, "device"):
            assert sum(self.device.values()) <= TOTAL

    @invariant()
    def an_idle_gpu_has_no_waiter(self):
        """All waiters for an idle GPU are blocked, unless memory has not been read."""
        if hasattr(self, "scheduler"):
            st = self.scheduler._st
            busy = st.runners or any(not session.stuck for session in st.ops.values())
            patience_ns = st.config.reading_patience_ns
            awaits = any(s.left_ns + patience_ns > self.now_ns for s in st.unread.values())
            if st.observed and not busy and not awaits and st.keeps is None:
                assert all(waiter.blocked is not None for waiter in st.queue.values())

    @invariant()
    def a_deadline_lies_ahead(self):
        if hasattr(self, "scheduler"):
            deadline_ns = self.scheduler.next_deadline_ns()
            assert deadline_ns is None or deadline_ns > self.now_ns

    @invariant()
    def the_history_adds_up(self):
        """The history agrees with the view's own counts, and its parts with the whole."""
        if not hasattr(self, "scheduler"):
            return
        entries = self.scheduler.history(0, self.now_ns)
        serials = [entry.serial for entry in entries]
        assert serials == sorted(set(serials))
        assert all(serial <= self.scheduler.history_serial for serial in serials)
        assert len({entry.id for entry in entries}) == len(entries)
        middle = self.scheduler.history_serial // 2
        assert self.scheduler.history(middle, self.now_ns) == tuple(
            entry for entry in entries if entry.serial > middle
        )
        for session in self.scheduler.view(self.now_ns).sessions:
            held_ns = self.spent_ns(entries, session.id, "held")
            waited_ns = self.spent_ns(entries, session.id, "waited", "suspended")
            if session.id in self.have_stood:  # the time in which it stood does not count
                assert session.held_ns <= held_ns
                assert session.waited_ns <= waited_ns
            else:
                assert (session.held_ns, session.waited_ns) == (held_ns, waited_ns)
        open_moves = [
            e.session for e in entries if e.kind.value in ("out", "in") and e.ended_ns is None
        ]
        flying = [
            o.session for o in self.flying.values() if isinstance(o, act.PageOut | act.PageIn)
        ]
        assert sorted(open_moves) == sorted(flying)

    def spent_ns(self, entries, session, *kinds):
        return sum(
            (self.now_ns if entry.ended_ns is None else entry.ended_ns) - entry.began_ns
            for entry in entries
            if entry.session == session and entry.kind.value in kinds
        )

    @invariant()
    def the_view_can_be_made(self):
        if hasattr(self, "scheduler"):
            view = self.scheduler.view(self.now_ns)
            assert {entry.session for entry in view.queue} <= {s.id for s in view.sessions}
            assert all(e.expected_wait_ns is None or e.expected_wait_ns >= 0 for e in view.queue)

    def teardown(self):
        """Kill all, let all operations report, and check that nothing is left counted."""
        if not hasattr(self, "scheduler"):
            return
        for name in list(self.ids):
            self.die(name)
        for op in sorted(self.flying):
            order = self.flying.pop(op)
            self.feed(_REFUSED[type(order)](op=op, reason=Reason.GONE))
        view = self.scheduler.view(self.now_ns)
        assert (view.sessions, view.queue, view.holders) == ((), (), ())
        assert view.paged_out_bytes == 0
        self.feed(ev.MemoryObserved(free_bytes=TOTAL))
        assert self.scheduler.view(self.now_ns).free_bytes == TOTAL


_REFUSED = {
    act.Suspend: ev.SuspendRefused,
    act.Resume: ev.ResumeFailed,
    act.PageOut: ev.PageOutRefused,
    act.PageIn: ev.PageInRefused,
    act.BringResidueBack: ev.ResidueRefused,
}

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
