"""How fast the machine copies both ways at once: measured once, while idle, and told."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import Stage
from pager_daemon import eventually

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
SUPPORT = str(Path(__file__).parents[2] / "support")
SETUP = "init(); from owner_calls import *; a = make(40 * MIB, 1)"
RATE = 100 * MIB


@pytest.fixture
def stage() -> Iterator[Stage]:
    """With a GPU that is large enough to be measured."""
    directory = Path(tempfile.mkdtemp(prefix="kiwi-link-"))
    stage = Stage(directory, gpu_mib=4096)
    try:
        stage.daemon.start()
        yield stage
        stage.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_an_idle_program_measures_once_and_tells_each_daemon(stage: Stage) -> None:
    emulator.set_copy_bandwidth(stage.state, RATE)
    program = stage.program(SETUP, PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    peer.say("pager-limits", arena_bytes=-1, keep_bytes=-1, clean=True)
    peer.gate(open=False)
    [said] = peer.await_heard("pager-speeds")
    for way in ("out", "in"):
        assert RATE / 4 < said[f"{way}_bytes_per_s"] < RATE * 1.2, "as fast as its bus is"
    assert said["both_bytes_per_s"] > RATE / 4
    # What it took for that (4 MiB each way) is free again; a context and the hash are not.
    eventually(lambda: stage.used_bytes < peer.state["resident_bytes"] + 8 * MIB)
    peer.drop()
    peer = stage.daemon.peer(2)
    assert peer.await_heard("pager-speeds") == [said], "the same again"
    emulator.set_copy_bandwidth(stage.state, 0)
    peer.gate(open=True)
    program.do("same(a); check()")


def test_a_program_that_works_and_one_that_may_not_measure_nothing(stage: Stage) -> None:
    stage.program(SETUP, PYTHONPATH=SUPPORT)
    peer = stage.daemon.peer()
    peer.gate(open=False)  # cleaning is not allowed
    other = stage.program(SETUP, PYTHONPATH=SUPPORT)
    at_work = stage.daemon.peer(2)
    at_work.say("pager-limits", arena_bytes=-1, keep_bytes=-1, clean=True)
    for _ in range(30):
        other.do("same(a); time.sleep(0.1)")
    assert peer.of("pager-speeds") == at_work.of("pager-speeds") == []
