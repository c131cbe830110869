"""One connection to each daemon, however many browsers look, and none while nobody looks.

The extension looks for sockets while somebody looks, because daemons may start, end and come back
at any time. A daemon is started only when somebody begins to look, never by itself in a loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.client import discover
from kiwi_core.client.autostart import autostart
from kiwi_core.client.directory import ASK_ADMIN, may_start_in, why_stopped
from kiwi_core.errors import KiwiError, PeerError
from kiwi_jupyter.server_ext.daemon_follower import DaemonFollower, DaemonLost, StatusReceived
from kiwi_jupyter.server_ext.gpu_record import GpuRecord
from kiwi_jupyter.server_ext.model import Problem
from kiwi_jupyter.server_ext.threads import call_in, in_thread
from kiwi_jupyter.server_ext.to_rest import problem_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus

RESCAN_S: Final = 1.0
"""Interval of searches for new sockets, in one short directory."""

IDLE_S: Final = 30.0
"""Connections are closed when nobody has looked for this long; a script may ask every few
seconds.
"""

FORGET_S: Final = 10.0
"""Time for which a GPU is shown after its daemon removed its socket: it may be restarting."""

SETTLE_S: Final = 3.0
"""How long the first look waits for the daemons' first status."""

START_AGAIN_S: Final = 5.0
"""Time after a failed start in which no look starts a daemon."""

BACK_BY_ITSELF_S: Final = 3.0
"""How long a daemon that just went away may take to return: its supervisor restarts it at once."""


class DaemonConnections:
    """The connections; lives in the event loop. ``changed`` is called there for each message of a
    daemon; ``watched`` says whether somebody looks without asking again (a stream).
    """

    def __init__(
        self,
        directory: Path,
        *,
        autostarts: bool,
        changed: Callable[[], None],
        watched: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._autostarts = autostarts
        self._changed = changed
        self._watched = watched
        self.records: dict[Path, GpuRecord] = {}
        self._followers: dict[Path, DaemonFollower] = {}
        self._tending: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._start_error: KiwiError | None = None
        self._start_failed_s = -START_AGAIN_S
        self._looked_s = 0.0

    # --- looking --------------------------------------------------------------------------------

    def look(self, *, starts: bool = True) -> None:
        """Take note that somebody looks: stay connected for a while, and with ``starts`` start a
        daemon if there is none.
        """
        self._looked_s = time.monotonic()
        if self._tending is None:
            self._scan()
            self._tending = asyncio.create_task(self._tend())
            self.records = {
                path: record for path, record in self.records.items() if path in self._followers
            }
            for record in self.records.values():
                record.stale = True
        if starts and self._may_start():
            self._starting = asyncio.create_task(self._start())

    @property
    def is_open(self) -> bool:
        """Return whether somebody has looked lately."""
        return self._tending is not None

    async def settled(self, timeout_s: float = SETTLE_S) -> None:
        """Return when every daemon has sent a status or failed to, including one that is being
        started, but after ``timeout_s`` at the latest.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            records = [self.records.get(socket) for socket in self._followers]
            answered = all(record is not None and not record.stale for record in records)
            if answered and self._starting is None:
                return
            await asyncio.sleep(0.01)

    async def _tend(self) -> None:
        while self._watched() or time.monotonic() - self._looked_s < IDLE_S:
            await asyncio.sleep(RESCAN_S)
            if self._scan() | self._forget():
                self._changed()
        self._tending = None
        self._close_followers()

    def _scan(self) -> bool:
        """Follow new sockets. Return whether there were any."""
        new = [path for path in discover(self._directory) if not self._is_followed(path)]
        loop = asyncio.get_running_loop()
        for path in new:
            follower = DaemonFollower(
                path, lambda report: call_in(loop, self._handle_report, report)
            )
            self._followers[path] = follower
            follower.start()
        return bool(new)

    def _is_followed(self, path: Path) -> bool:
        follower = self._followers.get(path)
        return follower is not None and follower.is_alive()

    def _forget(self) -> bool:
        """Forget daemons that are not back; return whether there were any. A daemon whose new
        follower has not received a status yet stays: otherwise the next scan would start a second
        follower.
        """
        now = time.time()
        gone = [
            path
            for path, record in self.records.items()
            if record.gone_at is not None
            and now - record.gone_at > FORGET_S
            and not self._is_followed(path)
        ]
        for path in gone:
            del self.records[path]
            self._followers.pop(path, None)
        return bool(gone)

    def _handle_report(self, report: StatusReceived | DaemonLost) -> None:
        if report.socket not in self._followers:
            return  # reported before it was closed
        record = self.records.setdefault(report.socket, GpuRecord())
        if isinstance(report, StatusReceived):
            record.handle_status(report)
            self._start_error = None
        else:
            record.handle_loss(report)
        self._changed()

    def _close_followers(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    async def close(self) -> None:
        """Close all connections. Called once, when the server ends."""
        for task in (self._tending, self._starting):
            if task is not None:
                task.cancel()
        self._tending = self._starting = None
        self._close_followers()

    def answering(self) -> list[tuple[GpuStatus, Client | None]]:
        """Yield every known GPU, with the connection to its daemon, if there is one."""
        return [
            (record.status, follower.client)
            for path, follower in self._followers.items()
            if (record := self.records.get(path)) is not None and record.status is not None
        ]

    # --- starting a daemon ----------------------------------------------------------------------

    def _may_start(self) -> bool:
        return (
            self._autostarts
            and self._starting is None
            and config.gpu_possible()
            and not self._somebody_answers()
            and time.monotonic() - self._start_failed_s >= START_AGAIN_S
        )

    def _somebody_answers(self) -> bool:
        return any(follower.client is not None for follower in self._followers.values())

    async def _start(self) -> None:
        """Start a daemon, unless one that has a socket answers after all."""
        try:
            until_s = time.monotonic() + (BACK_BY_ITSELF_S if self._followers else 0.0)
            while time.monotonic() < until_s and not self._somebody_answers():
                await asyncio.sleep(0.05)
            if not self._somebody_answers():
                self._changed()  # "starting"
                await in_thread(lambda: autostart(self._directory), "kiwi autostart")
                self._scan()
            self._start_error = None
        except (KiwiError, OSError) as error:
            self._start_error = error if isinstance(error, KiwiError) else _cannot_start(error)
            self._start_failed_s = time.monotonic()
        finally:
            self._starting = None
            self._changed()

    # --- what is wrong, and whom to ask ---------------------------------------------------------

    def problem(self) -> Problem | None:
        """Return why there is no GPU to show; ``None`` if there is one."""
        if any(record.status is not None for record in self.records.values()):
            return None
        if self._starting is not None:
            return Problem(code="starting", message="The Kiwi daemon is being started.")
        if self._start_error is not None:
            error = self._start_error
            return Problem(code="start-failed", message=error.message, remedy=error.remedy)
        for record in self.records.values():
            if record.error is not None:
                return problem_of(record.error)
        if not _may_look_into(self._directory):
            return Problem(
                code="no-access",
                message=f"You may not look for Kiwi daemons in {self._directory}.",
                remedy="The administrator of this machine can allow it: the directory must be "
                "readable.",
            )
        if (stopped := why_stopped(self._directory)) is not None:
            return problem_of(stopped)
        if self._autostarts and not config.gpu_possible():
            return Problem(
                code="no-gpu",
                message="This machine has no NVIDIA driver, so there is no GPU to share.",
                remedy="To try Kiwi without one: `kiwi daemon --emulate 1x512MiB`.",
            )
        return Problem(
            code="no-daemon",
            message=f"No Kiwi daemon runs here: there is no socket in {self._directory}.",
            remedy="Start one with `kiwi daemon`." if may_start_in(self._directory) else ASK_ADMIN,
        )

    def client(self, uuid: str) -> Client:
        """Return the connection to the daemon of GPU ``uuid``. Raises ``PeerError`` "no-such-gpu",
        "no-daemon".
        """
        for path, follower in self._followers.items():
            record = self.records.get(path)
            if path.stem == uuid or (record and record.status and record.status.uuid == uuid):
                if follower.client is not None:
                    return follower.client
                raise PeerError(
                    "no-daemon",
                    "The Kiwi daemon of this GPU does not answer at the moment.",
                    "Start it with `kiwi daemon`.",
                )
        if (problem := self.problem()) is not None:
            raise PeerError("no-daemon", problem.message, problem.remedy)
        raise PeerError(
            "no-such-gpu", f"There is no GPU {uuid!r} here.", "`kiwi status` lists them."
        )


def _may_look_into(directory: Path) -> bool:
    try:
        os.listdir(directory)
        os.stat(directory / ".")
    except PermissionError:
        return False
    except OSError:
        pass  # the file does not exist, for example
    return True


def _cannot_start(error: OSError) -> PeerError:
    return PeerError(
        "no-daemon",
        f"The Kiwi daemon could not be started: {error}.",
        "Try `kiwi doctor`, or `kiwi daemon` by hand.",
    )
