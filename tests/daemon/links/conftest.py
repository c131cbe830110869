"""Fixtures: one daemon for all tests that leave it as they found it, and linked programs.

``daemon`` comes first in a test's arguments, so that programs end before the daemon is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checks import COMPLAINTS, unharmed
from daemon import running_daemon
from linked_program import QUICK, LinkedProgram
from session_program import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

Start = "Callable[..., Daemon]"
Linked = "Callable[..., LinkedProgram]"


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with running_daemon(*QUICK) as daemon:
        yield daemon
        daemon.stop()
        unharmed(daemon)


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    before = len(shared.log())
    yield shared
    shared.wait_for(lambda s: not s.sessions, "all have left")
    assert not [word for word in COMPLAINTS if word in shared.log()[before:]]


@pytest.fixture
def linked() -> Iterator[Callable[..., LinkedProgram]]:
    """Start linked programs, and end them after the test."""
    made: list[LinkedProgram] = []

    def make(daemon: Daemon, size_mib: int = 0, **more: Any) -> LinkedProgram:
        environment = daemon.cuda_env
        more.setdefault("seed", len(made) + 1)
        one = LinkedProgram(environment, daemon.sockets()[0], size_mib * MIB, **more)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
