"""What the daemon allows beside what is needed: memory beforehand, copies kept, and cleaning: what
is idle without a lease is copied beforehand, and stays in the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pager_daemon import eventually

if TYPE_CHECKING:
    from conftest import Stage
    from pager_daemon import Peer

MIB = 1 << 20
SUPPORT = str(Path(__file__).parents[2] / "support")
SETUP = "init(); from owner_calls import *; a = make(40 * MIB, 1); until_hashing()"


def allow(peer: Peer, arena_bytes: int = -1, keep_bytes: int = -1, *, clean: bool = False) -> None:
    peer.say("pager-limits", arena_bytes=arena_bytes, keep_bytes=keep_bytes, clean=clean)


def test_an_idle_program_is_cleaned_and_its_way_out_copies_nothing(stage: Stage) -> None:
    program = stage.program(SETUP, PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    assert peer.state["kept_bytes"] == 0
    allow(peer, clean=True)
    peer.gate(open=False)
    eventually(lambda: peer.state["kept_bytes"] == 40 * MIB)
    assert peer.state["resident_bytes"] == 40 * MIB
    assert peer.state["arena_bytes"] >= 40 * MIB
    peer.gate(open=True)
    program.do("same(a); write(a, 2, 6 * MIB, 5)")
    copied = program.get("moved()['copied']")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("moved()['copied']") == copied + 2 * MIB
    program.do("same(a); check()")


def test_it_is_only_done_where_it_is_allowed(stage: Stage) -> None:
    eager = stage.program(SETUP, PYTHONPATH=SUPPORT)
    never = stage.program(SETUP, PYTHONPATH=SUPPORT, KIWI_PRELOAD_CLEAN="0")
    later = stage.program(SETUP, PYTHONPATH=SUPPORT)
    for number in (1, 2, 3):
        peer = stage.daemon.peer(number)
        allow(peer, clean=number != 3)
        peer.gate(open=False)
    eventually(lambda: eager.get("moved()['copied']") == 40 * MIB)
    assert never.get("moved()['copied']") == later.get("moved()['copied']") == 0
    allow(stage.daemon.peer(3), clean=True)
    eventually(lambda: later.get("moved()['copied']") == 40 * MIB)
    assert never.get("moved()['copied']") == 0


def test_no_more_is_kept_than_is_allowed_and_what_is_kept_is_given_back(stage: Stage) -> None:
    program = stage.program(SETUP, PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    allow(peer, keep_bytes=20 * MIB, clean=True)
    peer.gate(open=False)
    eventually(lambda: peer.state["kept_bytes"] > 0)
    for action in ("page-out", "page-in"):
        assert peer.do(action)["outcome"] == "moved"
    assert 0 < peer.state["kept_bytes"] <= 20 * MIB
    allow(peer, keep_bytes=-1, clean=True)  # there is more room again
    eventually(lambda: peer.state["kept_bytes"] == 40 * MIB)
    allow(peer, arena_bytes=0, keep_bytes=0)
    eventually(lambda: peer.state["kept_bytes"] == peer.state["arena_bytes"] == 0)
    assert peer.do("page-out")["outcome"] == "moved", "takes what it needs all the same"
    assert peer.state["arena_bytes"] >= 40 * MIB
    assert peer.do("page-in")["outcome"] == "moved"
    eventually(lambda: peer.state["arena_bytes"] == 0)
    peer.gate(open=True)
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
    allow(peer, arena_bytes=0, keep_bytes=0)
    program.do("from owner_calls import *; a = make(40 * MIB, 1); until_hashing()")
    assert program.get("arena()['pinned']") == 0
    peer.drop()
    stage.daemon.peer(2)
    eventually(lambda: program.get("arena()['pinned']") >= 40 * MIB)
