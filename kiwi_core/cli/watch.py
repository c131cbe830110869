"""``kiwi status --watch``: show every daemon's stream in one picture, across daemon restarts."""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import no_daemon, observer
from kiwi_core.cli.status import text_lines, to_json
from kiwi_core.cli.terminal import Keys, Screen, Style
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.cli.choosing import Choice
    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus

RESCAN_S: Final = 1.0
"""Time between two searches for new sockets, and between two attempts at a lost daemon."""


@dataclass(frozen=True)
class StatusNews:
    """One daemon's status from its follower; ``None``: the daemon is away."""

    socket: Path
    status: GpuStatus | None


class StatusFollower(threading.Thread):
    """Follows one socket until it is stopped, or until the daemon ends and removes its socket."""

    def __init__(
        self, socket: Path, news: queue.SimpleQueue[StatusNews], stop: threading.Event
    ) -> None:
        super().__init__(name=f"follow {socket.name}", daemon=True)
        self._socket = socket
        self._news = news
        self._stop_asked = stop
        self._client: Client | None = None

    def run(self) -> None:
        while not self._stop_asked.is_set():
            self._client = observer(self._socket)
            with contextlib.suppress(KiwiError), self._client as client:
                client.connect()
                for status in client.watch():
                    self._news.put(StatusNews(self._socket, status))
                    if self._stop_asked.is_set():
                        break
            self._news.put(StatusNews(self._socket, None))  # away for now
            if not self._socket.exists():
                return
            self._stop_asked.wait(RESCAN_S)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Board:
    """The latest status of every daemon. It starts a follower for each new socket."""

    def __init__(self, directory: Path, gpu: str | None) -> None:
        self._directory = directory
        self._gpu = gpu
        self._news: queue.SimpleQueue[StatusNews] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._followers: dict[Path, StatusFollower] = {}
        self._known: dict[Path, GpuStatus] = {}

    def rescan(self) -> None:
        from kiwi_core.client import discover

        with contextlib.suppress(KiwiError):  # no daemon answers just now
            for socket in discover(self._directory, self._gpu):
                follower = self._followers.get(socket)
                if follower is None or not follower.is_alive():
                    follower = StatusFollower(socket, self._news, self._stop)
                    self._followers[socket] = follower
                    follower.start()

    def update(self, timeout_s: float) -> bool:
        """Take all news, and wait at most ``timeout_s`` for the first; true on a change."""
        changed = False
        with contextlib.suppress(queue.Empty):
            changed |= self._take(self._news.get(timeout=timeout_s))
            while True:
                changed |= self._take(self._news.get_nowait())
        return changed

    def gpus(self) -> list[GpuStatus]:
        return sorted(self._known.values(), key=lambda gpu: (gpu.index, gpu.uuid))

    def close(self) -> None:
        self._stop.set()
        for follower in self._followers.values():
            follower.close()
        for follower in self._followers.values():
            follower.join(1.0)

    def _take(self, news: StatusNews) -> bool:
        if news.status is not None:
            self._known[news.socket] = news.status
            return True
        return self._known.pop(news.socket, None) is not None


def run(directory: Path, gpu: str | None, choice: Choice, *, as_json: bool) -> int:
    """Show the status until ``q`` is pressed at a terminal; without one, Ctrl-C or the end of the
    pipe's reader ends it."""
    board, keys, style = Board(directory, gpu), Keys(), Style.of(sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(board.close)
        screen: Screen | None = None
        if sys.stdout.isatty() and not as_json:
            stack.enter_context(keys)
            screen = stack.enter_context(Screen())
        next_scan, drawn_for = 0.0, None
        while "q" not in keys.pressed().lower():
            if time.monotonic() >= next_scan:
                board.rescan()
                next_scan = time.monotonic() + RESCAN_S
            changed = board.update(RESCAN_S / 4)
            window = shutil.get_terminal_size()
            if not changed and window == drawn_for:
                continue
            drawn_for = window
            if as_json:
                print(to_json(board.gpus(), choice), flush=True)
                continue
            lines = text_lines(board.gpus(), style, choice)
            if screen is None:
                print("\n".join([*(lines or ["no daemon answers"]), "---"]), flush=True)
                continue
            if not lines:
                error = no_daemon(directory)
                lines = [error.message, error.remedy, "Waiting for one."]
            screen.draw(lines, style.dim("live; q or Ctrl-C leaves"))
    return exits.OK
