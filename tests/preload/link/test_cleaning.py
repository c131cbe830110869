"""KIWI_PRELOAD_CLEAN=1: what is idle without a lease is copied beforehand, and stays in the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pager_daemon import eventually

if TYPE_CHECKING:
    from conftest import Stage

MIB = 1 << 20
SUPPORT = str(Path(__file__).parents[2] / "support")
SETUP = "init(); from owner_calls import *; a = make(40 * MIB, 1); until_hashing()"


def test_an_idle_program_is_cleaned_and_its_way_out_copies_nothing(stage: Stage) -> None:
    program = stage.program(SETUP, PYTHONPATH=SUPPORT, KIWI_PRELOAD_CLEAN="1")
    peer = stage.daemon.peer()
    assert peer.state["kept_bytes"] == 0
    peer.gate(open=False)
    eventually(lambda: peer.state["kept_bytes"] == 40 * MIB)
    assert peer.state["resident_bytes"] == 40 * MIB
    peer.gate(open=True)
    program.do("same(a); write(a, 2, 6 * MIB, 5)")
    copied = program.get("moved()['copied']")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("moved()['copied']") == copied + 2 * MIB
    program.do("same(a); check()")


def test_it_is_only_done_where_it_was_asked_for(stage: Stage) -> None:
    eager = stage.program(SETUP, PYTHONPATH=SUPPORT, KIWI_PRELOAD_CLEAN="1")
    plain = stage.program(SETUP, PYTHONPATH=SUPPORT)
    for number in (1, 2):
        stage.daemon.peer(number).gate(open=False)
    eventually(lambda: eager.get("moved()['copied']") == 40 * MIB)
    assert plain.get("moved()['copied']") == 0
