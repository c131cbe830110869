"""Check that a daemon always answers, and that programs take their turns meanwhile."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import Daemon
    from session_program import SessionProgram


@contextmanager
def answering(daemon: Daemon) -> Iterator[None]:
    """Check that the daemon answers with its status during the whole block. A daemon that waited
    for the halted process would not answer at all."""
    over, failed = threading.Event(), list[Exception]()

    def ask() -> None:
        while not over.wait(0.05):
            try:
                daemon.status()
            except Exception as error:  # noqa: BLE001  (the test fails with it, below)
                failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def works(one: SessionProgram) -> None:
    before = one.rounds()
    wait_until(lambda: one.rounds() > before + 2, f"{one.name} goes on")


def turn(one: SessionProgram) -> None:
    """Let the program ask for the GPU, get it and work; check its bytes."""
    one.start_burst()
    wait_until(one.granted, f"{one.name} has the GPU")
    works(one)
    one.stop_burst()
