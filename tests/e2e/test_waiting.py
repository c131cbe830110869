"""Tests of a notebook that waits while another one has the GPU: interrupts, and what it shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import ledger
import pytest
from gpu_cells import CPU, CPU_PRINTS
from notebooks import Notebook, assert_books_agree
from pagers import CONTEXT_BYTES, LEFT_BYTES, RUNNING, told_of_context

from kiwi_jupyter.kernel.display import marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from daemon import Daemon
    from kernels import Cell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]

CONTEXT_MIB = told_of_context(CONTEXT_BYTES) >> 20
LONG_TQ = ("--tq", "600")


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon("1x128MiB", *LONG_TQ)


@pytest.fixture
def enough(daemon: Daemon) -> Path:
    """Return the file that ends A's loop."""
    return daemon.directory / "enough"


@pytest.fixture
def pair(
    daemon: Daemon, enough: Path, make_notebook: Callable[..., Notebook]
) -> Iterator[tuple[Notebook, Notebook]]:
    """Both notebooks hold 60 %; A computes until ``enough`` without harm; B is paged out."""
    a, b = make_notebook(daemon, "A"), make_notebook(daemon, "B")
    a.take(76, 1)
    b.take(76, 2)
    loop = a.work(until=enough)
    a.wait_state("running")
    yield a, b
    enough.touch()
    a.finish(loop)
    for notebook in (a, b):
        notebook.assert_intact()
    assert_books_agree(daemon)
    assert ledger.read(daemon.journal()).overlaps() == []


ASYNC_CELL = """
import asyncio
print("before")
await asyncio.sleep(0)
memory.step()
print("after")
"""


def test_interrupt_while_waiting(
    daemon: Daemon, enough: Path, pair: tuple[Notebook, Notebook]
) -> None:
    """■ in a waiting cell raises KeyboardInterrupt, frees its place, and leaves the kernel healthy,
    in plain cells, with top-level await, and in magics that contain the GPU code."""
    a, b = pair
    b.check("import asyncio")
    for code in ("memory.step()", ASYNC_CELL, "%%time\nmemory.step()", "%%capture\nmemory.step()"):
        cell = b.start(code)
        b.wait_state("waiting")
        b.kernel.until(lambda cell=cell: any(cell.displays()), "it says that it waits")  # type: ignore[misc]
        b.kernel.interrupt()
        b.kernel.finish(cell)
        assert (cell.status, cell.error) == ("error", "KeyboardInterrupt"), code
        assert "interrupted while waiting for the GPU" in cell.traceback
        assert "after" not in cell.text
        assert not any(cell.displays()[-1:]), "the waiting line is gone"
        status = daemon.wait_for(lambda s: not s.queue and s, "its place is free")
        assert status.holders == [a.id]
        assert b.check(CPU).text == CPU_PRINTS
        assert b.session.state == "paged-out"
    cell = b.start("memory.step()\nprint('now')")
    b.wait_state("waiting")
    enough.touch()
    assert b.finish(cell).text == "now\n"


def test_what_kiwi_says_in_each_state(
    daemon: Daemon, enough: Path, make_notebook: Callable[..., Notebook]
) -> None:
    """``%kiwi status`` as text and HTML, from before the first GPU cell to ``%kiwi off``, and each
    other subcommand."""
    a, b = make_notebook(daemon, "A"), make_notebook(daemon, "B")
    assert "has not used the GPU under Kiwi yet" in _status(b)["This notebook"]
    assert "%kiwi release" in b.check("%kiwi help").text
    a.take(76, 1)
    b.take(76, 2)
    b.wait_state("idle")
    own = _status(b)
    size_mib = daemon.pager.mib(77) + CONTEXT_MIB
    # If the context may stay in the GPU, it goes out too once there is too little room for others.
    out = f"({size_mib}|{size_mib - CONTEXT_MIB})" if daemon.pager.leaves_context else f"{size_mib}"
    out += r"(\.\d)?"  # with a stream of the library
    left = rf"(0 B|{CONTEXT_MIB}(\.\d+)? MiB)" if daemon.pager.leaves_context else "0 B"
    some = r"(\.\d)?"  # a stream of the library
    assert re.match(rf"idle, {size_mib}{some} MiB in the GPU", own["This notebook"]), own
    own_pager = "moved by Kiwi's own pager" in own["This notebook"]
    assert own_pager == daemon.pager.leaves_context, own
    assert own["GPU"].startswith("EMULATED GPU, no real one"), own
    assert own["Has the GPU"] == "nobody"
    assert re.search(rf": {out} MiB out in", own["Swap"]), own
    assert own["Swap"].startswith(("A.ipynb: ", "this notebook: ")), own
    loop = a.work(until=enough)
    a.wait_state("running")
    now = _status(b)
    assert re.match(f"paged out, {left} in the GPU, {out} MiB in", now["This notebook"]), now
    assert now["Has the GPU"] == "A.ipynb"
    assert re.search(rf"\b{out} MiB paged out", now["Memory"]), now
    _why(b)
    _status_while_waiting(a, b)
    enough.touch()
    a.finish(loop)
    _release(daemon, a)
    _off_and_on(daemon, a, b)
    b.assert_intact()
    a.assert_intact()
    assert_books_agree(daemon)


def _status(notebook: Notebook, code: str = "%kiwi status") -> dict[str, str]:
    """Return the rows of ``%kiwi status``, the last of each name; text and HTML agree."""
    cell = notebook.check(code)
    data = cell.of_type("execute_result")[-1]["content"]["data"]
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in data["text/plain"].splitlines())
    for text in rows.values():
        assert marked(text) in data["text/html"]
    # The library has a few KiB of its own code in the GPU.
    return {name: text.replace(".0 MiB", " MiB") for name, text in rows.items()}


def _why(b: Notebook) -> None:
    b.check(CPU)
    assert b.check("%kiwi why").text.startswith("The last cell runs at once: ")
    said = b.check("%kiwi why memory.step()").text
    assert said.startswith("`memory.step()` takes its turn before it runs: "), said
    assert "Did you mean `%kiwi status`?" in b.check("%kiwi statsu").text


def _status_while_waiting(a: Notebook, b: Notebook) -> None:
    """B's main thread waits, so the test asks through a subshell."""
    shell = b.subshell()
    if shell is None:
        return
    cell = b.start("memory.step()")
    b.wait_state("waiting")
    seen: Cell = b.kernel.run("%kiwi status", subshell=shell)
    assert seen.status == "ok", seen.traceback
    text = seen.result or ""
    assert re.search(r"^This notebook +waiting, ", text, re.MULTILINE), text
    assert re.search(r"^Wait +1st in line", text, re.MULTILINE), text
    assert re.search(r"^Has the GPU +A\.ipynb$", text, re.MULTILINE), text
    assert re.search(r"^1st +this notebook", text, re.MULTILINE), text
    assert not cell.done
    b.kernel.interrupt()
    b.kernel.finish(cell)


def _release(daemon: Daemon, a: Notebook) -> None:
    """``%kiwi release``: the memory goes out now, and comes back with the next GPU cell."""
    a.wait_state("idle")
    assert "is being moved out" in a.check("%kiwi release").text
    a.wait_state("paged-out")
    assert a.is_out()
    contexts = 2 * CONTEXT_BYTES if daemon.pager.leaves_context else 0  # of A and B
    assert daemon.books().gpus[0].used_bytes <= contexts + 2 * LEFT_BYTES
    a.assert_intact()


def _off_and_on(daemon: Daemon, a: Notebook, b: Notebook) -> None:
    """``%kiwi off`` on a paged-out notebook brings its memory back, and its cells no longer wait.
    After ``%kiwi on`` it is back in line."""
    b.check("memory.step()")
    a.wait_state("paged-out")
    assert "Kiwi is off" in a.check("%kiwi off").text
    assert daemon.session(a.pid) is None
    assert "off in this kernel" in _status(a)["Kiwi"]
    process = daemon.books().process(a.pid)
    assert process is not None
    assert (process.state, process.device_bytes[0] >> 20) == (RUNNING, daemon.pager.mib(77))
    a.check("memory.step()")
    assert daemon.session(a.pid) is None, "off is off"
    assert "Kiwi is on" in a.check("%kiwi on").text
    a.check("memory.step()")
    a.wait_state("idle")
