"""Tests of a daemon that goes away, comes back, was never there, or is not real."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pager_daemon import eventually

import kiwi_emulator as emulator
from kiwi_core import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda_processes import Worker

    from conftest import Stage

MIB = 1 << 20
NOT_YET_S = 0.3
FILLED = "init(); p = alloc({0} * MIB); d = fill(p, 1, {0} * MIB)"


def works(program: Worker, mib: int = 4) -> bool:
    return bool(program.get(f"digest(p, {mib} * MIB) == d"))


def test_no_daemon_until_later(stage: Stage) -> None:
    stage.daemon.stop()
    stage.daemon.path.unlink()
    program = stage.program(FILLED.format(4))
    assert works(program)
    assert program.fails("alloc(254 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY", "and at once"
    stage.daemon.start()
    peer = stage.daemon.peer()
    assert peer.do("page-out")["bytes"] >= 4 * MIB, "it has owned its memory all the same"
    assert peer.do("page-in")["outcome"] == "moved"
    assert works(program)
    assert "without Kiwi" not in stage.log, "nobody has to know"


def test_no_directory_until_later(stage: Stage) -> None:
    stage.daemon.stop()
    stage.daemon.path.unlink()
    stage.sockets.rmdir()
    program = stage.program(FILLED.format(4))
    assert works(program)
    stage.sockets.mkdir(mode=0o700)
    stage.daemon.start()
    stage.daemon.peer()


def test_a_daemon_that_takes_its_time_holds_nobody_up(stage: Stage) -> None:
    stage.daemon.welcoming = False
    stage.daemon.decides = {"own": False}  # as the program has decided by itself meanwhile
    program = stage.program(FILLED.format(4))
    assert works(program)
    eventually(lambda: stage.daemon.peers and stage.daemon.peers[0].of("hello"))
    [peer] = stage.daemon.peers
    assert [m["type"] for m in peer.received] == ["hello", "ping"], "no more before it is welcome"
    peer.welcome()
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert works(program)


def test_cut_before_the_welcome(stage: Stage) -> None:
    stage.daemon.welcoming = False
    program = stage.program(FILLED.format(4))
    eventually(lambda: len(stage.daemon.peers) > 0)
    stage.daemon.welcoming = True
    stage.daemon.peers[0].drop()
    assert stage.daemon.peer(2).do("hold")["outcome"] == "moved"
    stage.daemon.peer(2).do("free")
    assert works(program)


def test_cut_while_a_call_waits_for_a_lease(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    peer.gate(open=False)
    program.send("digest(p, 4 * MIB) == d")
    peer.await_received("want-lease")
    stage.daemon.stop()
    assert program.answer() is True, "without a daemon it runs on"
    stage.daemon.opens = False
    stage.daemon.start()
    peer = stage.daemon.peer(2)
    program.send("digest(p, 4 * MIB) == d")
    peer.await_received("want-lease")
    peer.say("gate", open=True)
    assert program.answer() is True


def test_cut_while_held(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    assert peer.do("hold")["outcome"] == "moved"
    program.send("digest(p, 4 * MIB) == d")
    assert not program.answered(NOT_YET_S)
    peer.drop()
    assert program.answer() is True
    assert stage.daemon.peer(2).state["state"] == "resident"


def test_cut_while_out(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    assert stage.daemon.peer().do("page-out")["outcome"] == "moved"
    program.send("digest(p, 4 * MIB) == d")
    stage.daemon.stop()
    eventually(lambda: "`kiwi daemon`" in stage.log)
    assert not program.answered()
    stage.daemon.start()
    peer = stage.daemon.peer(2)
    assert peer.state["state"] == "out"
    assert peer.state["paged_out_bytes"] >= 4 * MIB
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.answer() is True
    assert stage.log.count("`kiwi daemon`") == 1, "said once"


@pytest.mark.parametrize(
    ("action", "end"), [("page-out", "out"), ("page-in", "resident"), ("hold", "resident")]
)
def test_cut_in_the_middle(stage: Stage, action: str, end: str) -> None:
    """The operation under way is finished, and the next daemon learns its outcome."""
    program = stage.program(FILLED.format(64))
    peer = stage.daemon.peer()
    if action == "page-in":
        peer.do("page-out")
    if action == "hold":
        program.do("launch('spin_ns', 1_000_000_000)")
    emulator.set_copy_bandwidth(stage.state, 64 * MIB)
    peer.begin_and_see(action)
    stage.daemon.stop()
    emulator.set_copy_bandwidth(stage.state, 0)
    stage.daemon.start()
    peer = stage.daemon.peer(2)
    assert [m["state"] for m in peer.of("pager-state")] == [end]
    assert peer.of("pager-done") == [], "nobody has asked this"
    assert peer.do("page-in")["outcome"] == "moved"
    assert works(program, 64)


def test_orders_that_came_with_the_end(stage: Stage) -> None:
    """The next daemon learns which of the orders were received."""
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    for action in ("page-out", "page-in", "page-out"):
        peer.begin(action)
    peer.drop()
    peer = stage.daemon.peer(2)
    out_bytes = peer.state["paged_out_bytes"]
    assert (peer.state["state"] == "out") == (out_bytes > 0)
    assert peer.do("page-in")["bytes"] == out_bytes
    assert works(program)


def test_a_wish_for_room_is_asked_again(stage: Stage) -> None:
    stage.daemon.grants_room = None
    program = stage.program(FILLED.format(64))
    peer = stage.daemon.peer()
    program.send("alloc(220 * MIB)", "exec")
    [first] = peer.await_received("want-room")
    peer.drop()
    peer = stage.daemon.peer(2)
    [again] = peer.await_received("want-room")
    assert again["bytes"] == first["bytes"]
    peer.say("room", request=again["request"] + 1000, granted=True, detail="")
    assert not program.answered(NOT_YET_S), "that was somebody else's"
    peer.say("room", request=again["request"], granted=False, detail="no")
    with pytest.raises(Exception, match="OUT_OF_MEMORY"):
        program.answer()
    assert works(program, 64)


def test_a_connection_that_another_one_replaced_is_not_made_again(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    peer.say("error", code="superseded", message="Replaced.", remedy="", fatal=True, about="")
    eventually(lambda: peer.ended)
    assert works(program)
    assert not program.answered(1.5)
    assert len(stage.daemon.peers) == 1


def test_a_daemon_of_another_version(stage: Stage) -> None:
    stage.daemon.welcoming = False
    program = stage.program(FILLED.format(4))
    eventually(lambda: stage.daemon.peers and stage.daemon.peers[0].of("hello"))
    stage.daemon.peers[0].say("welcome", protocol=2, daemon="kiwi 9", session="")
    eventually(lambda: stage.daemon.peers[0].ended)
    assert works(program)
    eventually(lambda: "version" in stage.log)


def test_a_daemon_that_refuses_says_why(stage: Stage) -> None:
    stage.daemon.welcoming = False
    program = stage.program(FILLED.format(4))
    eventually(lambda: stage.daemon.peers and stage.daemon.peers[0].of("hello"))
    refusal = {"code": "not-yours", "message": "Not for \x07 you.", "remedy": "Ask.", "fatal": True}
    stage.daemon.peers[0].say("error", **refusal)
    eventually(lambda: "Ask." in stage.log)
    assert "\x07" not in stage.log
    assert works(program)


def refusal(code: str) -> dict[str, Any]:
    return {"code": code, "message": "No place.", "remedy": "Wait.", "fatal": True}


def test_a_daemon_that_is_full_is_waited_for(stage: Stage) -> None:
    """A program that continued would use the GPU beside those that wait for their turn."""
    stage.daemon.welcoming = False
    full = refusal("too-many-sessions")
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(stage.program, FILLED.format(4))
        for number in range(3):
            eventually(lambda n=number: len(stage.daemon.peers) > n)
            eventually(lambda n=number: stage.daemon.peers[n].of("hello"))
            assert not starting.done()
            if number == 2:
                stage.daemon.welcoming = True  # when it comes again
            stage.daemon.peers[number].say("error", **full)
        program = starting.result(60)
    assert "waits for a place" in stage.log
    assert works(program)


@pytest.mark.parametrize(
    "code", ["too-many-connections", "too-many-sessions", "too-much-unread", "silent"]
)
def test_a_daemon_that_is_full_may_hang_up_before_the_hello(
    stage: Stage, tmp_path: Path, code: str
) -> None:
    stage.daemon.turns_away = refusal(code)
    shim = tmp_path / "slow_connect.so"
    source = Path(__file__).with_name("slow_connect.c")
    subprocess.run(
        [*compiled.find_compiler(), "-shared", "-fPIC", "-o", str(shim), str(source)], check=True
    )
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(stage.program, FILLED.format(4), before=str(shim))
        eventually(lambda: stage.daemon.turned_away >= 2)
        assert not starting.done()
        stage.daemon.turns_away = None
        program = starting.result(60)
    assert "waits for a place" in stage.log
    stage.daemon.peer()
    assert works(program)


@contextmanager
def full_backlog(path: Path) -> Iterator[None]:
    """Run a daemon at ``path`` that accepts no connection, with its backlog full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        while True:
            crowd = stack.enter_context(socket.socket(socket.AF_UNIX))
            crowd.setblocking(False)
            try:
                crowd.connect(str(path))
            except BlockingIOError:
                break
        yield


def test_a_daemon_with_too_many_to_accept_is_waited_for(stage: Stage) -> None:
    stage.daemon.stop()
    stage.daemon.path.unlink()
    with full_backlog(stage.daemon.path), ThreadPoolExecutor() as pool:
        starting = pool.submit(stage.program, FILLED.format(4))
        eventually(lambda: "waits for a place" in stage.log)
        time.sleep(NOT_YET_S)
        assert not starting.done()
        stage.daemon.start()
        program = starting.result(60)
    stage.daemon.peer()
    assert works(program)


def test_a_stop_does_not_end_the_wait_for_a_daemon_with_too_many_to_accept(stage: Stage) -> None:
    stage.daemon.stop()
    stage.daemon.path.unlink()
    program = stage.program("")
    with full_backlog(stage.daemon.path), ThreadPoolExecutor() as pool:
        starting = pool.submit(program.do, FILLED.format(4))
        for _ in range(20):
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(program.pid, signum)
                time.sleep(0.05)
        eventually(lambda: "waits for a place" in stage.log)
        assert not starting.done()
        stage.daemon.start()
        starting.result(60)
    stage.daemon.peer()
    assert works(program)


GARBAGE = {
    "random": random.Random(4).randbytes(5000) + b"\n",
    "no end": b'{"type":"gate","open":' + b" " * 70_000,
    "long line": b'{"type":"later","x":"' + b"y" * 70_000 + b'"}\n',
    "no utf-8": b'{"type":"room\xff"}\n',
    "no type": b'{"open":true}\n',
    "type of another type": b'{"type":7}\n',
    "wrong type": b'{"type":"gate","open":1}\n',
    "missing field": b'{"type":"pager-do","op":1,"within_ns":1}\n',
    "large number": b'{"type":"pager-do","op":9007199254740992,"action":"hold","within_ns":1}\n',
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "deep": b'{"type":' + b"[" * 30_000 + b"\n",
}


def test_garbage_ends_the_connection_and_nothing_else(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    for number, (name, data) in enumerate(GARBAGE.items(), 1):
        peer = stage.daemon.peer(number)
        assert peer.do("hold")["outcome"] == "moved"
        peer.say_bytes(data)
        eventually(lambda peer=peer: peer.ended)
        assert works(program), name
    peer = stage.daemon.peer(len(GARBAGE) + 1)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert works(program)
    assert stage.log.count("no Kiwi daemon") == 1


@pytest.mark.parametrize("data", [GARBAGE["http"], b'{"type":"gate","open":false}\n'])
def test_garbage_instead_of_a_welcome(stage: Stage, data: bytes) -> None:
    stage.daemon.welcoming = False
    program = stage.program(FILLED.format(4))
    eventually(lambda: len(stage.daemon.peers) > 0)
    stage.daemon.welcoming = True
    stage.daemon.peers[0].say_bytes(data)
    eventually(lambda: stage.daemon.peers[0].ended)
    assert works(program)
    assert stage.daemon.peer(2).state["state"] == "resident"


def test_what_a_later_daemon_may_say_is_ignored(stage: Stage) -> None:
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    peer.say("weather", sunny=True, where=[{"a": None}, -1.5e3, "é"])
    peer.say("notice", notice="suspended", text="x", remedy="")
    peer.say("error", code="busy", message="later", remedy="", fatal=False, about="")
    peer.say("room", request=77, granted=True, detail="nobody asked")
    peer.say("gate", open=True, since="yesterday")
    peer.say_bytes(
        b' \t{ "within_ns" : 5000000000 , "op":99,\r "action":"\\u0068old", "type":"pager-do"} \n'
    )
    assert peer.end(99)["outcome"] == "moved"
    assert peer.do("free")["outcome"] == "moved"
    assert works(program)
    assert len(stage.daemon.peers) == 1


def test_a_message_in_pieces(stage: Stage) -> None:
    stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    for byte in b'{"type":"pager-do","op":50,"action":"hold","within_ns":5000000000}\n':
        peer.say_bytes(bytes([byte]))
    assert peer.end(50)["outcome"] == "moved"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_socket_is_not_trusted(stage: Stage) -> None:
    os.chown(stage.sockets, 12345, 12345)
    os.chown(stage.daemon.path, 12345, 12345)
    program = stage.program(FILLED.format(4))
    eventually(lambda: "not trusted" in stage.log)
    assert works(program)
    assert stage.daemon.peers == []
    os.chown(stage.sockets, 0, 0)  # root's directory alone does not make it root's socket
    assert works(program)
    assert stage.daemon.peers == []
    os.chown(stage.daemon.path, 0, 0)
    stage.daemon.peer()


@pytest.mark.parametrize("how", ["open to all", "a link"])
def test_a_directory_where_others_can_be_first_is_not_trusted(stage: Stage, how: str) -> None:
    aside = stage.sockets.with_name("aside")
    if how == "a link":
        stage.sockets.rename(aside)
        stage.sockets.symlink_to(aside)
    else:
        stage.sockets.chmod(0o1777)
    program = stage.program(FILLED.format(4))
    eventually(lambda: "not trusted" in stage.log)
    assert works(program)
    assert stage.daemon.peers == []
    if how == "a link":
        stage.sockets.unlink()
        aside.rename(stage.sockets)
    stage.sockets.chmod(0o700)
    stage.daemon.peer()


LISTENER = """
import os, socket, sys
os.setgid(12345); os.setuid(12345)
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1]); sock.listen()
print("ready", flush=True)
while True:
    peer = sock.accept()[0]
    print("came", peer.recv(100), flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_peer_of_another_user_is_not_trusted(stage: Stage) -> None:
    """The directory may be exchanged between the check and the connection."""
    stage.daemon.stop()
    stage.daemon.path.unlink()
    stage.sockets.parent.chmod(0o755)
    os.chown(stage.sockets, 12345, 12345)
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(stage.daemon.path)], stdout=subprocess.PIPE, cwd="/"
    ) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"ready\n"
            os.chown(stage.daemon.path, 0, 0)
            os.chown(stage.sockets, 0, 0)
            program = stage.program(FILLED.format(4))
            eventually(lambda: "not trusted" in stage.log)
            assert works(program)
            stranger.kill()
            assert b"hello" not in stranger.stdout.read()
        finally:
            stranger.kill()


def test_no_socket_at_that_name(stage: Stage) -> None:
    stage.daemon.stop()
    stage.daemon.path.unlink()
    stage.daemon.path.write_text("a file")
    program = stage.program(FILLED.format(4))
    assert works(program)
    eventually(lambda: "not trusted" in stage.log)


OPENS = {
    "pipes": "[fd for _ in range(4) for fd in os.pipe()]",
    "eventfds": "[os.eventfd(5, os.EFD_NONBLOCK) for _ in range(8)]",  # they share an inode
    "sockets": "[one.detach() for _ in range(4) for one in socket.socketpair()]",
}


@pytest.mark.parametrize("kind", OPENS)
def test_a_program_that_closes_what_it_does_not_know(stage: Stage, kind: str) -> None:
    """A server does so when it starts; the files that it opens then reuse our descriptor
    numbers."""
    program = stage.program(FILLED.format(4))
    peer = stage.daemon.peer()
    program.do(
        "import socket\n"
        "def is_the_links(fd):\n"
        "    try: peer = socket.socket(fileno=os.dup(fd)).getpeername()\n"
        "    except OSError: return False\n"
        "    return peer == '' or peer.endswith('.sock')\n"
        "all_fds = [int(fd) for fd in os.listdir('/proc/self/fd')]\n"
        "open_fds = [fd for fd in all_fds if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "ours = [fd for fd in open_fds if is_the_links(fd)]\n"
        f"mine = {OPENS[kind]}\n"
        "for fd, new in zip(ours, mine): os.dup2(new, fd)\n"
    )
    assert program.get("len(ours)") == 3
    peer.say("gate", open=True)  # the library notices that the descriptor is no longer its socket
    peer = stage.daemon.peer(2)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    peer.gate(open=False)
    program.send("digest(p, 4 * MIB) == d")
    peer.await_received("want-lease")
    peer.say("gate", open=True)
    assert program.answer() is True
    program.do("for fd, new in zip(ours, mine): assert os.path.sameopenfile(fd, new)")
    program.do(
        "for r, w in zip(mine[::2], mine[1::2]):\n    os.eventfd_read(r), os.eventfd_read(w)"
        if kind == "eventfds"
        else "os.write(mine[1], b'x'); assert os.read(ours[0], 2) == b'x'"
    )
