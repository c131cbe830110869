"""A notebook's memory that PyTorch has free in its cache is not copied when it is paged out. In
place of PyTorch, which needs a genuine GPU: its allocator over plain driver calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from gpu_cells import CPU
from notebooks import Notebook, assert_books_agree
from pagers import IN_PROCESS, PagerUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]

STANDIN = Path(__file__).parents[1] / "support" / "standin_torch"
MIB = 1 << 20

USES_TORCH = """
import ctypes, random, torch
def not_copied():
    books = (ctypes.c_uint64 * 5)()
    ctypes.CDLL(None).kiwi_preload_test_move_books(books)
    return books[4]
data = random.Random(1).randbytes(9 << 20)
kept, junk = torch.empty(9 << 20), torch.empty(120 << 20)
kept.fill(data); junk.fill(data)
"""


@pytest.fixture(scope="module")
def pager() -> PagerUnderTest:
    return IN_PROCESS


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Iterator[Daemon]:
    daemon = make_daemon("1x256MiB", "--tq", "600")
    yield daemon
    daemon.stop()
    unharmed(daemon)


@pytest.fixture
def notebook(daemon: Daemon, make_notebook: Callable[..., Notebook]) -> Notebook:
    a = make_notebook(daemon, "A", PYTHONPATH=str(STANDIN), KIWI_VERIFY="1")
    a.check(USES_TORCH)
    return a


def test_free_memory_is_not_copied(
    daemon: Daemon, notebook: Notebook, make_notebook: Callable[..., Notebook]
) -> None:
    a = notebook
    a.check("junk.free()")
    b = make_notebook(daemon, "B", mib=200)
    a.wait_state("paged-out")
    right, first = a.check("print(kept.read() == data, not_copied())").text.split()
    assert right == "True"
    assert int(first) >= 100 * MIB  # or as much as had to go out
    # it is used again, so it is copied
    a.check("again = torch.empty(120 << 20); again.fill(data)")
    b.assert_intact()
    a.wait_state("paged-out")
    seen = a.check("print(kept.read() == data, again.read()[: len(data)] == data, not_copied())")
    *right, second = seen.text.split()
    assert right == ["True", "True"]
    assert int(second) <= int(first) + 10 * MIB  # what is left of the segment of `kept`
    b.assert_intact()
    assert_books_agree(daemon)


def test_only_cells_with_the_gpu_look(notebook: Notebook) -> None:
    looks = int(notebook.check("print(torch.looks)").text)
    assert looks > 0
    for _ in range(3):
        notebook.check(CPU)
    assert int(notebook.check("print(torch.looks)").text) <= looks + 1  # that of the first cell
    notebook.check("%kiwi off")
    looks = int(notebook.check("print(torch.looks)").text)
    assert int(notebook.check("print(torch.looks)").text) == looks
