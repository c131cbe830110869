"""Tests of one process and its connections: lost ones, second ones, forks, goodbyes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


def test_goodbye_while_paged_out_brings_the_memory_back(start: Start, program: Program) -> None:
    daemon = start("1x256MiB", "--tq", "30")
    leaver, other = program(daemon, 150), program(daemon, 150)
    daemon.wait_state(leaver.pid, "paged-out")
    leaver.worker.do("client.goodbye(60)")
    assert leaver.worker.get("digest(p, size) == contents"), "in the GPU, without a lease"
    daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [other.pid], "it has left")
    books = daemon.books().process(leaver.pid)
    assert books is not None
    assert books.device_bytes[0] == 150 << 20
    # The rest of its memory counts as memory outside Kiwi, and the process may become a session
    # again.
    leaver.worker.do("client.connect()")
    assert leaver.intact()
    assert other.intact()


def test_a_living_process_without_a_connection_gets_time_and_then_leaves(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, 60, guarded=False)  # a gate has its own connection
    one.worker.do("client.close()")
    daemon.wait_for(lambda s: [x.connected for x in s.sessions] == [False], "disconnected")
    one.worker.do("client.connect()")
    daemon.wait_for(lambda s: [x.connected for x in s.sessions] == [True], "it came back")
    assert one.intact()
    began_s = time.monotonic()
    one.worker.do("client.close()")
    daemon.wait_for(lambda s: not s.sessions, "it has left")
    assert time.monotonic() - began_s > 5, "not at once"
    assert one.worker.get("digest(p, size) == contents")


def test_the_newer_of_two_connections_of_a_process_counts(start: Start, program: Program) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, 60)
    one.worker.do(
        "from pathlib import Path\n"
        "first = client\n"
        "client = Client(first.socket_path, name='again')\n"
        "client.connect()\n"
    )
    daemon.wait_for(lambda s: [x.name for x in s.sessions] == ["again"], "one session, renamed")
    wait_until(lambda: not one.worker.get("first.connected"), "the older one ended")
    assert one.intact()
    assert one.worker.get("first.connected") is False, "they do not fight"


def test_a_forked_child_is_a_session_of_its_own(start: Start, program: Program) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, 60)
    one.worker.do(
        "ready, tell = os.pipe()\n"
        "go, on = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    client.connect()\n"
        "    client.acquire(timeout_s=60)\n"
        "    os.write(tell, b'x')\n"
        "    os.read(go, 1)\n"
        "    os._exit(0)\n"
    )
    assert one.worker.get("os.read(ready, 1).decode()") == "x"
    child = int(one.worker.get("child"))
    daemon.wait_for(lambda s: {x.pid for x in s.sessions} == {one.pid, child}, "two sessions")
    one.worker.do("os.write(on, b'x'); os.waitpid(child, 0)")
    daemon.wait_for(lambda s: {x.pid for x in s.sessions} == {one.pid}, "the child's end")
    assert one.intact()
