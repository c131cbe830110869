"""Tests of the policy and priorities of a real daemon: choice, live change, and after a crash.

At the end of each test the journals are replayed: the scheduler must decide the same again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kiwi_core.daemon.base.peers import user_name
from kiwi_core.states import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram


def test_policy_and_priorities_live_and_over_a_crash(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    me = user_name(os.getuid())
    daemon = start("1x256MiB", "--tq", "0.3", "--policy", "interactive", "--priority", f"{me}=low")
    a, b = program(daemon, 150), program(daemon, 150)
    for one in (a, b):
        one.start_burst()
    daemon.wait_for(lambda s: sum(x.suspensions for x in s.sessions) >= 2, "turns")
    assert daemon.status().scheduler.policy == "interactive"
    assert {one.priority for one in daemon.status().sessions} == {Priority.LOW}
    session = daemon.session(a.pid)
    assert session is not None
    client = daemon.client()
    client.set(policy="round-robin")
    client.set(session=session.id, priority=Priority.HIGH)
    status = daemon.status()
    assert status.scheduler.policy == "round-robin"
    assert {one.priority for one in status.sessions} == {Priority.LOW, Priority.HIGH}
    client.set(policy="interactive", tq_s=0.2)
    client.close()
    before = sum(x.suspensions for x in daemon.status().sessions)
    daemon.wait_for(lambda s: sum(x.suspensions for x in s.sessions) > before + 2, "more turns")
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old and len(s.sessions) == 2, "another daemon")
    status = daemon.status()
    assert status.scheduler.policy == "interactive"
    again = daemon.session(a.pid)
    assert again is not None
    assert again.priority is Priority.HIGH
    other = daemon.session(b.pid)
    assert other is not None
    assert other.priority is Priority.LOW
    for one in (a, b):
        one.stop_burst()
        assert one.intact()
