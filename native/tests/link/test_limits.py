"""Tests of the RAM that the daemon allows a library to hold in advance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pager_daemon import eventually

if TYPE_CHECKING:
    from cuda_processes import Worker
    from pager_daemon import Peer

    from conftest import Stage

MIB = 1 << 20
SUPPORT = str(Path(__file__).parents[2] / "support")


def allow(peer: Peer, arena_bytes: int, *, ahead: bool = False) -> None:
    peer.say("pager-limits", arena_bytes=arena_bytes, ahead=ahead)


def test_memory_above_the_limit_is_given_back(stage: Stage) -> None:
    program = stage.program("init()", PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    allow(peer, arena_bytes=-1)
    program.do("from owner_calls import *; a = make(40 * MIB, 1)")
    eventually(lambda: peer.state["arena_bytes"] >= 40 * MIB)
    allow(peer, arena_bytes=0)
    eventually(lambda: peer.state["arena_bytes"] == 0)
    assert peer.do("page-out")["outcome"] == "moved", "takes what it needs all the same"
    assert peer.state["arena_bytes"] >= 40 * MIB
    assert peer.do("page-in")["outcome"] == "moved"
    eventually(lambda: peer.state["arena_bytes"] == 0)
    program.do("same(a); check()")


def test_no_more_is_pinned_beforehand_than_is_allowed(stage: Stage) -> None:
    program = stage.program("init()", PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    allow(peer, arena_bytes=20 * MIB)
    program.do("from owner_calls import *; a = make(60 * MIB, 1)")
    eventually(lambda: program.get("arena()['pinned']") == 20 * MIB)
    assert peer.state["arena_bytes"] <= 20 * MIB
    allow(peer, arena_bytes=60 * MIB)
    eventually(lambda: program.get("arena()['pinned']") >= 56 * MIB)
    eventually(lambda: 56 * MIB <= peer.state["arena_bytes"] <= 60 * MIB)


def test_limits_end_with_their_connection(stage: Stage) -> None:
    program = stage.program("init()", PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    allow(peer, arena_bytes=0)
    program.do("from owner_calls import *; a = make(40 * MIB, 1)")
    assert program.get("arena()['pinned']") == 0
    peer.drop()
    peer = stage.daemon.peer(2)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert peer.state["arena_bytes"] >= 40 * MIB, "the old limit would take it back"
    allow(peer, arena_bytes=-1)
    eventually(lambda: program.get("arena()['pinned']") >= 40 * MIB)


def test_nothing_is_pinned_before_the_first_limit(stage: Stage) -> None:
    """A program that owns less than the smallest piece would pin one and give it back at once."""
    program = stage.program("init()", PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    program.do("from owner_calls import *; a = make(40 * MIB, 1)")
    eventually(lambda: peer.state["resident_bytes"] >= 40 * MIB)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("arena()['pinned']") == 0
    allow(peer, arena_bytes=-1)
    eventually(lambda: program.get("arena()['pinned']") >= 40 * MIB)


def idle_with_copies(stage: Stage) -> tuple[Worker, Peer]:
    """Start a program without the lease, with 40 MiB, all of which is copied ahead."""
    program = stage.program("init()", PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    program.do("from owner_calls import *; a = make(40 * MIB, 1)")
    allow(peer, arena_bytes=-1, ahead=True)
    eventually(lambda: program.get("arena()['pinned']") >= 40 * MIB)
    assert program.get("arena()['used']") == 0, "it may compute"
    peer.gate(open=False)
    eventually(lambda: program.get("arena()['used']") >= 40 * MIB)
    return program, peer


def test_without_the_lease_memory_is_copied_ahead(stage: Stage) -> None:
    program, peer = idle_with_copies(stage)
    assert peer.state["resident_bytes"] == 40 * MIB
    program.do("fault('copy_out', 0, -1)")  # a page-out that copied would be refused
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert peer.do("page-out")["outcome"] == "moved", "nothing has changed it since"
    program.do("fault('copy_out', 0, 0)")
    assert peer.do("page-in")["outcome"] == "moved"
    peer.gate(open=True)
    program.do("same(a); check()")
    assert program.get("arena()['used']") == 0


def test_copies_end_when_the_daemon_wants_them_no_more(stage: Stage) -> None:
    program, peer = idle_with_copies(stage)
    allow(peer, arena_bytes=-1)
    eventually(lambda: program.get("arena()['used']") == 0)
    allow(peer, arena_bytes=-1, ahead=True)
    eventually(lambda: program.get("arena()['used']") >= 40 * MIB)
    allow(peer, arena_bytes=0, ahead=True)
    eventually(lambda: program.get("arena()['pinned']") == 0)
    peer.gate(open=True)
    program.do("same(a); check()")


def test_copies_end_with_their_daemon(stage: Stage) -> None:
    program, peer = idle_with_copies(stage)
    peer.drop()
    program.do("until(lambda: arena()['used'] == 0, 'the copies stay'); write(a, 2)")
    peer = stage.daemon.peer(2)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    program.do("same(a); check()")
