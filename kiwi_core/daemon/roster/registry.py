"""The processes that are sessions: who they are, and the moment they die.

A session is a process; its id is made from pid, start time and boot, so it is the same after the
daemon restarts and is never given to another process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.daemon.base.shares import Share, Shares
from kiwi_core.daemon.roster.roster import RosterEntry
from kiwi_core.errors import PeerError
from kiwi_core.gpu import processes
from kiwi_core.pager.api import ProcessRef, Target
from kiwi_core.peer_limits import SESSIONS
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.states import Priority

ANOTHER_USER: Final = "another user"
"""What a session is called for those who may not know its name."""

DEPARTED_MIN: Final = 256
"""Names of departed sessions are looked through no more often than each time that so many came."""


def session_id(ref: ProcessRef) -> SessionId:
    digest = hashlib.blake2b(
        f"{processes.boot_id()}/{ref.pid}/{ref.start_ticks}".encode(), digest_size=5
    ).hexdigest()
    return SessionId(f"k{digest}")


@dataclass(eq=False)
class Member:
    """``burst`` is our number of the last burst that was asked for, ``client_burst`` the client's;
    0: it is our own, for a call at a gate. ``waiting`` until it is granted, ``in_burst`` from then
    until it has ended. ``priority`` is the class it was put into live; ``None``: its user's.
    ``by_link``: only its preloaded library has said anything. ``forget`` runs while it has no
    connection."""

    id: SessionId
    ref: ProcessRef
    uid: int
    name: str = ""
    kernel_id: str = ""
    connection: Connection | None = None
    burst: int = 0
    client_burst: int = 0
    in_burst: bool = False
    waiting: bool = False
    priority: Priority | None = None
    by_link: bool = False
    ungated: str = ""
    """Why its own process has no gate, as its client says; "": it has one, or has not said."""
    bare: frozenset[ProcessRef] = frozenset()
    """Processes of it that were seen to use the GPU without a gate."""
    in_driver: bool = False
    """Whether the driver knew a process of it at the last look."""
    guarded: bool = True
    """What the scheduler was told last, from these three."""
    stopped: str = ""
    """Why a process of it does not run, as the scheduler was told last."""
    kept_out: str = ""
    """Who keeps it out of the GPU, likewise; "": nobody."""
    pidfd: int = -1
    forget: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def target(self) -> Target:
        return Target(self.id, self.ref)

    @property
    def own_burst(self) -> bool:
        """The last burst is our own: no client has a number for it."""
        return self.client_burst == 0

    def number(self, client_burst: int) -> int:
        """Ours of a burst that is asked for: a new one, unless its client asks once more for the
        one that waits or runs."""
        again = client_burst == self.client_burst and (self.waiting or self.in_burst)
        if not again:
            self.burst += 1
            self.client_burst = client_burst
        return self.burst

    def roster_entry(self) -> RosterEntry:
        return RosterEntry(
            session=self.id,
            pid=self.ref.pid,
            start_ticks=self.ref.start_ticks,
            uid=self.uid,
            name=self.name,
            kernel_id=self.kernel_id,
            burst=self.burst,
            client_burst=self.client_burst,
            by_link=self.by_link,
            in_burst=self.in_burst,
            priority=self.priority,
            guarded=self.guarded,
            kept_out=self.kept_out,
        )


@dataclass(frozen=True)
class Known:
    """Whose a session is or was, and what it is called."""

    uid: int
    name: str
    kernel_id: str


class SessionRegistry:
    """All sessions by id. ``on_death`` is called in the loop, once, when a process ends. ``share``
    counts them for their users."""

    def __init__(self, on_death: Callable[[Member], None], share: Share | None = None) -> None:
        self.share = share if share is not None else Shares()[SESSIONS]
        self._by_id: dict[SessionId, Member] = {}
        self._by_ref: dict[ProcessRef, Member] = {}
        self._on_death = on_death
        self._departed: dict[SessionId, Known] = {}
        self._look_through_at = DEPARTED_MIN
        self.remembered: Callable[[], Collection[SessionId]] = frozenset
        """Who is still spoken of (in the history): their names are kept after they left."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def refs(self) -> frozenset[ProcessRef]:
        """From any thread."""
        return frozenset(member.ref for member in list(self._by_id.values()))

    def get(self, session: str) -> Member | None:
        return self._by_id.get(SessionId(session))

    def known(self, session: str) -> Known | None:
        """Also of one that left, as long as it is spoken of."""
        member = self._by_id.get(SessionId(session))
        if member is None:
            return self._departed.get(SessionId(session))
        return Known(member.uid, member.name, member.kernel_id)

    def of_process(self, ref: ProcessRef) -> Member | None:
        return self._by_ref.get(ref)

    def add(self, member: Member) -> None:
        """Begins to watch the process. Raises ``PeerError("gone")`` if it is dead already."""
        pidfd = processes.open_pidfd(member.ref)
        if pidfd is None:
            raise PeerError("gone", f"Process {member.ref.pid} has ended.")
        member.pidfd = pidfd
        self._by_id[member.id] = member
        self._by_ref[member.ref] = member
        self.share.take(member.uid)
        asyncio.get_running_loop().add_reader(pidfd, self._died, member)

    def remove(self, member: Member) -> None:
        if self._by_id.pop(member.id, None) is None:
            return
        self._by_ref.pop(member.ref, None)
        self.share.give_back(member.uid)
        self._unwatch(member)
        if member.forget is not None:
            member.forget.cancel()
        self._departed[member.id] = Known(member.uid, member.name, member.kernel_id)
        if len(self._departed) >= self._look_through_at:
            spoken_of = self.remembered()
            self._departed = {id_: k for id_, k in self._departed.items() if id_ in spoken_of}
            self._look_through_at = 2 * len(self._departed) + DEPARTED_MIN

    def _died(self, member: Member) -> None:
        self._unwatch(member)
        self._on_death(member)

    def _unwatch(self, member: Member) -> None:
        if member.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1
