"""The connection to one daemon: a thread that receives from it and informs the event loop."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.client import Client
from kiwi_core.errors import KiwiError, PeerError
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus, HistoryReport

RETRY_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to connect; the last one repeats. Refusals cost microseconds."""

PING_EVERY_S: Final = 5.0
"""Interval of pings: a daemon without news and one that hangs are equally silent."""

ANSWER_S: Final = 10.0
"""A daemon that takes longer than this hangs; the busiest machine that we have seen took a
second.
"""


@dataclass(frozen=True)
class StatusReceived:
    """A daemon's status, read at ``at`` (Unix seconds), with the changes of its history since the
    last one; ``history`` is ``None`` if there are none.
    """

    socket: Path
    status: GpuStatus
    history: HistoryReport | None
    at: float


@dataclass(frozen=True)
class DaemonLost:
    """The daemon does not answer (any more), and why. ``gone``: it removed its socket."""

    socket: Path
    error: KiwiError
    gone: bool
    at: float


class DaemonFollower(threading.Thread):
    """Follows the daemon at ``socket`` until closed, or until the socket is gone. ``report`` gets
    each message, in this thread. ``client`` is for requests, from any thread.
    """

    def __init__(self, socket: Path, report: Callable[[StatusReceived | DaemonLost], None]) -> None:
        super().__init__(name=f"kiwi {socket.stem}", daemon=True)
        self.socket = socket
        self.client: Client | None = None
        """Connected; ``None`` while the daemon is away."""
        self._report = report
        self._closed = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._keep_pinging, name=f"{self.name} ping", daemon=True).start()
        try:
            self._keep_following()
        finally:
            self._closed.set()

    def _keep_following(self) -> None:
        failures = 0
        while not self._closed.is_set():
            received, error = self._follow()
            # Path's method raises where this user has no access
            gone = not os.path.exists(self.socket)
            if self._closed.is_set():
                return
            failures = 0 if received else failures + 1
            if received or failures == 1 or gone:
                self._report(DaemonLost(self.socket, error, gone, time.time()))
            if gone:
                return
            self._closed.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])

    def _keep_pinging(self) -> None:
        """End a connection on which nobody answers any more. The next connection attempt fails, and
        that is reported.
        """
        while not self._closed.wait(PING_EVERY_S):
            if (client := self.client) is None:
                continue
            try:
                client.ping(ANSWER_S)
            except KiwiError:
                client.close()

    def _follow(self) -> tuple[bool, KiwiError]:
        """Follow one connection. Return whether anything was received on it, and how it ended."""
        received = False
        client = Client(self.socket, role=Role.OBSERVER, client="jupyter server", reconnect=False)
        try:
            client.connect()
            self.client = client
            serial = 0
            for status in client.watch():
                at = time.time()
                history = client.history(serial) if status.history_serial > serial else None
                serial = history.last if history else serial
                received = True
                self._report(StatusReceived(self.socket, status, history, at))
                if self._closed.is_set():
                    break
        except KiwiError as error:
            return received, error
        finally:
            self.client = None
            client.close()
        return received, PeerError(
            "disconnected",
            "The Kiwi daemon of this GPU went away.",
            "Notebooks go on; it is shown again as soon as it is back."
            " Start one with `kiwi daemon`.",
        )

    def close(self) -> None:
        """Return at once; the thread ends by itself."""
        self._closed.set()
        if (client := self.client) is not None:
            client.close()
