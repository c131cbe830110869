"""The scheduler of one GPU: takes every event, answers with actions. See the package's docstring.

The daemon's loop (one thread), the replay and tests call it. No call blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import audit
from kiwi_core.sched.forecast.shown_forecast import Forecast
from kiwi_core.sched.forecast.simulated_future import NEWCOMERS_MAX, SimulatedFuture
from kiwi_core.sched.model.policy import TurnSettings
from kiwi_core.sched.model.state import State
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.policy import DEFAULT, make
from kiwi_core.sched.rules import (
    arrivals,
    hints,
    kept_out,
    observations,
    outcomes,
    residues,
    unguarded_and_stopped,
)
from kiwi_core.sched.rules.settle import settle
from kiwi_core.sched.view import shown_holders, shown_queue, snapshot, state_of
from kiwi_core.states import AntiThrash, Residency, SessionState

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event
    from kiwi_core.sched.model.accounts import Account
    from kiwi_core.sched.model.happenings import Happening
    from kiwi_core.sched.model.history import HistoryView
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.stories import StoryEntry
    from kiwi_core.sched.view import GpuView, QueueView
    from kiwi_core.units import SessionId

_HANDLERS = {
    **arrivals.HANDLERS,
    **unguarded_and_stopped.HANDLERS,
    **kept_out.HANDLERS,
    **outcomes.HANDLERS,
    **observations.HANDLERS,
    **hints.HANDLERS,
    **residues.HANDLERS,
}


class Scheduler:
    """The scheduler of one GPU. ``now_ns`` is the time on any monotonic clock, always the same one;
    times in actions and deadlines are on it. ``first_op`` is the first operation id to use: a
    daemon that restarts goes on counting. ``policy`` is one of ``policy.names()``; any other name
    raises ``CallerError("unknown-policy")``."""

    def __init__(
        self,
        total_bytes: int,
        *,
        config: Config = DEFAULTS,
        tq_ns: int | None = None,
        anti_thrash: AntiThrash = AntiThrash.ON,
        host_budget_bytes: int,
        first_op: int = 1,
        policy: str = DEFAULT,
        checks: bool = False,
    ) -> None:
        tq_ns = config.tq_ns if tq_ns is None else tq_ns
        self._st = State(
            total_bytes=total_bytes,
            config=config,
            policy=make(policy),
            turn_settings=TurnSettings(
                tq_ns, config.min_run_ns, config.swap_floor_factor, config.tenancy_trips
            ),
            anti_thrash=anti_thrash,
            host_budget_bytes=host_budget_bytes,
            next_op=first_op,
        )
        self._forecast = Forecast()
        self._checks = checks

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Record ``event``, decide everything that can be decided, and return the actions to
        perform, in order. An event of an unknown session, a stale burst or an unknown operation
        changes nothing and is counted."""
        st = self._st
        actions = st.handle(now_ns)
        _HANDLERS[type(event)](st, event)
        settle(st)
        if self._checks:
            audit.check(st)
        return actions

    @property
    def happenings(self) -> list[Happening]:
        """What has happened in the last event, in order. The next event makes a new list."""
        return self._st.history.happenings

    def next_deadline_ns(self) -> int | None:
        """Return when to send ``DeadlinePassed`` unless another event comes first, or ``None``."""
        return self._st.wake_ns

    @property
    def tq_ns(self) -> int:
        return self._st.turn_settings.tq_ns

    @property
    def policy(self) -> str:
        """The name of the policy."""
        return self._st.policy.name

    @property
    def anti_thrash(self) -> AntiThrash:
        return self._st.anti_thrash

    @property
    def holders(self) -> tuple[SessionId, ...]:
        """The sessions that may use the GPU: they hold the lease, or their turn is ending."""
        return self._st.at_work

    @property
    def only_recorded(self) -> tuple[SessionId, ...]:
        """The sessions that were suspended in mid-burst, but have no GPU memory, so that the driver
        cannot lock them: observe them often, since they may begin to use the GPU at any moment."""
        queued = (*self._st.queue.values(), *self._st.kept_out.values())
        return tuple(
            session.id for session in queued if session.mid_burst and session.only_recorded
        )

    @property
    def unread(self) -> tuple[SessionId, ...]:
        """The sessions whose memory was not read since they gave up the lease. Others may wait."""
        return tuple(self._st.unread)

    @property
    def waiting(self) -> bool:
        """Return whether any session waits for the lease, or to be brought back."""
        return bool(self._st.queue)

    def session(self, session: SessionId) -> Session | None:
        """Return the record of a living session, to read before the next event; ``None`` if it is
        unknown."""
        known = self._st.sessions.get(session)
        return None if known is None or known.gone else known

    def state_of(self, session: SessionId) -> SessionState | None:
        """Return the state of one session without making a view; ``None`` if it is unknown."""
        known = self.session(session)
        return None if known is None else state_of(known)

    @property
    def outside_bytes(self) -> int:
        """The GPU memory that programs outside Kiwi hold."""
        return self._st.outside_bytes

    @property
    def not_lost(self) -> tuple[SessionId, ...]:
        """The sessions that may have memory in the GPU or in system RAM."""
        sessions = self._st.sessions.values()
        return tuple(s.id for s in sessions if not s.gone and s.residency is not Residency.LOST)

    def view(self, now_ns: int, *, ahead: bool = False) -> GpuView:
        """Return the view. ``ahead`` adds the forecast, which costs up to a millisecond a few times
        a second: set it where users read the view. Without it no wait has a figure."""
        told = self._forecast.look(self._st, now_ns) if ahead else {}
        return snapshot(self._st, now_ns, self._forecast, told)

    def queue(self, now_ns: int) -> tuple[tuple[SessionId, ...], tuple[QueueView, ...]]:
        """Return the holders and the queue of the view with the forecast, for messages to waiters,
        without the views of all sessions.
        """
        told = self._forecast.look(self._st, now_ns)
        return shown_holders(self._st), shown_queue(self._st, told, now_ns)

    def place_kept(self, now_ns: int) -> tuple[SessionId, int] | None:
        """Return the session that keeps its place in the GPU from the first waiter, in case its
        next cell comes, and for how long at most; ``None``: there is none."""
        kept = self._st.keeps
        return None if kept is None else (kept.session.id, max(0, kept.until_ns - now_ns))

    def newcomer_wait_ns(self, now_ns: int, before: int = 0) -> int | None:
        """Return how long a session of unknown needs would wait if it asked now, after ``before``
        others like it; ``None`` if that is not known. It costs as much as one forecast: about 100
        µs, in a crowd 2 ms.
        """
        before = min(before, NEWCOMERS_MAX - 1)
        return SimulatedFuture(self._st, now_ns, 0.5, spread=False).newcomer_wait_ns(before)

    def accounts(self, now_ns: int) -> dict[SessionId, Account]:
        """Return the sums of each session until ``now_ns``."""
        return {id_: s.account(now_ns) for id_, s in self._st.sessions.items()}

    def story(self, session: SessionId) -> tuple[StoryEntry, ...]:
        """Return what happened to ``session`` lately, oldest first; also for a while after it left.
        Empty for an unknown session."""
        return self._st.stories.lines(session)

    @property
    def crowded(self) -> bool:
        """Whether the memory of all sessions, in the GPU and out of it, does not fit into it at
        once, so that page-outs are likely."""
        sessions = self._st.sessions.values()
        all_bytes = sum(one.resident_bytes + one.paged_out_bytes for one in sessions)
        return all_bytes + self._st.margin_bytes > self._st.capacity_bytes

    def may_release(self, session: SessionId) -> bool:
        """Return whether ``ReleaseRequested`` has an effect: it is at rest, or on its way out."""
        known = self._st.sessions.get(session)
        return known is not None and arrivals.may_release(known)

    def out_or_moving(self, session: SessionId) -> bool:
        """Return whether ``session`` has no memory in the GPU, or is in an operation."""
        known = self._st.sessions.get(session)
        return known is None or known.op is not None or not known.resident_bytes

    def may_compute(self, session: SessionId) -> bool:
        """Return whether the program's calls that use the GPU may pass: while the session holds
        the lease, and when there is nothing (left) to protect."""
        known = self._st.sessions.get(session)
        return known is None or known.want is Want.RUNNING or known.residency is Residency.LOST

    def at_rest(self, session: SessionId) -> bool:
        """Return whether ``session`` wants nothing, so that a lease request would be its first."""
        known = self._st.sessions.get(session)
        return known is not None and known.want is Want.NONE and not known.leaving

    def believed_in(self, session: SessionId, since_ns: int | None = None) -> bool:
        """Return whether, as recorded, the memory is in the GPU, the program is free, and no
        operation is in progress; nor has one ended after ``since_ns``."""
        known = self._st.sessions.get(session)
        if known is None or known.residency is not Residency.RESIDENT or known.op is not None:
            return False
        return since_ns is None or known.moved_at_ns <= since_ns

    def out_bytes(self, session: SessionId) -> int | None:
        """Return its bytes in system RAM as recorded; ``None``: not out, or in an operation."""
        known = self._st.sessions.get(session)
        if known is None or known.residency is not Residency.PAGED_OUT or known.op is not None:
            return None
        return known.paged_out_bytes

    def hint_hindrance(self, session: SessionId, now_ns: int) -> str:
        """Return why ``UseExpected`` for ``session`` would have no effect now, in words for users;
        "": it would page the session in."""
        return hints.hindrance(self._st, session, now_ns)

    @property
    def history_serial(self) -> int:
        """The serial of the newest change in the history."""
        return self._st.history.serial

    def history(self, since: int, now_ns: int) -> tuple[HistoryView, ...]:
        """Return the entries that began or ended after the change ``since`` (0: all that are kept),
        in the order of the changes, also of sessions that left. Entries in progress have no end."""
        return self._st.history.since(since, self._st.sessions.values(), now_ns)

    def remembered(self) -> frozenset[SessionId]:
        """Return all sessions that have entries in the history, and all present ones."""
        return self._st.history.sessions() | frozenset(self._st.sessions)

    def check(self) -> None:
        """Recompute every derived count from scratch; raise ``AssertionError`` if one is wrong."""
        audit.check(self._st)
