"""This process's use of the GPU: one wait or lease, shared by every thread that is in it.

Cells of subshells are threads. The first one requests the GPU, all wait for the same grant, and the
burst ends after the last one has left. So an interrupted cell does not take another one's place
away.

A burst outlives its last cell by a short grace, so that the turn belongs to the notebook. Cells
that are queued ("Run All"), or that a tool sends as soon as it has the last answer, run in the same
turn.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import KiwiError
from kiwi_jupyter.kernel.gcguard import GcGuard
from kiwi_jupyter.kernel.grace import Grace
from kiwi_jupyter.kernel.leftovers import Leftovers

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kiwi_core.client import Client, Ticket
    from kiwi_core.wire.messages import Waiting

WATCH_EVERY_S: Final = 0.25
"""Interval of checks whether left-over threads and tasks have ended."""


class Burst:
    """One kernel's burst. Any thread may call it; only ``wait`` blocks. ``grace_s``: how long a
    granted burst goes on without a member.
    """

    def __init__(self, guard: GcGuard | None = None, grace_s: float = 0.0) -> None:
        self._lock = threading.RLock()
        self._grace = Grace(grace_s, self._lock, self._end)
        self._members: set[Hashable] = set()
        self._client: Client | None = None
        self._ticket: Ticket | None = None
        self._held = False
        self._before: Waiting | None = None
        """The last message about the wait before the grant."""
        self._number = 0
        self._leftovers = Leftovers()
        self._watcher: threading.Thread | None = None
        self._guard = guard or GcGuard(enabled=False)

    @property
    def held(self) -> bool:
        """Return whether a burst with a member has the lease."""
        return self._held and bool(self._members)

    @property
    def granted(self) -> bool:
        """Return whether this process has the lease, with or without a member in the burst."""
        return self._held

    @property
    def waiting(self) -> Waiting | None:
        """Return the daemon's last message about the wait."""
        ticket = self._ticket
        return ticket.last_waiting if ticket is not None and not self._held else None

    @property
    def suspended(self) -> Waiting | None:
        """Return the message about a suspended burst that has a member; ``None`` if there is no
        such burst, or it goes on.
        """
        return self._put_off() if self._members else None

    def is_in(self, member: Hashable) -> bool:
        return member in self._members

    def join(self, client: Client, member: Hashable) -> None:
        """Add ``member``, and request the GPU if nobody has yet. Raise what ``begin`` raises; then
        ``member`` is not added.
        """
        with self._lock:
            self._grace.stop()
            if not self._members and (not client.connected or self._put_off()):
                # Without a daemon the next request raises. A burst that was suspended in its grace
                # has lost its turn, and this cell waits for a new one.
                self._end()
            self._members.add(member)  # first: whoever is interrupted below leaves again
            if self._ticket is None:
                try:
                    self._ticket = client.begin()
                except KiwiError:
                    self._members.discard(member)
                    raise
                self._client = client
                self._number = self._ticket.burst

    def wait(self, timeout_s: float) -> bool:
        """Return whether this process has the GPU, after at most ``timeout_s``. Raise ``KiwiError``
        if the request failed; then every member must leave.
        """
        ticket = self._ticket
        if ticket is None or self._held:
            return True
        granted = ticket.wait(timeout_s) if timeout_s > 0 else ticket.poll()
        if granted is None:
            return False
        with self._lock:
            if ticket is self._ticket and not self._held:
                self._before = ticket.last_waiting
                self._held = True
                self._guard.burst_began()
        return True

    def go_on_without(self) -> None:
        """Go on without a lease, since no daemon came in time. Leave a request for the daemon that
        comes while the cells run: it must know that they use the GPU. Otherwise it would take them
        for idle, page them out and never bring them back, and an earlier daemon may already have
        paged them out. Raises what ``begin`` raises.
        """
        with self._lock:
            if self._client is not None and self._ticket is not None:
                self._ticket = self._client.begin()
                self._number = self._ticket.burst

    def leave(self, member: Hashable, leftovers: Leftovers | None = None) -> None:
        """Remove ``member``, which has finished or gave up. The burst ends when all have left:
        after a grace if it was granted. If ``leftovers`` are still alive then, tell the daemon, and
        tell it again when they have ended.
        """
        with self._lock:
            if member not in self._members:
                return
            if leftovers is not None:
                self._leftovers = self._leftovers.and_also(leftovers)
            if self._members == {member}:
                if self._held:
                    self._grace.start()
                else:
                    self._end()
            self._members.discard(member)  # last: after an interrupt it can leave again

    def end_now(self) -> None:
        """End the grace of a burst without members."""
        with self._lock:
            if not self._members:
                self._grace.stop()
                self._end()

    def abandon(self) -> None:
        """Forget everything, in the child after ``fork``: the lease is the parent's."""
        self.__init__(GcGuard(enabled=False))  # type: ignore[misc]

    def _put_off(self) -> Waiting | None:
        """Return the message about a granted burst that is suspended."""
        ticket = self._ticket
        said = ticket.last_waiting if ticket is not None and self._held else None
        return said if said is not self._before else None

    def _end(self) -> None:
        ticket, client = self._ticket, self._client
        if ticket is None or client is None:
            return
        lingering = self._held and self._leftovers.alive
        if self._held:
            self._guard.burst_ended()
            client.end_burst(lingering=lingering)
        else:
            ticket.cancel()
        self._ticket, self._held = None, False  # last: after an interrupt all of this is done again
        if lingering and (self._watcher is None or not self._watcher.is_alive()):
            self._watcher = threading.Thread(target=self._watch, name="kiwi-leftovers", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """End a lingering burst when the last thread or task that it left behind has ended."""
        while True:
            threading.Event().wait(WATCH_EVERY_S)
            with self._lock:
                if self._ticket is not None:
                    return  # a new burst; its end looks at the leftovers again
                if not self._leftovers.alive:
                    self._watcher = None
                    if self._client is not None:
                        self._client.end_burst(burst=self._number)
                    return
