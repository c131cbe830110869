"""The client's own thread: it reads what comes unasked, and reconnects broken connections."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_core.client.patience import Patience

if TYPE_CHECKING:
    from kiwi_core.client.channel import Channel
    from kiwi_core.client.daemon_socket import DaemonSocket

_BACKOFF_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between attempts; the last one repeats. A Unix socket refuses in microseconds, so attempts
cost nothing, and the client finds a restarted daemon before a person notices."""

_STABLE_S: Final = 2.0
"""A connection that lived this long restarts the back-off."""


_MEND_EVERY_S: Final = 5.0
"""How often the thread checks an idle connection for what an interrupt has left undone."""

_JOIN_S: Final = 1.0
"""Time for the thread to end: it ends at once, unless it waits for a daemon that hangs."""


class Watcher:
    """Owner of the thread, its ``epoll`` and its wake-up; one for each opening of a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._hurry = False
        self._thread = threading.Thread(target=self._run, name="kiwi-client", daemon=True)

    def start(self) -> None:
        """Start the thread. Called once, after the channel has set this watcher as its own."""
        self._thread.start()

    # --- called with the channel's lock held ------------------------------------------------------

    def add(self, link: DaemonSocket) -> None:
        """Listen to ``link``, unless that is so already."""
        try:  # not suppress(), which is slower: every grant comes here
            self._epoll.modify(link, select.EPOLLIN)
        except FileNotFoundError:
            self._epoll.register(link, select.EPOLLIN)

    def pause(self, link: DaemonSocket) -> None:
        """Do not listen to ``link`` until ``add``: its caller reads it. Takes a third of the time
        of ``remove`` and ``add``."""
        try:
            self._epoll.modify(link, 0)
        except (FileNotFoundError, ValueError):
            return

    def remove(self, link: DaemonSocket) -> None:
        """Do not listen to ``link``. Closing is not enough: a forked child keeps it open."""
        try:
            self._epoll.unregister(link)
        except (FileNotFoundError, ValueError):
            return

    def wake(self, *, hurry: bool = False) -> None:
        """Wake the thread to look again; ``hurry``: reconnect now, because somebody waits."""
        if hurry:
            self._hurry = True
        os.eventfd_write(self._wake_fd, 1)

    def join(self) -> None:
        """Wait for the thread, without the lock. The channel has retired and woken this watcher."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def release(self) -> None:
        """Close the descriptors. Called by the thread at its end, or in a forked child."""
        self._epoll.close()
        os.close(self._wake_fd)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        channel = self._channel
        reported = False
        failures = 0
        try:
            while channel.belongs_to(self):
                if channel.connected:
                    if not reported:
                        reported = True
                        channel.report_state(True)
                    since_s = time.monotonic()
                    self._read_until_lost()
                    failures = 0 if time.monotonic() - since_s > _STABLE_S else failures + 1
                else:
                    if reported:
                        reported = False
                        channel.report_state(False)
                    if not channel.reconnects:
                        break
                    self._wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                    if not channel.try_again(self):
                        failures += 1
            if reported:
                channel.report_state(False)
        finally:
            channel.end_watch(self)
            self.release()

    def _read_until_lost(self) -> None:
        channel = self._channel
        while channel.connected and channel.belongs_to(self):
            ready = self._epoll.poll(_MEND_EVERY_S)
            for fd, _ in ready:
                if fd == self._wake_fd:
                    self._calm()
                    channel.mend()
                elif not channel.read_now(fd):
                    with suppress(OSError):  # an interrupt left it here
                        self._epoll.unregister(fd)
            if not ready:
                channel.mend()

    def _wait(self, seconds: float) -> None:
        """Wait between attempts; end early if somebody hurries or the client is closed."""
        patience = Patience(seconds)
        while patience.tick() and self._channel.belongs_to(self) and not self._hurry:
            self._epoll.poll(patience.slice_s())
            self._calm()
        self._hurry = False
        self._channel.count_away(patience.spent_s)

    def _calm(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
