"""Preloaded libraries and the daemon: whose they are, gates, leases, room, and moving memory. The
library is the scripted one; the daemon and its socket are real.

One daemon serves all tests that leave it as they found it, without a session. (``daemon`` comes
first in a test's arguments, so that its programs end before that is looked at.)
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checks import COMPLAINTS, unharmed
from cuda_processes import Worker, WorkerError
from daemon import running_daemon, wait_until
from linked_program import LinkedProgram
from pagers import RUNNING
from session_program import MIB, SessionProgram
from talker import Talker

from kiwi_core import emulator
from kiwi_core.states import MovedBy, SessionState
from kiwi_core.wire.pager import KINDS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

Start = "Callable[..., Daemon]"
Linked = "Callable[..., LinkedProgram]"

SUPPORT = Path(__file__).parents[1] / "support"


QUICK = ("1x64MiB", "--idle-after", "0.3")
"""Many a test begins when a program that has taken memory is idle."""


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
    """Makes linked programs; all are ended."""
    made: list[LinkedProgram] = []

    def make(daemon: Daemon, size_mib: int = 0, **more: Any) -> LinkedProgram:
        environment = daemon.env | emulator.environment(daemon.state_path, emulator.build())
        more.setdefault("seed", len(made) + 1)
        one = LinkedProgram(environment, daemon.sockets()[0], size_mib * MIB, **more)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def into(program: SessionProgram, daemon: Daemon) -> None:
    """Has the library loaded in a program that is a session."""
    path = str(daemon.sockets()[0])
    program.worker.do("init()")
    program.worker.do(f"from linked_library import Library; library = Library({path!r})")


def gates(program: Any) -> list[bool]:
    worker = getattr(program, "worker", program)
    found: list[bool] = worker.get("library.gates")
    return found


def is_armed(program: SessionProgram) -> None:
    """Making its context was a burst of its own. That is over; what comes counts from here."""
    wait_until(lambda: gates(program)[-1:] == [False], "armed")
    program.worker.do("del library.gates[:-1]")


# --- whose it is, and its gate -------------------------------------------------------------------


def test_a_program_that_only_has_the_library_is_a_session_with_exact_leases(
    start: Start, linked: Linked
) -> None:
    daemon = start("1x64MiB")
    program = linked(daemon)
    session = daemon.session(program.pid)
    assert session is not None
    assert (session.name, session.connected) == ("linked", True)
    wait_until(lambda: gates(program) == [False], "armed: it holds no lease")
    program.do(f"library.take({8 * MIB}, 1)")  # asks by itself
    daemon.wait_state(program.pid, "running")
    assert gates(program) == [False, True]
    found = daemon.session(program.pid)
    assert found is not None
    assert found.lingering, "nobody says when such a burst ends"
    daemon.wait_state(program.pid, "idle")  # nothing of it was seen on the GPU for a while
    wait_until(lambda: gates(program) == [False, True, False], "armed again")
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
    environment = daemon.env | emulator.environment(daemon.state_path, emulator.build())
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
        wait_until(lambda: worker.worker.get("child.get('library.gates')")[-1], "the child's gate")
        worker.worker.do("child.close()")
    finally:
        worker.close()


def test_bursts_of_the_client_and_of_the_gate_do_not_collide(start: Start, program: Any) -> None:
    daemon = start("1x64MiB")
    notebook = program(daemon)
    into(notebook, daemon)
    for _ in range(3):
        notebook.worker.do("begin(); client.end_burst()")
        wait_until(lambda: not gates(notebook)[-1], "armed")
        notebook.worker.do("with library: pass")
        daemon.wait_state(notebook.pid, "running")
    notebook.worker.do("begin()")
    daemon.wait_state(notebook.pid, "running")
    notebook.worker.do("with library: pass")
    assert daemon.status().sessions[0].lingering is False, "it is the client's burst"
    notebook.worker.do("client.end_burst()")
    daemon.wait_state(notebook.pid, "idle")


def test_a_program_that_leaves_kiwi_runs_on(daemon: Daemon, program: Any) -> None:
    notebook = program(daemon)
    into(notebook, daemon)
    is_armed(notebook)
    notebook.worker.do("client.goodbye(60.0)")
    daemon.wait_for(lambda s: not s.sessions, "it has left")
    notebook.worker.do("with library: pass")
    assert gates(notebook)[-1] is True


@pytest.mark.parametrize("refusals", [1, 2])
def test_one_whose_gate_a_failed_move_left_shut_leaves_kiwi_and_runs_on(
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


def test_one_that_left_kiwi_stays_out_of_it_when_the_daemon_is_killed(
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
    wait_until(lambda: gates(notebook)[-1] is False, "whoever comes back is scheduled again")


# --- moving --------------------------------------------------------------------------------------


def test_two_that_do_not_fit_take_turns_through_their_libraries(
    start: Start, linked: Linked
) -> None:
    daemon = start(*QUICK, "--tq", "0.5")
    first, second = linked(daemon), linked(daemon)
    contents = []
    for seed, one in enumerate((first, second)):
        one.do(f"library.take({40 * MIB}, {seed})")
        contents.append(one.digest())
    daemon.wait_state(first.pid, "paged-out", "suspended")
    for _ in range(2):
        for one, content in zip((first, second), contents, strict=True):
            assert one.digest() == content
    assert "page-out" in first.get("library.orders")
    assert "page-in" in second.get("library.orders")
    log = daemon.log()
    assert "session lost" not in log


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
    assert one.digest() == content  # asks for the lease, and so for its memory
    again = daemon.session(one.pid)
    assert again is not None
    assert again.id == found.id


@pytest.mark.parametrize("moving", [False, True], ids=["idle", "on-its-way-out"])
def test_the_driver_leaves_alone_whose_library_is_about_to_reconnect(
    start: Start, linked: Linked, *, moving: bool
) -> None:
    """Held by the driver in the middle of its library's work it could never ask for the GPU."""
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
        daemon.wait_state(one.pid, "paged-out")  # as far as anybody can tell
    else:
        _release(daemon, session)
        daemon.wait_state(one.pid, "paging-out", "paged-out")
        one.do("library.reconnects = True")
    one.do("library.released.set()")
    found = daemon.wait_for(
        lambda s: next((x for x in s.sessions if x.connected and x.paged_out_bytes), None),
        "it is out, and back",
    )
    assert found.state is SessionState.PAGED_OUT
    assert found.pager is MovedBy.INPROCESS
    assert "page-out" in one.get("library.orders")
    assert {process.state for process in daemon.books().processes} == {RUNNING}
    assert one.digest() == content


def _release(daemon: Daemon, session: str) -> None:
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()
        wait_until(  # once its burst is over for the new daemon, too
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
def test_one_that_execs_while_it_is_out_misses_nothing(
    start: Start, program: Any, *, crash: bool
) -> None:
    """Its memory ended with its program, as with one that ends: nobody waits for an answer."""
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
        assert "lost" not in dict(notebook.told())
    finally:
        notebook.worker.do("child.kill(); child.wait()")


# --- room ----------------------------------------------------------------------------------------


def test_room_is_made_of_what_idle_ones_hold(daemon: Daemon, linked: Linked) -> None:
    idle = linked(daemon, 40)
    content = idle.digest()
    daemon.wait_state(idle.pid, "idle")
    grows = linked(daemon, 8)
    answer = grows.get(f"library.want_room({40 * MIB})")
    assert answer["granted"], answer
    daemon.wait_state(idle.pid, "paged-out")
    grows.do(f"library.take({40 * MIB}, 5)")
    daemon.wait_state(grows.pid, "idle")
    assert idle.digest() == content


def test_more_than_the_gpu_has_is_denied(daemon: Daemon, linked: Linked) -> None:
    program = linked(daemon, 8)
    answer = program.get(f"library.want_room({200 * MIB})")
    assert not answer["granted"]
    assert "GPU" in answer["detail"]


ASKS_FOR_ROOM = """
from pathlib import Path
from talker import Talker
with Talker(Path({path!r})) as talker:
    talker.hello(role="pager")
    talker.say("pager-state", state="resident")
    talker.say("want-room", request=1, bytes={size})
    print(talker.until("gate"), flush=True)
    print(talker.until("room"), flush=True)
"""


def child_that_asks_for_room(parent: Worker, daemon: Daemon, words: Path) -> int:
    """Its pid; ``words`` gets what it is told."""
    code = ASKS_FOR_ROOM.format(path=str(daemon.sockets()[0]), size=40 * MIB)
    parent.do(
        "import subprocess, sys\n"
        f"environment = {{**os.environ, 'PYTHONPATH': {str(SUPPORT)!r}}}\n"
        f"words = open({str(words)!r}, 'w')\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], env=environment, stdout=words)"
    )
    return int(parent.get("child.pid"))


def test_room_is_asked_for_anew_by_a_session_that_takes_over(
    daemon: Daemon, program: Any, tmp_path: Path
) -> None:
    holder = program(daemon)
    holder.take(40, 1)
    holder.worker.do("begin()")  # has the rest of the GPU, and goes on
    parent = Worker(daemon.env | emulator.environment(daemon.state_path, emulator.build()))
    words = tmp_path / "words"
    try:
        path = str(daemon.sockets()[0])
        parent.do(
            "from pathlib import Path; from kiwi_core.client import Client;"
            f" client = Client(Path({path!r}), name='parent')"
        )
        child = child_that_asks_for_room(parent, daemon, words)
        wait_until(lambda: "gate" in words.read_text(), "it has asked")
        assert daemon.session(child) is not None
        parent.do("client.connect()")
        daemon.wait_for(
            lambda s: {x.pid for x in s.sessions} == {holder.pid, parent.pid}, "it has taken over"
        )
        assert "room" not in words.read_text()
        holder.worker.do("client.end_burst()")
        wait_until(lambda: "room" in words.read_text(), "it is answered")
        assert "'granted': True" in words.read_text()
    finally:
        with suppress(WorkerError):  # it may not have come so far
            parent.do("child.kill(); child.wait()")
        parent.close()


def test_a_child_that_asked_for_room_is_answered_when_its_session_dies(
    daemon: Daemon, linked: Linked, program: Any, tmp_path: Path
) -> None:
    holder = program(daemon)
    holder.take(40, 1)
    holder.worker.do("begin()")  # has the rest of the GPU, and goes on
    parent = linked(daemon)
    words = tmp_path / "words"
    child = child_that_asks_for_room(parent.worker, daemon, words)
    try:
        wait_until(lambda: "gate" in words.read_text(), "it has asked")
        assert "room" not in words.read_text()
        parent.kill()
        wait_until(lambda: "room" in words.read_text(), "it is answered")
        assert "'granted': False" in words.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        holder.worker.do("client.end_burst()")


# --- faults --------------------------------------------------------------------------------------


def pressed(daemon: Daemon, linked: Any, size_mib: int = 40) -> tuple[Any, Any]:
    """One that is idle with a large memory, and one that is about to need the room."""
    idle = linked(daemon, size_mib)
    daemon.wait_state(idle.pid, "idle")
    return idle, linked(daemon)


def stands_still(pid: int) -> bool:
    """All its threads: on a busy machine one runs on for a moment after the signal."""
    states = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


@pytest.mark.parametrize("action", ["hold", "page-out"])
def test_killed_in_the_middle_of_its_way_out(daemon: Daemon, linked: Linked, action: str) -> None:
    idle, other = pressed(daemon, linked)
    idle.script(action, "die")
    other.do(f"library.take({40 * MIB}, 2)")
    daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [other.pid], "only the other is left")
    assert other.digest()


def test_killed_in_the_middle_of_its_way_in(daemon: Daemon, linked: Linked) -> None:
    idle, other = pressed(daemon, linked)
    other.do(f"library.take({40 * MIB}, 2)")
    daemon.wait_state(idle.pid, "paged-out")
    idle.script("page-in", "die")
    idle.touch()
    daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [other.pid], "only the other is left")
    assert other.digest()


def test_one_that_is_stopped_goes_out_and_stays_stopped(start: Start, linked: Linked) -> None:
    """It is continued for as long as it takes to hold it and move it out."""
    daemon = start(*QUICK, "--lock-timeout", "0.5")
    idle, other = pressed(daemon, linked)
    os.kill(idle.pid, signal.SIGSTOP)
    wait_until(lambda: stands_still(idle.pid), "else it may still answer the first order")
    other.do(f"library.take({40 * MIB}, 2)")
    assert daemon.wait_state(idle.pid, "paged-out")
    assert stands_still(idle.pid)
    os.kill(idle.pid, signal.SIGCONT)
    assert idle.digest()


def test_one_that_is_stopped_in_the_middle_goes_on_until_it_is_out(
    start: Start, linked: Linked
) -> None:
    """It is continued, because others wait for its room, and is stopped again afterwards."""
    daemon = start(*QUICK)
    idle, other = pressed(daemon, linked)
    content = idle.get("'|'.join(m.digest() for m in library.memories)")
    idle.script("page-out", "stop")
    other.do(f"library.take({40 * MIB}, 2)")
    wait_until(lambda: halted(idle.pid), "it stands still again")
    os.kill(idle.pid, signal.SIGCONT)
    daemon.wait_state(idle.pid, "paged-out")
    assert idle.digest() == content


def halted(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_garbage_ends_the_connection_and_nothing_else(daemon: Daemon, linked: Linked) -> None:
    idle, other = pressed(daemon, linked)
    idle.script("hold", "garbage")
    other.do(f"library.take({40 * MIB}, 2)")  # the second attempt is a good one
    daemon.wait_state(idle.pid, "paged-out")
    assert "malformed" in idle.get("library.errors")
    assert idle.digest()


@pytest.mark.parametrize("action", ["hold", "page-out"])
def test_a_connection_lost_in_the_middle(daemon: Daemon, linked: Linked, action: str) -> None:
    idle, other = pressed(daemon, linked)
    content = idle.get("'|'.join(m.digest() for m in library.memories)")
    idle.script(action, "drop")
    other.do(f"library.take({40 * MIB}, 2)")
    daemon.wait_state(idle.pid, "paged-out")
    assert idle.digest() == content


def test_a_newer_connection_of_a_process_replaces_the_older(daemon: Daemon, linked: Linked) -> None:
    program = linked(daemon, 8)
    program.do("library.reconnects = False")
    program.do("newer = Library(library.path)")
    wait_until(lambda: "superseded" in program.get("library.errors"), "the older one is told")
    assert len(daemon.status().sessions) == 1
    wait_until(lambda: program.get("newer.gates"), "the newer one is spoken to")


_MANY = """
import socket
end, mine = os.pipe()
for _ in range({count}):
    if not os.fork():
        os.close(mine)
        line = socket.socket(socket.AF_UNIX)
        line.connect({path!r})
        line.sendall(b'{{"type":"hello","protocol":1,"role":"pager","client":"test"}}\\n')
        line.sendall(b'{{"type":"pager-state","state":"resident"}}\\n')
        os.read(end, 1)
        os._exit(0)
"""


def test_two_hundred_links_of_one_session(daemon: Daemon, program: Any) -> None:
    notebook = program(daemon, 2)
    notebook.worker.do(_MANY.format(count=200, path=str(daemon.sockets()[0])))
    with Talker(daemon.sockets()[0]) as talker:
        talker.hello()
        wait_until(
            lambda: talker.ask("get-metrics")["metrics"]["connections"] >= 202, "all connected"
        )
    assert notebook.intact()
    assert [s.pid for s in daemon.status().sessions] == [notebook.pid]
    notebook.worker.do("os.close(mine)")  # all end at once
    assert notebook.intact()


TOO_MANY = {f"kind {number}": 1 for number in range(KINDS_MAX + 1)}


BAD: list[dict[str, Any]] = [
    {"kind": "pager-state", "state": "somewhere"},
    {"kind": "pager-state", "state": "resident", "resident_bytes": -1},
    {"kind": "pager-state", "state": "resident", "unowned": TOO_MANY},
    {"kind": "acquire", "burst": 1},
    {"kind": "want-room", "request": 1},
]


def test_what_is_no_good_is_told_and_ends_the_connection(start: Start) -> None:
    daemon = start(*QUICK)
    for bad in BAD:
        with Talker(daemon.sockets()[0]) as talker:
            talker.hello(role="pager")
            talker.say(**bad)
            last = talker.last_words()
        assert last is not None, bad
        assert last["code"] in ("malformed", "out-of-order"), bad


def test_nobody_has_more_than_the_gpu(start: Start) -> None:
    """Whatever a library says: it must not spoil the books of the others."""
    daemon = start(*QUICK)
    with Talker(daemon.sockets()[0]) as talker:
        talker.hello(role="pager")
        talker.say("pager-state", state="out", paged_out_bytes=1 << 50)
        daemon.wait_for(
            lambda s: s.sessions and s.sessions[0].state is SessionState.PAGED_OUT, "believed"
        )
        assert daemon.status().sessions[0].paged_out_bytes <= 64 * MIB
