"""Tests of CPU work while others fill the GPU: it does not wait unless it reaches the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gpu_cells import PRELUDE
from notebooks import finish_all

from kiwi_jupyter.kernel.words import IN_A_CALL
from tests.kernel.sets.data_science import CELLS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MIB = 72
"""Of 128 MiB: two do not fit, and take turns."""


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon("1x128MiB", "--tq", "600")


@pytest.fixture
def enough(daemon: Daemon) -> Path:
    return daemon.directory / "enough"


def states(*notebooks: Notebook) -> list[str]:
    return sorted(one.state for one in notebooks)


def test_two_fill_the_gpu_and_a_third_analyses_data(
    daemon: Daemon, make_notebook: Callable[..., Notebook], enough: Path
) -> None:
    b, a = make_notebook(daemon, "B", mib=MIB), make_notebook(daemon, "A", mib=MIB)
    computing = {one: one.work(until=enough) for one in (a, b)}
    daemon.wait_for(lambda _: states(a, b) == ["running", "waiting"], "one computes, one waits")
    third = make_notebook(daemon, "C")
    for code in CELLS:
        third.check(code)
    session = daemon.session(third.kernel.pid)
    if session is not None:  # the session exists if the cell had to look for a driver
        assert (session.waited_s, session.held_s, session.state.value) == (0.0, 0.0, "idle")
    assert states(a, b) == ["running", "waiting"]
    enough.touch()
    finish_all(computing)


UNFORESEEN = """
import importlib
name = "cuda" + ".bindings.driver"
cuda = importlib.import_module(name)
print("looked")
memory = Memory(8, 3)
print(memory.intact())
"""
HELPERS = PRELUDE.replace("from cuda.bindings import driver as cuda", "").replace(
    "import hashlib, os, random, sys, threading, time",
    "import hashlib, random",
)


@pytest.mark.parametrize("mib", [96, 116], ids=["room for a context", "room for nothing"])
def test_what_nobody_foresaw_waits_at_its_first_call(
    mib: int, daemon: Daemon, make_notebook: Callable[..., Notebook], enough: Path
) -> None:
    a = make_notebook(daemon, "A", mib=mib)
    computing = a.work(until=enough)
    a.wait_state("running")
    third = make_notebook(daemon, "C")
    third.check(HELPERS)
    cell = third.start(UNFORESEEN)
    third.wait_state("waiting")
    third.kernel.until(lambda: "looked" in cell.text, "what comes before the GPU")
    third.kernel.until(lambda: IN_A_CALL in "".join(cell.displays()[-1:]), "it is told")
    assert not third.kernel.finished(cell)
    assert daemon.status().holders == [a.id]
    enough.touch()
    a.finish(computing)
    assert third.finish(cell).text == "looked\nTrue\n"
    third.kernel.until(lambda: not cell.displays()[-1], "the line is gone")
    assert {output["output_type"] for output in cell.outputs()} == {"stream"}
    assert third.session.waited_s > 0
    assert "waits at its first call" in third.check("%kiwi why").text
