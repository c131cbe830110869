"""Tests that the others continue and nothing is lost when a session's process is killed in each
state.

The GPU has 256 MiB and each program 150 MiB, so no two fit together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
from checks import unharmed
from daemon import running_daemon, wait_until
from session_program import SessionProgram

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import Daemon

MIB = 1 << 20
SLOW = 75 * MIB
"""In bytes per second: moving a whole program takes two seconds."""

STATES = ("waiting", "running", "suspended", "paging-out", "paged-out", "paging-in")

QUANTUM_S = 600
"""Far longer than any test waits: nobody is granted the GPU because a quantum has ended."""


def reach(state: str, daemon: Daemon, victim: SessionProgram, other: SessionProgram) -> None:
    """Bring ``victim`` into ``state``, and ``other`` into a burst or the queue. Before this, both
    have their memory and no burst."""
    slow = {"paging-out", "paging-in"}
    if state == "waiting":
        other.start_burst()
        daemon.wait_state(other.pid, "running")
        victim.start_burst()
    elif state == "running":
        victim.start_burst()
        daemon.wait_state(victim.pid, "running")
        wait_until(lambda: victim.rounds() > 0, "rounds")
        other.start_burst()
    elif state in ("suspended", "paging-out"):
        daemon.set_tq(0.3)
        victim.start_burst()
        daemon.wait_state(victim.pid, "running")
        wait_until(lambda: victim.rounds() > 0, "rounds")
        if state in slow:
            emulator.set_copy_bandwidth(daemon.state_path, SLOW)
        other.start_burst()
    elif state == "paged-out":
        other.start_burst()
    else:
        other.start_burst()
        daemon.wait_state(victim.pid, "paged-out")
        wait_until(other.granted, "grant")
        other.stop_burst()
        victim.start_burst()
        daemon.wait_state(other.pid, "paging-out", "paged-out")
        emulator.set_copy_bandwidth(daemon.state_path, SLOW)
    daemon.wait_state(victim.pid, state)
    daemon.set_tq(QUANTUM_S)


def books_balance(daemon: Daemon, *programs: SessionProgram) -> None:
    """Wait until the emulated driver and the daemon both count exactly ``programs``, with the same
    bytes. The daemon reads them at intervals."""

    def balanced() -> bool:
        books, status = daemon.books().gpus[0], daemon.status()
        holders = {process.pid for process in books.processes}
        used = status.memory.total_bytes - status.memory.free_bytes
        moving = {s.state.value for s in status.sessions} & {"paging-in", "paging-out"}
        return (
            not moving
            and {s.pid for s in status.sessions} == {p.pid for p in programs}
            and holders <= {p.pid for p in programs} | {status.daemon_pid}
            and used == books.used_bytes
            and status.memory.paged_out_bytes == sum(s.paged_out_bytes for s in status.sessions)
        )

    try:
        wait_until(balanced, "balanced books")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{daemon.books()}\n{daemon.status()}") from None


class Arena:
    """One daemon and two programs that do not fit together, shared by many tests."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.made = 0
        self.victim, self.other = self.program(), self.program()

    def program(self) -> SessionProgram:
        self.made += 1
        return SessionProgram(self.daemon, 150, seed=self.made)

    def reset(self) -> None:
        """End all bursts, and set fast copies and a long quantum."""
        emulator.set_copy_bandwidth(self.daemon.state_path, 0)
        self.daemon.set_tq(QUANTUM_S)
        if not self.alive(self.victim):
            self.victim.close()
            self.victim = self.program()

    @staticmethod
    def alive(one: SessionProgram) -> bool:
        return psutil.pid_exists(one.pid) and not one.worker.ended(0)

    def close(self) -> None:
        self.victim.close()
        self.other.close()


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with running_daemon("1x256MiB", "--tq", str(QUANTUM_S)) as daemon:
        arena = Arena(daemon)
        yield arena
        arena.close()
        daemon.stop()
        unharmed(daemon)


@pytest.mark.parametrize("state", STATES)
def test_a_killed_session_leaves_nothing_behind(state: str, arena: Arena) -> None:
    arena.reset()
    daemon, victim, other = arena.daemon, arena.victim, arena.other
    reach(state, daemon, victim, other)
    victim.kill()
    emulator.set_copy_bandwidth(daemon.state_path, 0)
    if state == "paging-in":
        other.start_burst()
    wait_until(other.granted, "grant")
    before = other.rounds()
    wait_until(lambda: other.rounds() > before, "rounds")
    assert other.stop_burst() > 0
    assert other.intact()
    books_balance(daemon, other)
