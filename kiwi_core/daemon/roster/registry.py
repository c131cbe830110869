"""The session registry: the processes that are sessions, and the detection of their death.

A session is a process. Its id is made from pid, start time and boot, so it stays the same when the
daemon restarts, and no other process ever gets it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.daemon.base.peers import Owner
from kiwi_core.daemon.base.shares import Share, Shares
from kiwi_core.errors import PeerError
from kiwi_core.gpu import containers, processes
from kiwi_core.pager.api import ProcessRef, Target
from kiwi_core.peer_limits import SESSIONS
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.states import Priority

ANOTHER_USER: Final = "another user"
"""Name of a session for those who may not know the real one."""

DEPARTED_MIN: Final = 256
"""Least number of departures between two cleanups of the names of departed sessions."""


def session_id(ref: ProcessRef) -> SessionId:
    digest = hashlib.blake2b(
        f"{processes.boot_id()}/{ref.pid}/{ref.start_ticks}".encode(), digest_size=5
    ).hexdigest()
    return SessionId(f"k{digest}")


@dataclass(eq=False)
class SessionRecord:
    """Who a session is, and how it is connected. What it does with the GPU is in the scheduler's
    record of it (``Scheduler.session``).

    ``priority`` is the class that was set live; ``None``: its user's. ``by_link``: only its
    preloaded library has connected. ``forget`` is the timer that runs while it has no connection.
    """

    id: SessionId
    ref: ProcessRef
    uid: int
    name: str = ""
    folder: str = ""
    """Where its notebook is; "": not known."""
    kernel_id: str = ""
    connection: Connection | None = None
    client_burst: int = 0
    """The client's number of the last burst that was requested; 0: the daemon made the burst, for a
    call at a gate. The daemon's own number is the scheduler's."""
    granted_burst: int = 0
    """The client's number of the last burst for which this daemon has granted the lease."""
    over_burst: int = 0
    """The daemon's number of the last burst that was reported as over. The scheduler gets its end
    after a look."""
    priority: Priority | None = None
    by_link: bool = False
    container: str = ""
    """The pod or container that its process is in; "": none."""
    job: str = ""
    """The number of the batch job that its process belongs to; "": none."""
    ungated: str = ""
    """Why its own process has no gate, as its client says; "": it has one, or did not say."""
    bare: frozenset[ProcessRef] = frozenset()
    """Processes of the session that were seen to use the GPU without a gate."""
    in_driver: bool = False
    """True if the driver knew a process of the session at the last look."""
    pidfd: int = -1
    forget: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def identity(self) -> Owner:
        return Owner(self.uid, self.container)

    @property
    def target(self) -> Target:
        return Target(self.id, self.ref)

    @property
    def owner(self) -> str:
        """The owner for whom its turns count."""
        return f"{self.uid} {self.container}".strip()

    @property
    def own_burst(self) -> bool:
        """True if the daemon made the last burst: no client has a number for it."""
        return self.client_burst == 0


@dataclass(frozen=True)
class Known:
    """The owner of a session that is there or has left: its user, container, name and batch job."""

    uid: int
    name: str
    kernel_id: str
    job: str = ""
    container: str = ""
    folder: str = ""

    @property
    def identity(self) -> Owner:
        return Owner(self.uid, self.container)

    @staticmethod
    def of(record: SessionRecord) -> Known:
        return Known(
            record.uid,
            record.name,
            record.kernel_id,
            record.job,
            record.container,
            record.folder,
        )


class SessionRegistry:
    """All sessions by id. ``on_death`` is called in the loop, once, when a process ends. ``share``
    counts the sessions of each user."""

    def __init__(
        self, on_death: Callable[[SessionRecord], None], share: Share | None = None
    ) -> None:
        self.share = share if share is not None else Shares()[SESSIONS]
        self._by_id: dict[SessionId, SessionRecord] = {}
        self._by_ref: dict[ProcessRef, SessionRecord] = {}
        self._refs: frozenset[ProcessRef] | None = None
        """The keys of ``_by_ref``, made at the first use after a change."""
        self._on_death = on_death
        self._departed: dict[SessionId, Known] = {}
        self._look_through_at = DEPARTED_MIN
        self.remembered: Callable[[], Collection[SessionId]] = frozenset
        """Returns the sessions that the history mentions: their names are kept after they left."""

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(list(self._by_id.values()))

    def refs(self) -> frozenset[ProcessRef]:
        """Return the processes of all sessions. May be called in any thread."""
        refs = self._refs
        if refs is None:
            refs = self._refs = frozenset(tuple(self._by_ref))
        return refs

    def get(self, session: str) -> SessionRecord | None:
        return self._by_id.get(SessionId(session))

    def known(self, session: str) -> Known | None:
        """Return the owner of ``session``, also of one that has left while the history mentions
        it.
        """
        record = self._by_id.get(SessionId(session))
        if record is None:
            return self._departed.get(SessionId(session))
        return Known.of(record)

    def naming(self) -> Callable[[Known], str]:
        """Return what gives a session's name as its user reads it now: with as much of its folder
        as tells it from another one of the same name that is there."""
        folders: dict[tuple[int, str, str], set[str]] = {}
        for record in self._by_id.values():
            key = (record.uid, record.container, record.name)
            folders.setdefault(key, set()).add(record.folder)

        def shown(known: Known) -> str:
            others = folders.get((known.uid, known.container, known.name), ())
            return _told_apart(known.name, known.folder, others)

        return shown

    def of_process(self, ref: ProcessRef) -> SessionRecord | None:
        return self._by_ref.get(ref)

    def add(self, record: SessionRecord) -> None:
        """Add ``record`` and watch its process. Raises ``PeerError("gone")`` if that has ended."""
        pidfd = processes.open_pidfd(record.ref)
        if pidfd is None:
            raise PeerError("gone", f"Process {record.ref.pid} has ended.")
        record.pidfd = pidfd
        record.job = processes.job_of(record.ref.pid)
        record.container = containers.container_of(record.ref.pid)
        self._by_id[record.id] = record
        self._by_ref[record.ref] = record
        self._refs = None
        self.share.take(record.uid)

        def died() -> None:
            self._unwatch(record)
            self._on_death(record)

        asyncio.get_running_loop().add_reader(pidfd, died)

    def remove(self, record: SessionRecord) -> None:
        if self._by_id.pop(record.id, None) is None:
            return
        self._by_ref.pop(record.ref, None)
        self._refs = None
        self.share.give_back(record.uid)
        self._unwatch(record)
        if record.forget is not None:
            record.forget.cancel()
        self._departed[record.id] = Known.of(record)
        if len(self._departed) >= self._look_through_at:
            spoken_of = self.remembered()
            self._departed = {id_: k for id_, k in self._departed.items() if id_ in spoken_of}
            self._look_through_at = 2 * len(self._departed) + DEPARTED_MIN

    def _unwatch(self, record: SessionRecord) -> None:
        if record.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(record.pidfd)
            os.close(record.pidfd)
            record.pidfd = -1


def _told_apart(name: str, folder: str, folders: Collection[str]) -> str:
    """Return ``name`` behind the shortest end of ``folder`` that no other of ``folders`` has."""
    parts = [part for part in folder.split("/") if part]
    others = [f"/{other.strip('/')}" for other in folders if other != folder]
    for count in range(len(parts) + 1) if others else ():
        end = "/".join(parts[len(parts) - count :])
        if count and not any(other.endswith(f"/{end}") for other in others):
            return f"{end}/{name}"
    return name
