"""Tests of programs with numba-cuda that are interrupted while a call of theirs waits."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from pagers import DEFAULT, PagerUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_program import ClientProgram
    from daemon import Daemon

    from kiwi_core.wire.messages import GpuStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def pager() -> PagerUnderTest:
    """Not the driver's checkpoint: there a command has its turn until it ends."""
    return DEFAULT


WAYS = ("copy_out", "copy_in", "allocate", "fill")


def test_numba_lives_on_after_an_interrupt(
    make_daemon: Callable[..., Daemon], start: Callable[..., ClientProgram]
) -> None:
    daemon = make_daemon("1x80MiB", "--tq", "600")
    idle = start(daemon, "idle", "numba_interrupted.py", 48)
    idle.introduction()
    assert idle.get("copy_out") == {"good": True}
    busy = start(daemon, "busy", "numba_program.py", 24, 1)
    busy.introduction()
    for way in WAYS:
        daemon.wait_for(lambda s: _state(s, "idle") != "waiting", "nothing waits")
        idle.ask(way)
        daemon.wait_for(lambda s: _state(s, "idle") == "waiting", f"{way} waits")
        os.kill(idle.pid, signal.SIGINT)
        assert idle.answer() == {"interrupted": way}
        assert _state(daemon.status(), "busy") == "running"
    assert busy.end() == 0
    for way in (*WAYS, "copy_out"):
        assert idle.get(way) == {"good": True}
    assert idle.end() == 0


def _state(status: GpuStatus, name: str) -> str:
    return next(s.state.value for s in status.sessions if s.name == name)
