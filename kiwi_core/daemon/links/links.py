"""The processes that have Kiwi's library preloaded, and the session that each belongs to.

A link belongs to the nearest session among its process and the ancestors of that. A process without
such a session becomes one; if an ancestor becomes a session later, that takes the link over. The
last report of a link stays known when its connection is lost, until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from kiwi_core import clock
from kiwi_core.daemon.base.shares import Share, Shares
from kiwi_core.daemon.links.calls import PagerCall
from kiwi_core.daemon.links.library_words import ACTION, RESIDENCY
from kiwi_core.daemon.links.link import Link
from kiwi_core.daemon.roster.roster import RosterLink
from kiwi_core.errors import GpuError, PeerError
from kiwi_core.gpu import host, processes
from kiwi_core.gpu.ownable import OwnershipObjection
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Refused, Target
from kiwi_core.pager.linked import LibraryReport, LinkedProcesses, all_out
from kiwi_core.peer_limits import PROGRAMS
from kiwi_core.states import NOT_FREE, GateOnly, Reason, Residency
from kiwi_core.units import MIB, NS_PER_MS, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager as AsyncContextManager

    from kiwi_core.daemon.links.ownership import Ownership
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.daemon.roster.roster import Roster
    from kiwi_core.pager.api import Observation, Outcome
    from kiwi_core.pager.linked import LibraryStep, LinkedProcess
    from kiwi_core.wire.pager import PagerDone, PagerState

log = structlog.get_logger(__name__)

ANCESTORS_MAX: Final = 64
"""Most ancestors of a process; shells in shells in launchers come to a dozen."""


_NEWS_BYTES: Final = 2 * MIB
"""Least difference between a peak and what a library still holds that is reported: NVML, which is
read twice a second, shows the rest."""


@dataclass(eq=False, repr=False)
class Links(LinkedProcesses):
    """``on_death`` is called when a linked process ends.

    ``gpu_bytes`` limits what a library may claim to have. ``before_a_move`` is called before a
    page-out is sent, so that the roster on disk knows of it.
    """

    _registry: SessionRegistry
    _gpu_bytes: int
    _on_death: Callable[[Link], None]
    _before_a_move: Callable[[], None] = lambda: None
    _share: Share = field(default_factory=lambda: Shares()[PROGRAMS])
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _by_ref: dict[ProcessRef, Link] = field(default_factory=dict)
    _by_session: dict[SessionId, tuple[Link, ...]] = field(default_factory=dict)
    # Not from 1: an answer to an earlier daemon must not pass for one to this daemon.
    _ops: Iterator[int] = field(
        default_factory=lambda: itertools.count(time.monotonic_ns() // NS_PER_MS)
    )
    ownership: Ownership | None = None
    """What decides which libraries own; ``None``: nothing speaks against any."""
    ram_for: Callable[[Sequence[LinkedProcess], int], AsyncContextManager[None]] | None = None
    """Waits, until a time at most, for the RAM that a page-out takes, and keeps it until the end
    (``LibraryRam.room_for``). ``None``: page-outs do not ask."""

    # --- for the pager --------------------------------------------------------------------------

    def of(self, session: SessionId) -> tuple[Link, ...]:
        return self._by_session.get(session, ())

    def everybody(self) -> tuple[Link, ...]:
        return tuple(self._by_ref.values())

    def about_to_go_out(self, session: SessionId) -> None:
        if self.ownership is not None:
            self.ownership.before_a_move(self.of(session))

    def why_driver(self, session: SessionId) -> OwnershipObjection | None:
        """Return why the driver moves memory of ``session`` that a library could own."""
        objections = (link.objection for link in self.of(session))
        asked = (one for one in objections if one and one.why is not GateOnly.NOT_ASKED)
        return next(asked, None)

    def paged_out(self) -> tuple[Target, ...]:
        found = []
        for session, links in list(self._by_session.items()):
            record = self._registry.get(session)
            if record is not None and all(map(all_out, links)):
                found.append(record.target)
        return tuple(found)

    async def perform(
        self, those: Sequence[LinkedProcess], step: LibraryStep, deadline_ns: int
    ) -> list[Outcome]:
        if step != "page-out" or self.ram_for is None:
            return await self._perform(those, step, deadline_ns)
        async with self.ram_for(those, deadline_ns):
            return await self._perform(those, step, deadline_ns)

    async def _perform(
        self, those: Sequence[LinkedProcess], step: LibraryStep, deadline_ns: int
    ) -> list[Outcome]:
        calls = [PagerCall(ACTION[step], deadline_ns) for _ in those]
        links = [self._by_ref.get(linked.ref) for linked in those]
        if step == "page-out":
            for leaver in filter(None, links):
                leaver.going_out = True
            self._before_a_move()
        for link, call in zip(links, calls, strict=True):
            if link is None or self._by_ref.get(link.ref) is not link:
                call.resolve(Refused(Reason.GONE, "The process has ended."))
            else:
                link.begin(call)
        return [await call.outcome for call in calls]

    # --- who there is ---------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._by_ref)

    @property
    def sessions(self) -> Iterable[SessionId]:
        return self._by_session

    def connected(self, session: SessionId) -> bool:
        """Return whether a process of ``session`` is connected."""
        return any(link.connected for link in self.of(session))

    def shut(self, session: SessionId) -> bool:
        """Return whether a library of ``session`` holds its program, or has its memory out."""
        return any(link.report.residency in NOT_FREE for link in self.of(session))

    def unowned(self, session: SessionId) -> dict[str, int]:
        """Return what the libraries of its processes cannot move, in bytes by kind."""
        found: Counter[str] = Counter()
        for link in self.of(session):
            found.update(link.report.unowned)
        return dict(found)

    def nearest(self, link: Link, but: SessionRecord | None = None) -> SessionRecord | None:
        """Return the session (not ``but``) to which the process belongs, if its user has one."""
        for candidate in link.above:
            record = self._registry.of_process(candidate)
            if record is not None and record is not but and record.uid == link.uid:
                return record
        return None

    def hello(self, ref: ProcessRef, uid: int, name: str) -> Link:
        """Do the same as ``take``, for a program that connects itself. Raises ``PeerError``:
        "gone", or "too-many-sessions" if its user has too many.
        """
        if ref not in self._by_ref and not self._share.may(uid):
            raise PeerError(
                "too-many-sessions",
                "You have as many programs with Kiwi's library on this GPU as you may have.",
                "Close programs that are no longer needed. Kiwi tries again by itself.",
            )
        return self.take(ref, uid, name)

    def take(self, ref: ProcessRef, uid: int, name: str) -> Link:
        """Return the link of process ``ref``, a new one if need be. Raises
        ``PeerError("gone")``."""
        link = self._by_ref.get(ref)
        if link is None:
            link = Link(ref, uid, name, next_op=lambda: next(self._ops))
            link.above = above(ref)
            pidfd = processes.open_pidfd(ref)
            if pidfd is None:
                raise PeerError("gone", f"Process {ref.pid} has ended.")
            link.pidfd = pidfd
            self._loop.add_reader(pidfd, self._died, link)
            self._by_ref[ref] = link
            self._share.take(uid)
        link.name = name or link.name
        return link

    def assign(self, link: Link, session: SessionId | None) -> None:
        if link.session is not None:
            left = tuple(one for one in self.of(link.session) if one is not link)
            if left:
                self._by_session[link.session] = left
            else:
                self._by_session.pop(link.session, None)
        link.session = session
        if session is not None:
            self._by_session[session] = (*self.of(session), link)

    def handle_state(self, link: Link, state: PagerState) -> None:
        """Take its report, within what is possible: no more GPU memory than the GPU has, and no
        more system RAM than the kernel counts for the process.
        """
        reported_bytes = max(state.arena_bytes, state.paged_out_bytes)
        try:
            link.host_bytes = host.held_bytes(link.ref.pid) if reported_bytes else 0
        except GpuError as error:  # the last value stays
            log.error("the RAM of a process cannot be read", pid=link.ref.pid, why=str(error))
        link.handle_report(
            LibraryReport(
                RESIDENCY[state.state],
                self._at_most(state.resident_bytes),
                self._at_most(state.paged_out_bytes),
                self._at_most(state.unowned_bytes),
                {kind: self._at_most(amount) for kind, amount in state.unowned.items()},
                min(state.arena_bytes, link.host_bytes),
                self._at_most(state.held_bytes),
            )
        )

    def need_bytes(self, link: Link, state: PagerState) -> int:
        """Return what the session of ``link`` has needed at once, by the counts of its libraries:
        0 if that is no more than what it holds, which NVML shows, too."""
        most_bytes = max(state.peak_bytes, state.lacked_bytes)
        has_bytes = state.held_bytes + state.paged_out_bytes
        if link.session is None or most_bytes < has_bytes + _NEWS_BYTES:
            return 0
        others = (one for one in self.of(link.session) if one is not link)
        others_bytes = sum(one.report.held_bytes + one.context_bytes for one in others)
        return self._at_most(most_bytes + link.context_bytes + others_bytes)

    def seen(self, target: Target, seen: Observation) -> None:
        """Learn what the contexts of its linked processes take: the least that NVML has counted
        beyond what their libraries count."""
        in_gpu = {one.ref: one.resident_bytes for one in seen.processes if one.resident_bytes}
        for link in self.of(target.session):
            if link.connected and link.ref in in_gpu:
                link.sees_context(in_gpu[link.ref])

    def done(self, link: Link, answer: PagerDone) -> bool:
        """Call ``link.done`` with no more bytes than the GPU has."""
        return link.done(msgspec.structs.replace(answer, bytes=self._at_most(answer.bytes)))

    def _at_most(self, reported_bytes: int) -> int:
        return min(reported_bytes, self._gpu_bytes)

    # --- over a crash of the daemon -------------------------------------------------------------

    def restore(self, roster: Roster) -> None:
        """Restore the links of the last daemon. Those that were out, or about to go, stay out until
        they are ordered back, so that this is known before they reconnect. The others are about to
        reconnect, and the driver must not take them meanwhile. Links whose session has left Kiwi
        stay outside: reconnecting must not make them a session again."""
        for pid, start_ticks, uid in roster.off:
            with contextlib.suppress(PeerError):  # it has ended
                self.take(ProcessRef(pid, start_ticks), uid, "").off = True
        for entry in roster.links:
            ref = entry.ref
            try:
                link = self.take(ref, entry.uid, entry.name)
            except PeerError:
                continue  # it has ended
            if entry.out:
                out_bytes = self._at_most(entry.paged_out_bytes)
                link.report = LibraryReport(Residency.PAGED_OUT, paged_out_bytes=out_bytes)
            link.image = entry.image
            link.objection = OwnershipObjection(entry.objection) if entry.objection else None
            link.away_since_s = clock.now_s()
            link.forget_if_replaced()
            self.assign(link, SessionId(entry.session))

    def expect_all(self) -> None:
        """Give the known libraries time to connect from now on. The driver must not get a process
        whose gate is open only because its library could not connect yet."""
        for link in self._by_ref.values():
            if not link.connected:
                link.away_since_s = clock.now_s()

    def roster_off(self) -> list[tuple[int, int, int]]:
        links = self._by_ref.values()
        return [(link.ref.pid, link.ref.start_ticks, link.uid) for link in links if link.off]

    def roster(self) -> list[RosterLink]:
        found = []
        for link in self._by_ref.values():
            if link.session is None:
                continue
            report, going_out = link.report, link.going_out
            going_bytes = report.resident_bytes if going_out else 0
            entry = RosterLink(
                pid=link.ref.pid,
                start_ticks=link.ref.start_ticks,
                uid=link.uid,
                session=link.session,
                paged_out_bytes=report.paged_out_bytes + going_bytes,
                name=link.name,
                image=link.image,
                out=going_out or report.residency is Residency.PAGED_OUT,
                objection=link.objection.why if link.objection else None,
            )
            found.append(entry)
        return found

    def _died(self, link: Link) -> None:
        self._loop.remove_reader(link.pidfd)
        if self.ownership is not None:
            self.ownership.died(link)
        os.close(link.pidfd)
        link.pidfd = -1
        if self._by_ref.pop(link.ref, None) is not None:
            self._share.give_back(link.uid)
        link.died()
        self._on_death(link)  # while its session is known: its requests are withdrawn
        self.assign(link, None)


def above(ref: ProcessRef) -> tuple[ProcessRef, ...]:
    """Return the process and those that it may belong to, nearest first. Called once per link: a
    walk through ``/proc`` is slow, and parents that end later still were its parents."""
    found = [ref, *itertools.islice(processes.ancestors(ref), ANCESTORS_MAX)]
    stat = processes.stat_of(ref.pid)
    leader = processes.ref_of(stat.session) if stat is not None else None
    if leader is not None and processes.in_session_of(leader, ref.pid):
        found.append(leader)  # its parents may have ended
    return tuple(found)
