"""Tests of memory that preloaded libraries move, also over crashes of the daemon.

The library is the scripted one; the daemon and its socket are real.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import wait_until
from linked_program import QUICK
from pagers import RUNNING
from session_program import MIB
from talker import Talker

from kiwi_core.states import MovedBy, SessionState

if TYPE_CHECKING:
    from daemon import Daemon

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

Start = "Callable[..., Daemon]"
Linked = "Callable[..., LinkedProgram]"

SUPPORT = Path(__file__).parents[2] / "support"


def test_a_daemon_that_was_killed_finds_what_is_out(start: Start, linked: Linked) -> None:
    daemon = start(*QUICK)
    one = linked(daemon, 40)
    content = one.digest()
    daemon.wait_state(one.pid, "idle")
    _release(daemon, daemon.status().sessions[0].id)
    daemon.wait_state(one.pid, "paged-out")
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    found = daemon.wait_for(
        lambda s: next((x for x in s.sessions if x.paged_out_bytes >= 40 * MIB), None), "it is out"
    )
    assert one.digest() == content  # this requests the lease, and so its memory
    again = daemon.session(one.pid)
    assert again is not None
    assert again.id == found.id


@pytest.mark.parametrize("moving", [False, True], ids=["idle", "on-its-way-out"])
def test_the_driver_leaves_alone_whose_library_is_about_to_reconnect(
    start: Start, linked: Linked, *, moving: bool
) -> None:
    """If the driver held it in the middle of its library's work, it could never ask for the GPU."""
    daemon = start(*QUICK)
    one = linked(daemon, 40)
    content = one.digest()
    session = daemon.wait_state(one.pid, "idle").id
    if moving:
        one.script("page-out", "hang")
        _release(daemon, session)
        wait_until(lambda: "page-out" in one.get("library.orders"), "its library is at it")
    else:
        one.do("library.reconnects = False")
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    if moving:
        daemon.wait_state(one.pid, "paged-out")  # as far as anybody knows
    else:
        _release(daemon, session)
        daemon.wait_state(one.pid, "paging-out", "paged-out")
        one.do("library.reconnects = True")
    one.do("library.released.set()")
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()

        def is_out_and_back(status: GpuStatus) -> SessionStatus | None:
            found = [x for x in status.sessions if x.connected and x.paged_out_bytes]
            if not found and not moving:  # its library was waited for in vain
                observer.ask("release", session=session)
            return found[0] if found else None

        found = daemon.wait_for(is_out_and_back, "it is out, and back")
    assert found.state is SessionState.PAGED_OUT
    assert found.pager is MovedBy.INPROCESS
    assert "page-out" in one.get("library.orders")
    assert {process.state for process in daemon.books().processes} == {RUNNING}
    assert one.digest() == content


def _release(daemon: Daemon, session: str) -> None:
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()
        wait_until(  # its burst must be over for the new daemon, too
            lambda: observer.ask("release", session=session)["type"] == "ok", "it may be released"
        )


def test_a_daemon_that_leaves_brings_everybody_back(start: Start, linked: Linked) -> None:
    daemon = start(*QUICK)
    one = linked(daemon, 8)
    content = one.digest()
    daemon.wait_state(one.pid, "idle")
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()
        observer.ask("release", session=daemon.status().sessions[0].id)
    daemon.wait_state(one.pid, "paged-out")
    assert daemon.terminate() == 0
    assert one.digest() == content  # without a daemon


OUT_AND_EXEC = """
import os, sys
from pathlib import Path
from talker import Talker
with Talker(Path({path!r})) as talker:
    talker.hello(role="pager")
    talker.say("pager-state", state="out", paged_out_bytes={size})
    sys.stdin.readline()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"])
"""


@pytest.mark.parametrize("crash", [False, True], ids=["", "and-the-daemon-is-killed"])
def test_a_program_that_execs_while_it_is_out_misses_nothing(
    start: Start, program: Any, *, crash: bool
) -> None:
    """Its memory ended with its program, so the client gets no message about it."""
    daemon = start(*QUICK)
    notebook = program(daemon)
    code = OUT_AND_EXEC.format(path=str(daemon.sockets()[0]), size=8 * MIB)
    notebook.worker.do(
        "import subprocess, sys\n"
        f"environment = {{**os.environ, 'PYTHONPATH': {str(SUPPORT)!r}}}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], env=environment,"
        " stdin=subprocess.PIPE)"
    )
    try:
        child = notebook.worker.get("child.pid")
        (roster,) = daemon.directory.rglob("*.roster")
        wait_until(
            lambda: any(link["out"] for link in json.loads(roster.read_bytes())["links"]),
            "it is out, and on disk",
        )
        notebook.worker.do("child.stdin.close()")
        words = Path(f"/proc/{child}/cmdline")
        wait_until(lambda: b"talker" not in words.read_bytes(), "it is another program")
        if crash:
            old = daemon.kill_child()
            daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
        wait_until(lambda: not daemon.session(notebook.pid).paged_out_bytes, "nothing is out")
        notebook.worker.do("begin()")
        assert "lost" not in dict(notebook.notices())
    finally:
        notebook.worker.do("child.kill(); child.wait()")
