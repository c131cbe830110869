"""Check that a daemon always answers, and that programs take their turns meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import Daemon
    from session_program import SessionProgram

ANSWERS_WITHIN_S = 30.0
"""Time limit of an answer: a daemon that waits for the halted process never answers; one on a busy
machine answers late."""


@contextmanager
def answering(daemon: Daemon) -> Iterator[None]:
    """Check that ``kiwi status`` is answered during the whole block."""
    over, slowest_s, failed = threading.Event(), [0.0], []

    def ask() -> None:
        while not over.wait(0.05):
            began_s = time.monotonic()
            try:
                daemon.status()
            except Exception as error:  # noqa: BLE001  (the test fails with it, below)
                failed.append(error)
            slowest_s[0] = max(slowest_s[0], time.monotonic() - began_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed
    assert slowest_s[0] < ANSWERS_WITHIN_S


def works(one: SessionProgram) -> None:
    before = one.rounds()
    wait_until(lambda: one.rounds() > before + 2, f"{one.name} goes on")


def turn(one: SessionProgram) -> None:
    """Let the program ask for the GPU, get it and work; check its bytes."""
    one.start_burst()
    wait_until(one.granted, f"{one.name} has the GPU")
    works(one)
    one.stop_burst()
