"""The decisions of a policy. Everything else (room, operations, failures) is the same for all.

A policy only reads the ``PolicyContext`` and its sessions. It may give a session a place
(``Standing.queues_on``, ``protect``), and keep any state of its own that it can make again in
``adopt``. Its only clock is ``PolicyContext.now_ns``. The settle pass calls it many times a second,
so it must be fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.usage import RecentUsage
    from kiwi_core.units import SessionId


@dataclass(slots=True)
class TurnSettings:
    """The settings that determine quanta. A change of settings makes a new object."""

    tq_ns: int
    min_run_ns: int
    swap_floor_factor: float
    tenancy_trips: float = 0.0

    least_ns: int = field(init=False)
    """How long a session runs at least even if its swap costs less."""

    def __post_init__(self) -> None:
        self.least_ns = min(self.tq_ns, self.min_run_ns)

    def tenancy_ns(self, trip_ns: int) -> int:
        """Return how long a session may keep its place from a waiter (``rules.tenancy``) if it
        takes ``trip_ns`` to move both out and in; 0: no places are kept."""
        return max(self.tq_ns, round(self.tenancy_trips * trip_ns)) if self.tenancy_trips else 0


class PolicyContext(Protocol):
    """The part of the scheduler's ``State`` that a policy may read; ``State`` says what each is."""

    @property
    def now_ns(self) -> int: ...
    @property
    def wake_ns(self) -> int | None: ...
    @property
    def turn_settings(self) -> TurnSettings: ...
    @property
    def queue(self) -> Mapping[SessionId, Session]: ...
    @property
    def waiting_in(self) -> Mapping[SessionId, Session]: ...
    @property
    def runners(self) -> Mapping[SessionId, Session]: ...
    @property
    def active(self) -> int: ...
    @property
    def usage(self) -> RecentUsage: ...

    def rivals(self, session: Session) -> int: ...
    def swap_floor_ns(self, session: Session) -> int: ...
    def moving_ns(self, session: Session) -> int: ...
    def fit_together(self, one: Session, other: Session) -> bool: ...
    def typical_swap_ns(self) -> int: ...


class Policy:
    """Base of all policies. Each scheduler has its own object; a change of policy creates a new
    one.
    """

    name: ClassVar[str]
    """The name that ``--policy`` takes."""
    summary: ClassVar[str]
    """What the policy does, in a few words for users."""
    overtakes: ClassVar[bool] = False
    """Whether newcomers go before a burst that was suspended and waits to go on. Newcomers cannot
    be foreseen, so such waits are shown as an upper bound."""

    def bound_ns(self, turn_settings: TurnSettings, others: int, swap_ns: int) -> int | None:  # noqa: ARG002
        """Return the longest wait of a session while ``others`` sessions wait or hold the lease
        (``PolicyContext.rivals``: more if its owner has several) and a swap (out and in) takes at
        most ``swap_ns``; one of them may keep its place from the others (``rules.tenancy``), or
        one more. The policy promises this bound while nothing fails and all sessions are
        of one class. ``None``: it promises nothing. Tests and benchmarks use it."""
        return None

    # --- decisions ------------------------------------------------------------------------------

    def order(self, context: PolicyContext) -> Iterable[Session]:
        """Return the waiters in the order in which they are served. Default: order of arrival."""
        return context.queue.values()

    def turn_ends_at_ns(self, context: PolicyContext, runner: Session, waiter: Session) -> int:  # noqa: ARG002
        """Return when ``runner`` makes way for ``waiter``, the first in order. Default: at the end
        of the runner's quantum."""
        return runner.granted_ns + self.quantum_ns(context, runner)

    def quantum_ns(self, context: PolicyContext, session: Session) -> int:
        """Return how long ``session`` may run while others wait. Default: TQ times its weight, but
        at least ``swap_floor_factor`` times its swap."""
        turn_settings = context.turn_settings
        tq_ns = (
            turn_settings.tq_ns
            if session.weight == 1.0
            else round(turn_settings.tq_ns * session.weight)
        )
        floor_ns = context.swap_floor_ns(session)
        return tq_ns if tq_ns > floor_ns else floor_ns

    def floor_ns(self, context: PolicyContext, session: Session) -> int:
        """Return how long ``session`` runs in any case, even if the runners have outgrown the
        GPU."""
        floor_ns, least_ns = context.swap_floor_ns(session), context.turn_settings.least_ns
        return floor_ns if floor_ns > least_ns else least_ns

    def may_join(self, waiter: Session, holders: int, serialised: bool) -> bool:  # noqa: ARG002
        """Return whether ``waiter`` may be brought in now, beside ``holders`` sessions that hold
        the lease or are being brought in. (Room is checked separately.)"""
        return not serialised or holders == 0

    def victims(self, idle: Iterable[Session], waiters: Sequence[Session]) -> Iterator[Session]:
        """Return the sessions in the order in which they are paged out. All of them hold GPU
        memory; ``idle`` has the least recently used first, ``waiters`` the one that has waited
        longest. Default: idle sessions, then waiters from the tail, which need their memory
        last."""
        return chain(idle, reversed(waiters))

    def ahead_ns(self, context: PolicyContext, waiter: Session) -> int:
        """Return how long before its turn the memory of ``waiter``, the first in order, may be
        paged in beside the runners, where there is room for all of them. Default: the time to page
        it in, and to page out as much."""
        return context.moving_ns(waiter)

    def tenancy_ns(self, tenant: Session, waiter: Session, usual_ns: int) -> int:  # noqa: ARG002
        """Return how long ``tenant`` may keep its place from ``waiter`` in all (``rules.tenancy``):
        ``usual_ns``, less, or 0. Default: ``usual_ns``."""
        return usual_ns

    def old_at_ns(self, context: PolicyContext, waiter: Session, tenant: Session) -> int:  # noqa: ARG002
        """Return when ``waiter`` is so old that ``tenant``, counted as active, must not keep its
        place any longer. Default: at once, so that only the length of a tenancy counts."""
        return waiter.queued_ns

    def reorders_at_ns(self, context: PolicyContext) -> int | None:  # noqa: ARG002
        """Return when ``order`` changes by the passing of time alone; ``None``: never, or not
        before ``PolicyContext.wake_ns``."""
        return None

    def favoured_ns(self, context: PolicyContext, session: Session, had_ns: int) -> int:  # noqa: ARG002
        """Return how much of a turn of ``had_ns`` that ends now ``session`` had because the policy
        put it before others; for ``PolicyContext.usage``. (``attained_ns`` excludes this turn.)"""
        return 0

    # --- notifications --------------------------------------------------------------------------

    def adopt(self, context: PolicyContext) -> None:
        """Take over the present queue: when this policy starts, and when settings change."""
        for waiter in context.queue.values():
            self.joined(context, waiter)

    def joined(self, context: PolicyContext, session: Session) -> None:  # noqa: ARG002
        """Note that ``session`` has joined the tail of the queue."""
        return

    def left(self, context: PolicyContext, session: Session) -> None:  # noqa: ARG002
        """Note that ``session`` leaves the queue: granted, withdrawn or gone."""
        return

    def served(self, session: Session) -> None:
        """Note that ``session`` has just been granted the lease."""

    def check(self, context: PolicyContext) -> None:  # noqa: ARG002
        """Recompute the policy's own state from scratch and raise ``AssertionError`` where it
        differs. Tests call this after each event."""
        return
