"""Test of a pause of the whole machine: a virtual machine, or a control group with the daemon.

All processes are stopped by signals, which the daemon cannot see afterwards.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
from daemon import wait_until

from kiwi_core.clock import BEAT_S, PAUSE_NS
from kiwi_core.units import ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

PAUSE_S = 2 * ns_to_seconds(PAUSE_NS)
QUANTUM_S = 60.0


def test_no_time_counts_while_the_daemon_does_not_run(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    daemon = start("1x256MiB", "--tq", str(QUANTUM_S), "--policy", "round-robin")
    began_s = time.monotonic()
    a, b = program(daemon, 150, name="a"), program(daemon, 150, name="b")
    a.start_burst()
    daemon.wait_state(a.pid, "running")
    b.start_burst()
    daemon.wait_state(b.pid, "waiting")
    paused_s = pause(daemon, a, b)
    status = daemon.status()
    with daemon.client() as client:
        entries = client.history().entries
    # Up to one beat of the pause may count.
    ran_s = time.monotonic() - began_s - paused_s + BEAT_S
    assert ran_s < QUANTUM_S, "the machine is too slow for this test"
    holder, waiter = (next(one for one in status.sessions if one.pid == p.pid) for p in (a, b))
    assert holder.held_s + holder.waited_s <= ran_s
    assert waiter.held_s + waiter.waited_s <= ran_s
    assert holder.time_left_s is not None
    assert holder.time_left_s >= QUANTUM_S - ran_s
    assert all(entry.began_ago_s <= ran_s for entry in entries)
    daemon.set_tq(0.3)
    daemon.wait_state(b.pid, "running")
    daemon.wait_state(a.pid, "running")
    for one in (a, b):
        one.stop_burst()
        assert one.intact()


def pause(daemon: Daemon, *programs: SessionProgram) -> float:
    """Stop everything for ``PAUSE_S`` and return for how long the daemon has certainly been
    stopped. It is the first to stop and the last to go on, so it sees no program stopped."""
    assert daemon.process is not None
    supervisor = psutil.Process(daemon.process.pid)
    daemons = [supervisor, *supervisor.children(recursive=True)]
    everybody = [*daemons, *(psutil.Process(one.pid) for one in programs)]
    for one in everybody:
        one.suspend()
    for one in everybody:
        wait_until(lambda one=one: one.status() == psutil.STATUS_STOPPED, "it is stopped")
    began_s = time.monotonic()
    time.sleep(PAUSE_S)
    paused_s = time.monotonic() - began_s
    for one in reversed(everybody):
        one.resume()
    return paused_s
