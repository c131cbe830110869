"""A copy of a scheduler's state that can run ahead: same decisions, cheap, without stories.

Only sessions that the state refers to (queue, runners, idle memory, operations, the policy) are
copied. The others would matter only after a request, and the copy gets no new requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from copy import copy
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.sched.model.history import History
from kiwi_core.sched.model.policy import Policy
from kiwi_core.sched.model.session import RoomRequest, Session
from kiwi_core.sched.model.speed import SwapSpeed
from kiwi_core.sched.model.state import State
from kiwi_core.sched.model.stories import Stories
from kiwi_core.sched.model.usage import RecentUsage
from kiwi_core.sched.policy.owners import OwnerTurns

if TYPE_CHECKING:
    from kiwi_core.units import SessionId

# Up to fifty sessions are copied many times a second; ``copy.copy`` takes four times as long.
_SESSION: Final = attrgetter(*(one.name for one in fields(Session)))

_SHARED: Final = ("config", "sessions", "stories", "history", "speed")
"""Fields of ``State`` that never change, or that the copy gets anew."""

_FIRST: Final = ("policy", "queue", "kept_out", "chosen", "runners")
"""Fields whose sessions are copied first, in this order. It decides which session gets which chance
in a simulated future (``SimulatedFuture``)."""

_REST: Final = tuple(o.name for o in fields(State) if o.name not in (*_SHARED, *_FIRST))

_PLAIN: Final = frozenset({int, float, str, bool, type(None)})


def copy_of(st: State) -> State:
    """Return a copy of ``st``. Changes of the copy leave ``st`` as it is."""
    copies: dict[SessionId, Session] = {}
    copied = object.__new__(State)
    for name in _SHARED:
        setattr(copied, name, getattr(st, name))
    for name in (*_FIRST, *_REST):
        setattr(copied, name, _mapped(getattr(st, name), copies))
    copied.sessions = copies
    copied.stories = _NO_STORIES
    copied.history = History(0, 0)
    copied.speed = _Settled(st.speed)
    return copied


def _session(session: Session) -> Session:
    copied = Session(*_SESSION(session))
    copied.story = _UNREAD
    copied.peaks_bytes = session.peaks_bytes.copy()
    copied.durations_ns = session.durations_ns.copy()
    copied.pauses_ns = session.pauses_ns.copy()
    if session.op is not None:
        copied.op = copy(session.op)
    return copied


def _mapped(value: Any, copies: dict[SessionId, Session]) -> Any:
    """Return a copy of ``value`` with its sessions' copies; each copy is made when first met."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Session:
        if value.id not in copies:
            copies[value.id] = _session(value)
        return copies[value.id]
    if kind is dict or kind is OrderedDict:
        return kind((key, _mapped(one, copies)) for key, one in value.items())
    if kind is list or kind is tuple:
        return kind(_mapped(one, copies) for one in value)
    if kind is RoomRequest:
        return replace(value, session=_mapped(value.session, copies))
    if isinstance(value, (Policy, OwnerTurns, RecentUsage)):
        made = object.__new__(kind)
        made.__dict__.update((name, _mapped(one, copies)) for name, one in vars(value).items())
        return made
    return copy(value)


class _NoStories(Stories):
    """Stories of a copy, which no caller reads."""

    def end(self, session: SessionId) -> None:
        pass


_NO_STORIES: Final = _NoStories(0)
_UNREAD: Final = deque[tuple[int, str, tuple[object, ...]]](maxlen=0)


class _Settled(SwapSpeed):
    """The known speed. It learns nothing from simulated moves, which follow from it."""

    def __init__(self, known: SwapSpeed) -> None:
        self.__dict__.update(vars(known))

    def learn_out(self, moved_bytes: int, elapsed_ns: int) -> None:
        pass

    def learn_in(self, moved_bytes: int, elapsed_ns: int) -> None:
        pass
