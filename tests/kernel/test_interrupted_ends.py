"""Tests of an interrupt at each single place of a cell's end: the GPU is not kept."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from interrupting import CLIENT, each_place

import kiwi_jupyter.kernel
from kiwi_core.client import Client
from kiwi_core.client.requests import Phase
from kiwi_jupyter.kernel.burst import Burst
from kiwi_jupyter.kernel.cell_hook import CellHook, CellRun
from tests.client.scripted_daemon import PATIENCE_S, ScriptedDaemon, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CODE = (CLIENT, kiwi_jupyter.kernel.__path__[0])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    daemon = ScriptedDaemon(tmp_path / "GPU-1.sock")
    daemon.start()
    with Client(daemon.path) as client:
        client.connect()
        yield client
    daemon.stop()
    assert daemon.faults == []


def test_a_cell_that_joins(client: Client) -> None:
    """Whoever was interrupted on its way in leaves, and no lease stays behind."""
    burst = Burst()

    def act() -> None:
        burst.join(client, "a cell")

    for place in each_place(act, CODE):
        burst.leave("a cell")
        assert client._table.phase is Phase.IDLE, place
    burst.leave("a cell")


@pytest.mark.parametrize("grace_s", [0.0, 0.001])
def test_a_cell_that_ends(client: Client, grace_s: float) -> None:
    """At the latest the next cell's beginning, which looks for a cell that was left open, gives the
    GPU up."""
    me = threading.get_ident()
    hook: Any = CellHook.__new__(CellHook)
    hook._lock, hook._running, hook._pid = threading.RLock(), {}, os.getpid()
    hook._session = SimpleNamespace(notices=SimpleNamespace(show=lambda: None))
    hook._burst = Burst(grace_s=grace_s)

    def begin() -> None:
        hook._running[me] = CellRun(me, silent=False)
        hook._burst.join(client, me)
        assert hook._burst.wait(PATIENCE_S)

    begin()
    for place in each_place(lambda: hook._end(me), CODE):
        if me in hook._running:
            hook._end(me)
        assert not hook._burst.is_in(me), place
        eventually(lambda: client._table.phase is Phase.IDLE)
        begin()
