"""Requests for room: an allocation that fails for want of GPU memory waits until others have left.

The thread that allocates waits in the preloaded library (``WantRoom``); the scheduler promises the
room or denies it.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from kiwi_core.daemon import user_texts
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import RoomDenied, RoomMade
from kiwi_core.wire.pager import Room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.sched.actions import Action
    from kiwi_core.units import SessionId

ROOM_REQUESTS_MAX: Final = 256
"""Most threads of one process that may wait for room at the same time."""

NO_SESSION: Final = "This program has left Kiwi, which makes no room for it any more."


@dataclass(slots=True)
class Asked:
    """A request for room; ``request`` is the library's number. ``looked``: it was denied once, and
    is requested again after a look."""

    link: Link
    request: int
    bytes: int
    looked: bool = False

    def answer(self, *, granted: bool, detail: str, remedy: str = "") -> None:
        if self.link.connection is not None:
            room = Room(request=self.request, granted=granted, detail=detail, remedy=remedy)
            self.link.connection.send(room)


@dataclass(eq=False, repr=False)
class RoomRequests:
    """``share`` counts the requests of each user."""

    _core: Core
    _links: Links
    _registry: SessionRegistry
    _share: Share
    _asked: dict[int, Asked] = field(default_factory=dict)
    """The requests, by the number that the scheduler has for each."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    def wanted(self, link: Link, request: int, wanted_bytes: int) -> None:
        asked = Asked(link, request, wanted_bytes)
        if link.session is None:
            asked.answer(granted=False, detail=NO_SESSION)
            return
        its = self._asked_by(link)
        number = next((number for number, one in its if one.request == request), None)
        if number is None:
            if len(its) >= ROOM_REQUESTS_MAX or not self._share.may(link.uid):
                detail = (
                    "Too many threads of this program, or of its user's programs, ask for room."
                )
                asked.answer(granted=False, detail=detail)
                return
            number = next(self._numbers)
            self._share.take(link.uid)
        self._asked[number] = asked
        self._request(number)

    def _request(self, number: int) -> None:
        asked = self._asked.get(number)
        if asked is not None and asked.link.session is not None:
            session = asked.link.session
            self._core.feed(ev.RoomWanted(session=session, request=number, bytes=asked.bytes))

    def answer(self, actions: Sequence[Action]) -> None:
        """Pass the scheduler's answers on. Denied room is requested once more after a look: the
        last look may have met the call that failed in its midst, with memory that the driver has
        given back since."""
        for action in actions:
            if not isinstance(action, (RoomMade, RoomDenied)):
                continue
            asked, record = self._asked.get(action.request), self._registry.get(action.session)
            if asked is None:
                continue
            remedy = detail = ""
            if isinstance(action, RoomDenied):
                if record is not None and not asked.looked:
                    asked.looked = True
                    again = partial(self._request, action.request)
                    self._core.observer.after_a_look(record.target, again)
                    self._core.observer.hurry()
                    continue
                detail = action.detail
                if record is not None and record.kernel_id and record.ref != asked.link.ref:
                    # A notebook has started it: it found no room beside the notebook's own memory.
                    remedy = user_texts.part_of_a_notebook(record.name)
            self._take_off(action.request)
            asked.answer(granted=isinstance(action, RoomMade), detail=detail, remedy=remedy)

    def session_leaves(self, session: SessionId) -> None:
        """Deny room to a session that leaves Kiwi: the scheduler has dropped its requests. A
        process that another session takes over still needs the room: see ``moved_over``."""
        record = self._registry.get(session)
        for link in self._links.of(session):
            if self._links.nearest(link, but=record) is None:
                self.deny(link)

    def link_lost(self, link: Link) -> None:
        """Forget its requests: it asks again when it comes back."""
        for number, _ in self._asked_by(link):
            self._take_off(number)
            if link.session is not None:
                self._core.feed(ev.RoomNoLongerWanted(session=link.session, request=number))

    def deny(self, link: Link) -> None:
        """Deny all its requests: it has left Kiwi."""
        for number, asked in self._asked_by(link):
            self._take_off(number)
            asked.answer(granted=False, detail=NO_SESSION)

    def moved_over(self, link: Link) -> None:
        """Request the room again for the session that it belongs to now. Soon, and not at once,
        since this may be in the middle of an event."""

        def ask_anew() -> None:
            for _, asked in self._asked_by(link):
                self.wanted(link, asked.request, asked.bytes)

        if self._asked_by(link):
            asyncio.get_running_loop().call_soon(ask_anew)

    def _take_off(self, number: int) -> None:
        if (asked := self._asked.pop(number, None)) is not None:
            self._share.give_back(asked.link.uid)

    def _asked_by(self, link: Link) -> list[tuple[int, Asked]]:
        return [(number, asked) for number, asked in self._asked.items() if asked.link is link]
