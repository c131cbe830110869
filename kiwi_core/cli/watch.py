"""``kiwi status --watch``: show every daemon's stream in one picture, across daemon restarts."""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import no_daemon, observer
from kiwi_core.cli.status import text_lines, to_json
from kiwi_core.cli.terminal import Keys, Screen, Style
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    from collections.abc import Callable
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
            self._follow_once()
            self._news.put(StatusNews(self._socket, None))
            if not self._socket.exists():
                return
            self._stop_asked.wait(RESCAN_S)

    def _follow_once(self) -> None:
        client = self._client = observer(self._socket)
        try:
            client.connect()
            for status in client.watch():
                self._news.put(StatusNews(self._socket, status))
                if self._stop_asked.is_set():
                    return
        except KiwiError:
            pass  # away for now: run() reports it and tries again
        finally:
            client.close()

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
    board = Board(directory, gpu)
    with contextlib.ExitStack() as stack:
        stack.callback(board.close)
        show: Callable[[list[GpuStatus]], None]
        keys = Keys()
        if as_json:
            show = partial(_print_json, choice)
        elif sys.stdout.isatty():
            stack.enter_context(keys)
            show = _drawn_on(stack.enter_context(Screen()), directory, choice)
        else:
            show = partial(_print_block, choice)
        _loop(board, show, keys)
    return exits.OK


def _loop(board: Board, show: Callable[[list[GpuStatus]], None], keys: Keys) -> None:
    next_scan = 0.0
    drawn_for = None
    while "q" not in keys.pressed().lower():
        if time.monotonic() >= next_scan:
            board.rescan()
            next_scan = time.monotonic() + RESCAN_S
        changed = board.update(RESCAN_S / 4)
        window = shutil.get_terminal_size()
        if changed or window != drawn_for:
            show(board.gpus())
            drawn_for = window


def _print_json(choice: Choice, gpus: list[GpuStatus]) -> None:
    print(to_json(gpus, choice), flush=True)


def _print_block(choice: Choice, gpus: list[GpuStatus]) -> None:
    lines = text_lines(gpus, Style.of(sys.stdout), choice) or ["no daemon answers"]
    print("\n".join([*lines, "---"]), flush=True)


def _drawn_on(screen: Screen, directory: Path, choice: Choice) -> Callable[[list[GpuStatus]], None]:
    style = Style.of(sys.stdout)

    def show(gpus: list[GpuStatus]) -> None:
        lines = text_lines(gpus, style, choice)
        if not lines:
            error = no_daemon(directory)
            lines = [error.message, error.remedy, "Waiting for one."]
        screen.draw(lines, style.dim("live; q or Ctrl-C leaves"))

    return show
