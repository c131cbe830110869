"""What a policy decides. Everything else (room, operations, failures) is the same for all.

A policy only reads the ``Scene`` and its sessions; of a session it may keep ``level`` and
``protected_until_ns``, and of its own whatever it can make again in ``adopt``. It knows no other
clock than ``Scene.now_ns``. It is asked in the settle pass, many times a second: be quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.usage import Usage
    from kiwi_core.units import SessionId


@dataclass(slots=True)
class Terms:
    """The settings that quanta follow; changed live."""

    tq_ns: int
    min_run_ns: int
    swap_floor_factor: float


class Scene(Protocol):
    """What a policy may look at: the scheduler's ``State``."""

    @property
    def now_ns(self) -> int: ...

    @property
    def terms(self) -> Terms: ...

    @property
    def queue(self) -> Mapping[SessionId, Session]:
        """The waiters in order of arrival (one that was stopped in mid-burst arrived when it was
        stopped)."""
        ...

    @property
    def waiting_in(self) -> Mapping[SessionId, Session]:
        """Those of the queue whose memory is in the GPU, in no order that means anything."""
        ...

    @property
    def runners(self) -> Mapping[SessionId, Session]:
        """Those that hold the lease and are not being stopped."""
        ...

    @property
    def active(self) -> int:
        """How many wait or run."""
        ...

    @property
    def usage(self) -> Usage:
        """How much each session has had lately."""
        ...

    def swap_ns(self, session: Session) -> int:
        """What stopping ``session`` costs: its way out and back in; 0 where nothing has to move."""
        ...

    def moving_ns(self, session: Session) -> int:
        """Its way out and back in, whether or not anything has to move."""
        ...

    def fit_together(self, one: Session, other: Session) -> bool:
        """Is there room for what both need, if everybody else goes out?"""
        ...

    @property
    def typical_swap_ns(self) -> int:
        """The same for one of the mean size of those that want the GPU."""
        ...


class Policy:
    """Base of all policies. One object per scheduler; made anew when the policy is changed."""

    name: ClassVar[str]
    """As it is written in ``--policy``."""
    summary: ClassVar[str]
    """What it does, in a few words for people."""
    overtakes: ClassVar[bool] = False
    """Whether newcomers go before a burst that was stopped and waits to go on. Nobody can foresee
    who comes, so such waits are told as an upper bound."""

    def bound_ns(self, terms: Terms, others: int, swap_ns: int) -> int | None:  # noqa: ARG002
        """The longest that anybody waits with so many ``others`` that wait or hold, where a swap
        (out and in) takes at most ``swap_ns``: what the policy promises while nothing is broken
        and all are of one class. ``None``: it promises nothing. For tests and benchmarks."""
        return None

    # --- decisions ------------------------------------------------------------------------------

    def order(self, scene: Scene) -> Iterable[Session]:
        """The waiters, first served first. Unless overridden: as they came."""
        return scene.queue.values()

    def stop_at_ns(self, scene: Scene, runner: Session, waiter: Session) -> int:  # noqa: ARG002
        """When ``runner`` makes way for ``waiter``, who is first in order. Unless overridden: at
        the end of its quantum."""
        return runner.granted_ns + self.quantum_ns(scene, runner)

    def quantum_ns(self, scene: Scene, session: Session) -> int:
        """How long it may run while others wait. Unless overridden: TQ times its weight, but no
        less than what stopping it costs."""
        terms = scene.terms
        tq_ns = terms.tq_ns if session.weight == 1.0 else round(terms.tq_ns * session.weight)
        return max(tq_ns, round(terms.swap_floor_factor * scene.swap_ns(session)))

    def floor_ns(self, scene: Scene, session: Session) -> int:
        """How long it runs in any case, even if the runners have outgrown the GPU."""
        terms = scene.terms
        swap_ns = round(terms.swap_floor_factor * scene.swap_ns(session))
        return max(min(terms.tq_ns, terms.min_run_ns), swap_ns)

    def may_join(self, waiter: Session, holders: int, serialised: bool) -> bool:  # noqa: ARG002
        """May ``waiter`` be brought in now, beside so many that hold the lease or are on their
        way in? (Room is checked apart from this.)"""
        return not serialised or holders == 0

    def victims(self, idle: Iterable[Session], waiters: Sequence[Session]) -> Iterator[Session]:
        """Whose memory goes out, first to go first. Both hold GPU memory; ``idle`` has the least
        recently used first, ``waiters`` the one that has waited longest. Unless overridden: idle
        ones, then waiters from the tail, who need their memory last."""
        return chain(idle, reversed(waiters))

    def ahead_ns(self, scene: Scene, waiter: Session) -> int:
        """How long before its turn the memory of ``waiter``, who is first in order, may be brought
        in beside the runners, where there is room for all of them. Unless overridden: as long as
        that takes, and something of its size to go out."""
        return scene.moving_ns(waiter)

    def reorders_at_ns(self, scene: Scene) -> int | None:  # noqa: ARG002
        """When ``order`` changes if nothing happens but time; ``None``: it does not."""
        return None

    def favoured_ns(self, scene: Scene, session: Session, had_ns: int) -> int:  # noqa: ARG002
        """How much of a turn of ``had_ns`` that ends now ``session`` had because it was put before
        others; for ``Scene.usage``. (``attained_ns`` is without this turn.)"""
        return 0

    # --- what it is told ------------------------------------------------------------------------

    def adopt(self, scene: Scene) -> None:
        """The queue as it stands: at the start of this policy, and when settings change."""
        for waiter in scene.queue.values():
            self.joined(scene, waiter)

    def joined(self, scene: Scene, session: Session) -> None:  # noqa: ARG002
        """It is in the queue from now on, at its tail."""
        return

    def left(self, scene: Scene, session: Session) -> None:  # noqa: ARG002
        """It is no longer in the queue: granted, withdrawn or gone."""
        return

    def check(self, scene: Scene) -> None:  # noqa: ARG002
        """Recompute from scratch what it keeps; ``AssertionError`` where that differs. For tests,
        after each event."""
        return
