"""Tests of room that preloaded libraries ask for, and of their faults.

The library is the scripted one; the daemon and its socket are real.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cuda_processes import Worker, WorkerError
from daemon import wait_until
from linked_program import QUICK
from session_program import MIB, SessionProgram
from stopped import is_stopped
from talker import Talker

from kiwi_core.states import SessionState
from kiwi_core.wire.pager import KINDS_MAX

if TYPE_CHECKING:
    from daemon import Daemon

Start = "Callable[..., Daemon]"
Linked = "Callable[..., LinkedProgram]"

SUPPORT = Path(__file__).parents[2] / "support"


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


def test_room_is_denied_only_after_a_look(daemon: Daemon, linked: Linked) -> None:
    """The last look met memory that the driver has given back since."""
    program = linked(daemon, 8)
    program.do(f"library.take({28 * MIB}, 2)")
    daemon.wait_for(lambda s: s.sessions[0].resident_bytes >= 36 * MIB, "all is seen")
    daemon.wait_state(program.pid, "idle")
    program.do(f"library.memories.pop().away(); answer = library.want_room({32 * MIB})")
    assert program.get("answer")["granted"], program.get("answer")


HOLDS, WANTS = 24 * MIB, 48 * MIB
"""Together more than the GPU has. What the first leaves is enough for all others, so that nothing
is moved before a test wants it."""


class Asking:
    """A child of a worker that asks for room (``asking_library.py``), in a process group of its
    own. ``free``: it answers orders from the beginning. ``grandchild``: its own child asks."""

    def __init__(
        self,
        parent: Worker,
        daemon: Daemon,
        directory: Path,
        *,
        free: bool = True,
        grandchild: bool = False,
    ) -> None:
        self._words, self._may_answer = directory / "words", directory / "may-answer"
        if free:
            self.may_answer()
        command = [sys.executable, str(SUPPORT / "asking_library.py"), str(daemon.sockets()[0])]
        command += [str(WANTS), str(self._may_answer), *["parent"] * grandchild]
        parent.do(
            "import subprocess\n"
            f"words = open({str(self._words)!r}, 'a')\n"
            f"child = subprocess.Popen({command!r}, stdout=words, start_new_session=True)"
        )
        self.pid = int(parent.get("child.pid"))
        try:
            self.has_received("pong", times=2 if grandchild else 1)
        except AssertionError:
            self.kill()
            raise

    def may_answer(self) -> None:
        self._may_answer.touch()

    def messages(self) -> str:
        return self._words.read_text()

    def has_received(self, kind: str, times: int = 1) -> None:
        wait_until(lambda: self.messages().count(f"{kind!r}") >= times, f"{kind!r} is heard")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@pytest.fixture
def holder(daemon: Daemon, program: Any) -> SessionProgram:
    """A program in a burst that leaves too little of the GPU for ``WANTS``."""
    one: SessionProgram = program(daemon, HOLDS // MIB)
    one.worker.do("begin()")
    return one


def test_room_is_asked_for_anew_by_a_session_that_takes_over(
    daemon: Daemon, holder: SessionProgram, tmp_path: Path
) -> None:
    parent = Worker(daemon.cuda_env)
    try:
        path = str(daemon.sockets()[0])
        parent.do(
            "from pathlib import Path; from kiwi_core.client import Client;"
            f" client = Client(Path({path!r}), name='parent')"
        )
        child = Asking(parent, daemon, tmp_path)
        assert daemon.session(child.pid) is not None
        parent.do("client.connect()")
        daemon.wait_for(
            lambda s: {x.pid for x in s.sessions} == {holder.pid, parent.pid}, "it has taken over"
        )
        assert "'room'" not in child.messages()
        holder.worker.do("client.end_burst()")
        child.has_received("room")
        assert "'granted': True" in child.messages()
    finally:
        with suppress(WorkerError):  # the test may have failed before this
            parent.do("child.kill(); child.wait()")
        parent.close()


def test_a_child_that_asked_for_room_is_answered_when_its_session_dies(
    daemon: Daemon, linked: Linked, holder: SessionProgram, tmp_path: Path
) -> None:
    parent = linked(daemon)
    child = Asking(parent.worker, daemon, tmp_path)
    try:
        assert "'room'" not in child.messages()
        parent.kill()
        daemon.wait_for(lambda _: "'room'" in child.messages(), "it is answered")
        assert "'granted': False" in child.messages()
    finally:
        child.kill()
        holder.worker.do("client.end_burst()")


def test_a_grandchild_is_taken_along_with_its_request_for_room(
    daemon: Daemon, linked: Linked, holder: SessionProgram, tmp_path: Path
) -> None:
    parent = linked(daemon)
    child = Asking(parent.worker, daemon, tmp_path, grandchild=True)
    try:
        parent.kill()
        daemon.wait_for(
            lambda s: {x.pid for x in s.sessions} == {holder.pid, child.pid}, "one for both"
        )
        assert "'room'" not in child.messages()
        holder.worker.do("client.end_burst()")
        daemon.wait_for(lambda _: "'room'" in child.messages(), "it is answered")
        assert "'granted': True" in child.messages()
    finally:
        child.kill()


def test_a_session_that_dies_in_the_middle_of_a_move_leaves_a_request_for_room(
    daemon: Daemon, linked: Linked, holder: SessionProgram, tmp_path: Path
) -> None:
    """The request is made again once the move is over: only then is it known where the child's
    memory is."""
    parent = linked(daemon)
    child = Asking(parent.worker, daemon, tmp_path, free=False)
    try:
        with Talker(daemon.sockets()[0]) as observer:
            observer.hello()
            observer.ask("release", session=daemon.wait_state(parent.pid, "idle").id)
            child.has_received("pager-do")
        parent.kill()
        daemon.wait_for(lambda s: {x.pid for x in s.sessions} == {holder.pid}, "it has died")
        holder.worker.do("client.end_burst()")
        assert "'room'" not in child.messages()
        child.may_answer()
        daemon.wait_for(lambda _: "'room'" in child.messages(), "it is answered")
        assert "'granted': True" in child.messages()
    finally:
        child.kill()


# --- faults --------------------------------------------------------------------------------------


def pressed(daemon: Daemon, linked: Any, size_mib: int = 40) -> tuple[Any, Any]:
    """Return an idle program with a large memory, and one that is about to need the room."""
    idle = linked(daemon, size_mib)
    daemon.wait_state(idle.pid, "idle")
    return idle, linked(daemon)


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


def test_a_stopped_program_goes_out_and_stays_stopped(start: Start, linked: Linked) -> None:
    """It is continued until it is held and moved out, and then stopped again."""
    daemon = start(*QUICK, "--lock-timeout", "0.5")
    idle, other = pressed(daemon, linked)
    os.kill(idle.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(idle.pid), "else it may still answer the first order")
    other.do(f"library.take({40 * MIB}, 2)")
    assert daemon.wait_state(idle.pid, "paged-out")
    assert is_stopped(idle.pid)
    os.kill(idle.pid, signal.SIGCONT)
    assert idle.digest()


def test_a_program_stopped_in_mid_move_goes_on_until_it_is_out(
    start: Start, linked: Linked
) -> None:
    """It is continued because others wait for its room, and stopped again afterwards."""
    daemon = start(*QUICK)
    idle, other = pressed(daemon, linked)
    content = idle.get("'|'.join(m.digest() for m in library.memories)")
    idle.script("page-out", "stop")
    other.do(f"library.take({40 * MIB}, 2)")
    wait_until(lambda: is_stopped(idle.pid), "it is stopped again")
    os.kill(idle.pid, signal.SIGCONT)
    daemon.wait_state(idle.pid, "paged-out")
    assert idle.digest() == content


def test_garbage_ends_the_connection_and_nothing_else(daemon: Daemon, linked: Linked) -> None:
    idle, other = pressed(daemon, linked)
    idle.script("hold", "garbage")
    other.do(f"library.take({40 * MIB}, 2)")  # the second attempt succeeds
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
    notebook.worker.do("os.close(mine)")  # all of them end at once
    assert notebook.intact()


TOO_MANY = {f"kind {number}": 1 for number in range(KINDS_MAX + 1)}


BAD: list[dict[str, Any]] = [
    {"kind": "pager-state", "state": "somewhere"},
    {"kind": "pager-state", "state": "resident", "resident_bytes": -1},
    {"kind": "pager-state", "state": "resident", "unowned": TOO_MANY},
    {"kind": "acquire", "burst": 1},
    {"kind": "want-room", "request": 1},
]


def test_a_bad_message_gets_an_error_and_ends_the_connection(start: Start) -> None:
    daemon = start(*QUICK)
    for bad in BAD:
        with Talker(daemon.sockets()[0]) as talker:
            talker.hello(role="pager")
            talker.say(**bad)
            last = talker.last_words()
        assert last is not None, bad
        assert last["code"] in ("malformed", "out-of-order"), bad


def test_nobody_has_more_than_the_gpu(start: Start) -> None:
    """A library's claims must not spoil the books of the others."""
    daemon = start(*QUICK)
    with Talker(daemon.sockets()[0]) as talker:
        talker.hello(role="pager")
        talker.say("pager-state", state="out", paged_out_bytes=1 << 50)
        daemon.wait_for(
            lambda s: s.sessions and s.sessions[0].state is SessionState.PAGED_OUT, "believed"
        )
        assert daemon.status().sessions[0].paged_out_bytes <= 64 * MIB
