"""Tests of who owns a program's memory: the daemon decides before the first context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pager_daemon import eventually

if TYPE_CHECKING:
    from cuda_processes import Worker
    from pager_daemon import Peer

    from conftest import Stage

MIB = 1 << 20
NO: dict[str, object] = {"own": False, "own_why": "crashed-before"}


def owned(peer: Peer, program: Worker) -> bool:
    """Let the program allocate, and return whether its library owns that memory."""
    before = peer.state
    program.do("p = alloc(8 * MIB)")
    eventually(lambda: peer.state["held_bytes"] >= before["held_bytes"] + 8 * MIB)
    return bool(peer.state["resident_bytes"] >= 8 * MIB)


@pytest.mark.parametrize("by_name", [False, True], ids=["preloaded", "by-name"])
@pytest.mark.parametrize("answer", [{"own": True}, NO], ids=["yes", "no"])
def test_the_daemon_decides_for_a_program_that_asks(
    stage: Stage, answer: dict[str, object], by_name: bool
) -> None:
    stage.daemon.decides = answer
    program = stage.program(by_name=by_name, KIWI_PRELOAD_OWN="1")
    peer = stage.daemon.peer()
    assert (peer.received[0]["owns"], peer.received[0]["could_own"]) == (True, True)
    assert owned(peer, program) is answer["own"]
    moved = peer.do("page-out")
    assert (moved["outcome"], moved["bytes"] > 0) == ("moved", answer["own"])
    assert peer.do("page-in")["outcome"] == "moved"


def test_the_daemon_may_decide_for_a_program_that_does_not_ask(stage: Stage) -> None:
    stage.daemon.decides = {"own": True}
    program = stage.program(by_name=True)
    peer = stage.daemon.peer()
    assert (peer.received[0]["owns"], peer.received[0]["could_own"]) == (False, True)
    assert owned(peer, program)


def test_a_program_that_wants_the_gate_only_cannot_be_made_to_own(stage: Stage) -> None:
    stage.daemon.decides = {"own": True}
    program = stage.program(KIWI_PRELOAD_OWN="0")
    peer = stage.daemon.peer()
    assert (peer.received[0]["owns"], peer.received[0]["could_own"]) == (False, False)
    assert not owned(peer, program)


def test_an_older_daemon_leaves_it_to_the_program(stage: Stage) -> None:
    stage.daemon.decides = {}
    asks, does_not = stage.program(), stage.program(by_name=True)
    peers = {peer.received[0]["owns"]: peer for peer in map(stage.daemon.peer, (1, 2))}
    assert owned(peers[True], asks)
    assert not owned(peers[False], does_not)


def test_without_a_daemon_the_program_gets_what_it_asks_for(stage: Stage) -> None:
    """Nobody moves anything then. A daemon that comes later is told."""
    stage.daemon.stop()
    program = stage.program()
    stage.daemon.start()
    peer = stage.daemon.peer(len(stage.daemon.peers) or 1)
    assert (peer.received[0]["owns"], peer.received[0]["could_own"]) == (True, False)
    assert owned(peer, program)


def test_a_daemon_that_answers_late_finds_the_gate_only(stage: Stage) -> None:
    """The program does not wait for it, and the next hello says what the library is."""
    stage.daemon.decides = {"own": True}
    stage.daemon.welcoming = False
    program = stage.program(KIWI_PRELOAD_FIRST_MS="2000")  # its first hello is out by then
    late = eventually(lambda: stage.daemon.peers[0] if stage.daemon.peers else None)
    late.await_received("hello")
    stage.daemon.welcoming = True
    late.welcome()
    peer = stage.daemon.peer(2)
    assert (peer.received[0]["owns"], peer.received[0]["could_own"]) == (False, False)
    assert not owned(peer, program)


def test_a_late_answer_that_says_no_fits(stage: Stage) -> None:
    stage.daemon.decides = NO
    stage.daemon.welcoming = False
    program = stage.program(KIWI_PRELOAD_FIRST_MS="1")
    late = eventually(lambda: stage.daemon.peers[0] if stage.daemon.peers else None)
    late.await_received("hello")
    stage.daemon.welcoming = True
    late.welcome()
    late.say("pong")
    assert not owned(stage.daemon.peer(), program)
    assert len(stage.daemon.peers) == 1


def test_threads_that_begin_together_wait_for_the_same_decision(stage: Stage) -> None:
    stage.daemon.decides = {"own": True}
    stage.daemon.welcoming = False
    program = stage.program("", KIWI_PRELOAD_FIRST_MS="60000")
    program.send(
        "import threading; ts = [threading.Thread(target=init) for _ in range(4)];"
        " [t.start() for t in ts]; [t.join() for t in ts]; init()",
        "exec",
    )
    late = eventually(lambda: stage.daemon.peers[0] if stage.daemon.peers else None)
    late.await_received("hello")
    stage.daemon.welcoming = True
    late.welcome()
    late.say("pong")
    program.answer()
    assert owned(stage.daemon.peer(), program)
