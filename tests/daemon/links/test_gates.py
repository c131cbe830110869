"""Tests of whose session a preloaded library belongs to, and of its gate.

The library is the scripted one; the daemon and its socket are real.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cuda_processes import Worker
from daemon import wait_until
from linked_program import QUICK
from session_program import MIB, SessionProgram
from surfaces import watching

from kiwi_core.states import MovedBy, SessionState

if TYPE_CHECKING:
    from daemon import Daemon

Start = "Callable[..., Daemon]"
Linked = "Callable[..., LinkedProgram]"

SUPPORT = Path(__file__).parents[2] / "support"


def into(program: SessionProgram, daemon: Daemon) -> None:
    """Load the library in a program that is a session."""
    path = str(daemon.sockets()[0])
    program.worker.do("init()")
    program.worker.do(f"from linked_library import Library; library = Library({path!r})")


def gates(program: Any) -> list[bool]:
    worker = getattr(program, "worker", program)
    found: list[bool] = worker.get("library.gates")
    return found


def is_armed(program: SessionProgram) -> None:
    """Wait until the burst that made the program's context is over, and drop its gate records."""
    wait_until(lambda: gates(program)[-1:] == [False], "armed")
    program.worker.do("del library.gates[:-1]")


def test_a_program_that_only_has_the_library_is_a_session_with_exact_leases(
    start: Start, linked: Linked
) -> None:
    daemon = start("1x64MiB")
    program = linked(daemon)
    session = daemon.session(program.pid)
    assert session is not None
    assert (session.name, session.connected) == ("linked", True)
    wait_until(lambda: gates(program) == [False], "armed: it holds no lease")
    with watching(daemon) as watch:
        wait_until(lambda: watch.words, "it is watched")
        program.do(f"library.take({8 * MIB}, 1)")  # it asks by itself
        wait_until(lambda: gates(program)[1:] == [True, False], "open, and armed again")
        daemon.wait_state(program.pid, "idle")  # nothing of it was seen on the GPU for a while
    seen = [one for status in itertools.chain(*watch.received) for one in status.sessions]
    running = [one for one in seen if one.state is SessionState.RUNNING]
    assert running
    assert all(one.lingering for one in running), "nobody says when such a burst ends"
    look = daemon.wait_for(
        lambda s: s.sessions[0] if s.sessions[0].pager is MovedBy.INPROCESS else None, "inprocess"
    )
    assert look.resident_bytes >= 8 * MIB


def test_the_library_of_a_session_is_its(daemon: Daemon, program: Any) -> None:
    notebook = program(daemon)
    into(notebook, daemon)
    assert len(daemon.status().sessions) == 1
    is_armed(notebook)
    notebook.worker.do("begin()")
    wait_until(lambda: gates(notebook) == [False, True], "open in a burst")
    notebook.worker.do("client.end_burst()")
    wait_until(lambda: gates(notebook) == [False, True, False], "armed after it")


def test_a_child_is_its_parents(daemon: Daemon, linked: Linked) -> None:
    parent = linked(daemon)
    path = str(daemon.sockets()[0])
    code = f"init(); from linked_library import Library; library = Library({path!r})"
    parent.do(f"from cuda_processes import Worker; child = Worker({{}}); child.do({code!r})")
    assert [s.pid for s in daemon.status().sessions] == [parent.pid]
    parent.do("child.close()")


def test_a_session_that_comes_later_takes_over_the_links_below_it(
    daemon: Daemon, program: Any
) -> None:
    worker = SessionProgram.__new__(SessionProgram)  # not a session yet
    environment = daemon.cuda_env
    worker.worker = Worker(environment)
    path = str(daemon.sockets()[0])
    try:
        code = f"init(); from linked_library import Library; library = Library({path!r})"
        worker.worker.do("from cuda_processes import Worker")
        worker.worker.do(f"child = Worker({{}}); child.do({code!r})")
        child = worker.worker.get("child.pid")
        assert [s.pid for s in daemon.status().sessions] == [child]
        worker.worker.do(
            "from pathlib import Path; from kiwi_core.client import Client;"
            f" client = Client(Path({path!r}), name='parent'); client.connect()"
        )
        daemon.wait_for(
            lambda s: [x.pid for x in s.sessions] == [worker.pid], "one session: the parent's"
        )
        worker.worker.do("client.acquire()")
        wait_until(
            lambda: worker.worker.get("child.get('library.gates')")[-1:] == [True],
            "the child's gate",
        )
        worker.worker.do("child.close()")
    finally:
        worker.close()


def test_bursts_of_the_client_and_of_the_gate_do_not_collide(start: Start, program: Any) -> None:
    daemon = start("1x64MiB", "--idle-after", "600")  # no burst ends because nothing is seen of it
    notebook = program(daemon)
    into(notebook, daemon)
    for _ in range(3):
        notebook.worker.do("begin(); client.end_burst()")
        wait_until(lambda: gates(notebook)[-1:] == [False], "armed")
        notebook.worker.do("with library: pass")
        daemon.wait_state(notebook.pid, "running")
    notebook.worker.do("begin()")
    daemon.wait_state(notebook.pid, "running")
    notebook.worker.do("with library: pass")
    assert daemon.status().sessions[0].lingering is False, "it is the client's burst"
    notebook.worker.do("client.end_burst()")
    daemon.wait_state(notebook.pid, "idle")


def test_an_interrupted_call_takes_its_request_back(start: Start, linked: Linked) -> None:
    daemon = start("1x64MiB", "--tq", "600")
    a, b = linked(daemon, 40), linked(daemon, 40)
    a.do("library.__enter__()")
    daemon.wait_state(b.pid, "paged-out")
    b.do("library.say({'type': 'want-lease'})")
    daemon.wait_state(b.pid, "waiting")
    b.do("library.say({'type': 'want-lease', 'waits': False})")
    daemon.wait_state(b.pid, "paged-out")
    a.do("library.__exit__()")
    b.do("with library: pass")  # it asks anew


def test_an_interrupted_call_gives_up_the_next_turn_of_a_suspended_burst(
    start: Start, linked: Linked
) -> None:
    """The burst is the daemon's own: no client says that it is over."""
    daemon = start("1x64MiB", "--idle-after", "600", "--tq", "0.2")
    a, b = linked(daemon, 40), linked(daemon, 40)
    daemon.wait_state(a.pid, "suspended")  # nothing is seen of either, so both bursts go on
    daemon.set_tq(600)
    daemon.wait_for(lambda s: len(s.holders) == 1, "one has the GPU")
    out = a if daemon.session(a.pid).state is SessionState.SUSPENDED else b
    out.do("library.say({'type': 'want-lease'})")
    out.do("library.say({'type': 'want-lease', 'waits': False})")
    daemon.wait_state(out.pid, "paged-out")
    assert not daemon.status().queue


def test_a_program_that_leaves_kiwi_runs_on(daemon: Daemon, program: Any) -> None:
    notebook = program(daemon)
    into(notebook, daemon)
    is_armed(notebook)
    notebook.worker.do("client.goodbye(60.0)")
    daemon.wait_for(lambda s: not s.sessions, "it has left")
    notebook.worker.do("with library: pass")
    assert gates(notebook)[-1] is True


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_program_whose_gate_a_failed_move_left_shut_leaves_kiwi_and_runs_on(
    start: Start, program: Any, refusals: int
) -> None:
    daemon = start(*QUICK)
    notebook = program(daemon)
    into(notebook, daemon)
    notebook.worker.do(f"begin(); library.take({4 * MIB}, 1); client.end_burst()")
    daemon.wait_state(notebook.pid, "idle")
    refuse = ["refuse driver"] * refusals
    notebook.worker.do(f"library.faults.update({{'page-out': {refuse[:1]}, 'free': {refuse}}})")
    notebook.worker.do("client.release()")
    problem = "page-out-refused"
    daemon.wait_for(lambda s: s.sessions[0].problem == problem, "its page-out was refused")
    assert notebook.worker.get("library._held"), "nobody could open its gate"
    notebook.worker.do("client.goodbye(60.0)")
    daemon.wait_for(lambda s: not s.sessions, "it has left")
    notebook.worker.do("with library: pass")
    assert gates(notebook)[-1] is True


def test_a_program_that_left_kiwi_stays_out_of_it_when_the_daemon_is_killed(
    start: Start, program: Any
) -> None:
    daemon = start(*QUICK)
    notebook = program(daemon)
    into(notebook, daemon)
    notebook.worker.do("client.goodbye(60.0); client.close()")
    (roster,) = daemon.directory.rglob("*.roster")
    wait_until(lambda: json.loads(roster.read_bytes())["off"], "that it has left is on disk")
    for _ in range(2):  # what a daemon knows from there alone it must tell the next one
        greeted = notebook.worker.get("len(library.welcomes)")
        old = daemon.kill_child()
        daemon.wait_for(lambda s, old=old: s.daemon_pid != old, "a new daemon")
        wait_until(lambda n=greeted: notebook.worker.get("len(library.welcomes)") > n, "it is back")
        assert notebook.worker.get("library.welcomes")[-1].get("session", "") == ""
        assert daemon.status().sessions == []
        notebook.worker.do("with library: pass")
        assert gates(notebook)[-1] is True
    path = str(daemon.sockets()[0])
    notebook.worker.do(f"client = Client(Path({path!r}), name='again'); client.connect()")
    wait_until(lambda: gates(notebook)[-1:] == [False], "whoever comes back is scheduled again")
