"""Fixtures: real daemons on emulated GPUs, and small programs as their sessions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from daemon import Daemon, running_daemon
from preloaded_program import PreloadedProgram
from session_program import SessionProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    """Start daemons like ``running_daemon``. At the end stop them all, check that none has crashed,
    and that a replay of their journals makes the same decisions."""
    with ExitStack() as stack:
        made: list[Daemon] = []

        def make(sizes: str = "1x256MiB", *args: str, env: dict[str, str] | None = None) -> Daemon:
            daemon = stack.enter_context(running_daemon(sizes, *args, env=env))
            made.append(daemon)
            return daemon

        yield make
        for daemon in made:
            daemon.stop()
            unharmed(daemon)


@pytest.fixture
def program() -> Iterator[Callable[..., SessionProgram]]:
    """Start session programs, and end them after the test."""
    made: list[SessionProgram] = []

    def make(
        daemon: Daemon,
        size_mib: int = 0,
        *,
        seed: int = 0,
        name: str = "",
        guarded: bool = True,
        environment: dict[str, str] | None = None,
    ) -> SessionProgram:
        seed = seed or len(made) + 1
        one = SessionProgram(
            daemon, size_mib, seed=seed, name=name, guarded=guarded, environment=environment
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture
def preloaded() -> Iterator[Callable[..., PreloadedProgram]]:
    """Start plain CUDA programs under the library, and end them after the test."""
    with ExitStack() as stack:

        def make(daemon: Daemon, **env: str) -> PreloadedProgram:
            one = PreloadedProgram(daemon, **env)
            stack.callback(one.close)
            return one

        yield make
