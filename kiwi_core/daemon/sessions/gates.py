"""Gate orders, and the requests of calls at a gate: for the lease, or for room.

The gate of a linked process is open while its session holds the lease. Otherwise it is *armed*
(``Gate(open=False)``): a call at an armed gate requests the lease. (The library *closes* its gate
only for a move.) The burst of such a call belongs to the daemon, not to the client, and ends when
the GPU has been idle for it long enough (it *lingers* from its grant on). A program that has not
started the driver gives its burst up as soon as somebody waits: see ``empty_turns``.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.sessions.empty_turns import EmptyTurns
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, RoomDenied, RoomMade
from kiwi_core.wire.pager import Gate, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.sched.actions import Action, RoomAnswer
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

SWEEP_DELAY_S = 0.005
"""Delay of a look at the gates of sessions that an event does not name: a burst of theirs may have
ended with it, and nobody waits for that."""

ROOM_REQUESTS_MAX: Final = 256
"""Most threads of one process that may wait for room at the same time."""

CONTEXT_PATIENCE_S: Final = 5.0
"""How long a call of NVML waits for its context alone. Then there is no room for that: only a turn
makes room."""

CONTEXT_BACKOFF_S: Final = 4.0
CONTEXT_BACKOFF_MAX_S: Final = 600.0
"""The delay between two turns of a session that only calls of NVML have asked for. It doubles from
the first to the longest one, until the session asks for the GPU: a monitor that reads NVML each
second must not take turns with others for ever."""

NO_SESSION: Final = "This program has left Kiwi, which makes no room for it any more."


@dataclass(slots=True)
class Asked:
    """A request for room; ``request`` is the library's number. ``looked``: it was denied once, and
    is requested again after a look."""

    link: Link
    request: int
    bytes: int
    looked: bool = False


@dataclass(eq=False, repr=False)
class Gates:
    """``request_own`` requests the lease for a burst of the daemon's own; ``withdraw_own`` takes
    the request back, or ends that burst. ``share`` counts the requests for room of each user.
    ``uses_driver`` returns whether the driver knew a process of a session at its last look."""

    _core: Core
    _links: Links
    _registry: SessionRegistry
    _request_own: Callable[[SessionRecord], None]
    _withdraw_own: Callable[[SessionRecord], None]
    _share: Share
    _uses_driver: Callable[[SessionId], bool]
    _empty_turns: EmptyTurns = field(default_factory=EmptyTurns)
    _on_trial: dict[SessionId, int] = field(default_factory=dict)
    """Bursts that a call at the gate caused, by session, of programs that have not been seen to use
    the driver."""
    _looked_at: set[SessionId] = field(default_factory=set)
    """Sessions on trial that are being observed, because somebody waits."""
    _put_off: set[SessionId] = field(default_factory=set)
    """Sessions whose request is made once their back-off is over."""
    _context_turns: EmptyTurns = field(
        default_factory=lambda: EmptyTurns(CONTEXT_BACKOFF_S, CONTEXT_BACKOFF_MAX_S)
    )
    _contexts_due: set[SessionId] = field(default_factory=set)
    """Sessions with a timer after which the lease is requested for their contexts."""
    _sweep_due: bool = False
    _rooms: dict[int, Asked] = field(default_factory=dict)
    """The requests for room, by the number that the scheduler has for each."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    # --- after each event -----------------------------------------------------------------------

    def after(self, step: Step) -> None:
        """Answer, and give orders to gates. Costs nothing while no library is linked."""
        event, actions = step.event, step.actions
        for action in actions:
            if isinstance(action, (RoomMade, RoomDenied)):
                self._answer_room(action)
        if not self._links and not self._on_trial:
            return
        named = {action.session for action in actions}
        session: SessionId | None = getattr(event, "session", None)
        if session is not None:
            named.add(session)
        self._order(named)
        if not self._sweep_due:
            self._sweep_due = True
            asyncio.get_running_loop().call_later(SWEEP_DELAY_S, self._sweep)
        if isinstance(event, ev.SessionDetached):
            self._detached(event.session)
        if isinstance(event, (ev.SessionDetached, ev.SessionLost)):
            self._empty_turns.forget(event.session)
            self._context_turns.forget(event.session)
        self._put_on_trial(actions)
        if self._on_trial and self._core.scheduler.waiting:
            self._try_all()

    def _sweep(self) -> None:
        self._sweep_due = False
        self._order(tuple(self._links.sessions))

    def _order(self, sessions: Iterable[SessionId]) -> None:
        for session in sessions:
            self._order_one(session, self._links.of(session))

    def _order_one(self, session: SessionId, links: tuple[Link, ...]) -> None:
        """Give its orders to the gates of ``session``, also if it has none left: then the last
        linked process has died, and the burst that its call began is over."""
        opens = self._core.scheduler.may_compute(session)
        if not opens and self._core.scheduler.at_rest(session):
            self._own_burst_is_over(session)
        for link in links:
            self.tell(link, opens)
        if any(link.wants_lease for link in links):
            asyncio.get_running_loop().call_soon(self._ask, session)

    def tell(self, link: Link, opens: bool) -> None:
        """Order the gate to be open or armed, unless that is the last order."""
        if link.gate_open is opens or link.connection is None:
            return
        link.gate_open = opens
        if opens:
            link.wants_lease = False
        link.connection.send(Gate(open=opens))

    def _own_burst_is_over(self, session: SessionId) -> None:
        """End the daemon's own burst when the scheduler ends it: no client reports its end."""
        record = self._registry.get(session)
        if record is not None and record.in_burst and record.own_burst:
            record.in_burst = False
            if self._on_trial.pop(session, None) is not None:
                self._judge_after(session)

    # --- empty turns ----------------------------------------------------------------------------

    def _put_on_trial(self, actions: Sequence[Action]) -> None:
        for action in actions:
            record = self._registry.get(action.session)
            if isinstance(action, Grant) and record is not None and record.own_burst:
                self._on_trial[action.session] = action.burst

    def _try_all(self) -> None:
        """Check whether the sessions on trial can use their turns at all, as somebody waits."""
        for session, burst in tuple(self._on_trial.items()):
            record = self._registry.get(session)
            if record is None or not record.in_burst or record.burst != burst:
                del self._on_trial[session]
            elif session not in self._looked_at:
                self._looked_at.add(session)
                self._core.after_a_look(record, partial(self._judge, session, burst))

    def _judge(self, session: SessionId, burst: int) -> None:
        """Decide about ``session``, which has just been observed."""
        self._looked_at.discard(session)
        if self._on_trial.get(session) != burst:
            return
        if self._uses_driver(session):
            del self._on_trial[session]
            self._empty_turns.forget(session)
        elif self._core.scheduler.waiting:
            log.info("a turn of a program without the driver ends: others wait", session=session)
            self._core.feed(ev.BurstEnded(session=session, burst=burst))

    def _judge_after(self, session: SessionId) -> None:
        """Decide after its burst has ended, in whatever way; runners are observed all the time."""
        if self._uses_driver(session):
            self._empty_turns.forget(session)
        else:
            self._empty_turns.was_empty(session, _now_s())

    # --- the lease ------------------------------------------------------------------------------

    def lease_wanted(self, link: Link) -> None:
        if link.session is None:
            link.gate_open = None
            self.tell(link, opens=True)
            return
        if link.gate_open:
            return  # the order to open is on its way
        link.wants_lease = True
        self._context_turns.forget(link.session)
        self._ask(link.session)

    def lease_unwanted(self, link: Link) -> None:
        """Withdraw the request, or end the burst that it began, if no other process of the session
        needs it: an interrupt has ended the wait, and a turn that nobody uses would move memory for
        nothing."""
        link.wants_lease = False
        record = self._registry.get(link.session) if link.session else None
        if record is None or self._core.scheduler.may_compute(record.id):
            return
        if not any(one.wants_lease or one.wants_context for one in self._links.of(record.id)):
            log.info("the call at the gate was interrupted", session=record.id)
            self._withdraw_own(record)

    def context_wanted(self, link: Link) -> None:
        """Bring back the context for a call of NVML. Where a library moves the memory, the context
        comes alone, which takes nobody's turn. Otherwise, and where there is no room, the session
        takes a turn."""
        if link.session is None or link.gate_open:
            return  # the order to open is on its way
        link.wants_context = True
        alone = link.owns and not link.yields
        if alone:
            self._core.feed(ev.ResidueWanted(session=link.session))
        self._ask_for_context(link.session, CONTEXT_PATIENCE_S if alone else 0.0)

    def _ask_for_context(self, session: SessionId, after_s: float) -> None:
        after_s = max(after_s, self._context_turns.left_s(session, _now_s()))
        if after_s and session not in self._contexts_due:
            self._contexts_due.add(session)
            asyncio.get_running_loop().call_later(after_s, self._context_due, session)
        elif not after_s:
            self._take_turn_for_context(session)

    def _context_due(self, session: SessionId) -> None:
        self._contexts_due.discard(session)
        self._ask_for_context(session, 0.0)

    def _take_turn_for_context(self, session: SessionId) -> None:
        record = self._registry.get(session)
        wanted = any(link.wants_context for link in self._links.of(session))
        if record is None or not wanted or not self._core.scheduler.at_rest(session):
            return
        self._context_turns.was_empty(session, _now_s())
        log.info("a call of NVML asks for the lease", session=session)
        self._request_own(record)

    def _ask(self, session: SessionId) -> None:
        """Request the lease for ``session``. Do nothing if it already waits or is in a burst: the
        gate opens with the grant of that burst."""
        record = self._registry.get(session)
        wanted = any(link.wants_lease for link in self._links.of(session))
        if record is None or not wanted or not self._core.scheduler.at_rest(session):
            return
        if left_s := self._empty_turns.left_s(session, _now_s()):
            self._ask_later(record, left_s)
            return
        log.info("a call at the gate asks for the lease", session=session)
        self._request_own(record)

    def _ask_later(self, record: SessionRecord, left_s: float) -> None:
        """Ask after ``left_s``, or after a look that shows that it has started the driver."""
        if record.id not in self._put_off:
            self._put_off.add(record.id)
            asyncio.get_running_loop().call_later(left_s, self._ask_again, record.id)
            self._core.after_a_look(record, partial(self._ask_if_real, record.id))

    def _ask_if_real(self, session: SessionId) -> None:
        if self._uses_driver(session):
            self._empty_turns.forget(session)
            self._ask(session)

    def _ask_again(self, session: SessionId) -> None:
        self._put_off.discard(session)
        self._ask(session)

    # --- room -----------------------------------------------------------------------------------

    def room_wanted(self, link: Link, request: int, wanted_bytes: int) -> None:
        if link.session is None:
            self._answer(link, request, granted=False, detail=NO_SESSION)
            return
        its = self._asked_by(link)
        same = [number for number, asked in its if asked.request == request]
        if not same and (len(its) >= ROOM_REQUESTS_MAX or not self._share.may(link.uid)):
            detail = "Too many threads of this program, or of its user's programs, ask for room."
            self._answer(link, request, granted=False, detail=detail)
            return
        number = same[0] if same else next(self._numbers)
        if not same:
            self._share.take(link.uid)
        self._rooms[number] = Asked(link, request, wanted_bytes)
        self._core.feed(ev.RoomWanted(session=link.session, request=number, bytes=wanted_bytes))

    def _answer_room(self, action: RoomAnswer) -> None:
        denied = isinstance(action, RoomDenied)
        if denied and self._asks_again(action.session, action.request):
            return
        asked = self._take_off(action.request)
        if asked is not None:
            detail = action.detail if isinstance(action, RoomDenied) else ""
            remedy = self._remedy(asked.link, action.session) if denied else ""
            self._answer(
                asked.link, asked.request, granted=not denied, detail=detail, remedy=remedy
            )

    def _remedy(self, link: Link, session: SessionId) -> str:
        """Return what the user of a program can do that a notebook has started, and that found no
        room beside the notebook's own memory; "": it is no such program."""
        record = self._registry.get(session)
        if record is None or not record.kernel_id or record.ref == link.ref:
            return ""
        return user_texts.part_of_a_notebook(record.name)

    def _asks_again(self, session: SessionId, number: int) -> bool:
        """Request denied room once more after a look, and return whether it is to be. The last look
        may have met the call that failed in its midst, with memory that the driver has given back
        since."""
        asked, record = self._rooms.get(number), self._registry.get(session)
        if asked is None or record is None or asked.looked:
            return False
        asked.looked = True
        self._core.observer.after_a_look(record.target, partial(self._request_room, number))
        self._core.observer.hurry()
        return True

    def _request_room(self, number: int) -> None:
        asked = self._rooms.get(number)
        if asked is not None and asked.link.session is not None:
            session = asked.link.session
            self._core.feed(ev.RoomWanted(session=session, request=number, bytes=asked.bytes))

    def _take_off(self, number: int) -> Asked | None:
        asked = self._rooms.pop(number, None)
        if asked is not None:
            self._share.give_back(asked.link.uid)
        return asked

    def link_lost(self, link: Link) -> None:
        """Forget its requests: it asks again when it comes back."""
        for number, _ in self._asked_by(link):
            self._take_off(number)
            if link.session is not None:
                self._core.feed(ev.RoomNoLongerWanted(session=link.session, request=number))

    def _detached(self, session: SessionId) -> None:
        """Deny room to a session that leaves Kiwi: the scheduler has dropped its requests. A
        process that another session takes over still needs the room: see ``moved_over``."""
        record = self._registry.get(session)
        for link in self._links.of(session):
            if self._links.nearest(link, but=record) is None:
                self.deny(link)

    def deny(self, link: Link) -> None:
        """Deny all its requests: it has left Kiwi."""
        for number, asked in self._asked_by(link):
            self._take_off(number)
            self._answer(link, asked.request, granted=False, detail=NO_SESSION)

    def moved_over(self, link: Link) -> None:
        """Request the room again for the session that it belongs to now. Soon, and not at once,
        since this may be in the middle of an event.
        """
        if self._asked_by(link):
            asyncio.get_running_loop().call_soon(self._ask_anew, link)

    def _ask_anew(self, link: Link) -> None:
        for _, asked in self._asked_by(link):
            self.room_wanted(link, asked.request, asked.bytes)

    def _asked_by(self, link: Link) -> list[tuple[int, Asked]]:
        return [(number, asked) for number, asked in self._rooms.items() if asked.link is link]

    @staticmethod
    def _answer(link: Link, request: int, *, granted: bool, detail: str, remedy: str = "") -> None:
        if link.connection is not None:
            room = Room(request=request, granted=granted, detail=detail, remedy=remedy)
            link.connection.send(room)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
