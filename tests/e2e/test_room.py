"""Tests of programs that grow while they compute with the in-process pager.

An allocation that finds no memory waits for it, and fails only if it exceeds the whole GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from daemon import wait_until
from gpu_cells import PRELUDE
from notebooks import Notebook, assert_books_agree, finish_all
from pagers import DEFAULT, PagerUnderTest

from kiwi_core.sched import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]

MIB = 1 << 20
GPU_MIB = 256
LARGE_MIB = GPU_MIB * 7 // 10
SMALL_MIB = GPU_MIB // 10
STEP_MIB = 4

GROW = """
grown = []
def grow(to_mib, step_mib, begun, go):
    '''In small steps, each of them filled; ``begun`` appears before, and it waits for ``go``.'''
    open(begun, "w").close()
    while not os.path.exists(go):
        memory.step()
        time.sleep(0.02)
    while len(memory.digests) + sum(size for _, size in grown) < to_mib:
        address = int(check(cuda.cuMemAlloc(step_mib * PIECE)))
        check(cuda.cuMemsetD8(address, len(grown) % 251, step_mib * PIECE))
        grown.append((address, step_mib))

def grown_right():
    for number, (address, size_mib) in enumerate(grown):
        for piece in range(size_mib):
            check(cuda.cuMemcpyDtoH(memory.buffer, address + piece * PIECE, PIECE))
            if memory.buffer.count(number % 251) != PIECE:
                return False
    return memory.intact()
"""


@pytest.fixture(scope="module")
def pager() -> PagerUnderTest:
    return DEFAULT


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Start a daemon whose quanta never end during a test."""
    return make_daemon(f"1x{GPU_MIB}MiB", "--tq", "600")


def known_small(notebook: Notebook) -> None:
    """Let a notebook hold a tenth of the GPU and make enough bursts that Kiwi expects no more of
    it."""
    notebook.take(SMALL_MIB, seed=ord(notebook.name))
    notebook.check(GROW)
    for _ in range(4):
        notebook.check("memory.step(write=True)")


def growing(notebook: Notebook, to_mib: int, begun: Path, go: Path) -> str:
    grow = f"grow({to_mib}, {STEP_MIB}, {str(begun)!r}, {str(go)!r})"
    return f"{grow}\nprint('RIGHT' if grown_right() else 'DAMAGED')"


CHILD = f"""{PRELUDE}
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
for _ in range(2):
    print(int(cuda.cuMemAlloc({LARGE_MIB} * PIECE)[0]))
"""
TRAIN = f"""
import subprocess
done = subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True)
print(done.stdout, done.stderr)
"""


def test_a_script_that_finds_no_room_beside_its_notebook_is_told_of_kiwi_run(
    daemon: Daemon, make_notebook: Callable[..., Notebook]
) -> None:
    """It counts as part of the notebook, as ``!python train.py`` does."""
    notebook = make_notebook(daemon, "A", mib=LARGE_MIB)
    said = notebook.check(TRAIN).text
    assert said.startswith("2\n2\n"), "CUDA_ERROR_OUT_OF_MEMORY"
    assert said.count("started by A.ipynb and counts as part of it") == 1
    assert "kiwi run -- COMMAND" in said
    # The notebook's own error says nothing of it.
    error = "print(int(cuda.cuMemAlloc(GPU * PIECE)[0]))".replace("GPU", str(GPU_MIB))
    assert notebook.check(error).outputs() == [
        {"output_type": "stream", "name": "stdout", "text": "2\n"}
    ]


def test_one_grows_beside_an_idle_one_in_a_single_cell(
    daemon: Daemon, make_notebook: Callable[..., Notebook]
) -> None:
    b = make_notebook(daemon, "B")
    known_small(b)
    a = make_notebook(daemon, "A", mib=LARGE_MIB)
    b.check("memory.step()")
    a.assert_intact()
    begun, go = daemon.directory / "begun", daemon.directory / "go"
    cell = b.start(growing(b, GPU_MIB * 9 // 10, begun, go))
    wait_until(begun.exists, "B has the GPU")
    assert a.session.resident_bytes > LARGE_MIB * MIB, "A was moved before there was a need"
    assert a.session.paged_out_bytes == 0
    go.touch()
    assert b.finish(cell).text == "RIGHT\n"
    wanted_bytes = GPU_MIB * 9 // 10 * MIB
    daemon.wait_for(
        lambda _: b.session.resident_bytes >= wanted_bytes, "it is seen how B has grown"
    )
    assert a.session.paged_out_bytes >= LARGE_MIB * MIB
    asked = [entry for entry in daemon.journal() if isinstance(entry.event, ev.RoomWanted)]
    assert asked, "room was made without any allocation having asked for it"
    a.assert_intact()
    assert b.check("print(grown_right())").text == "True\n"
    assert_books_agree(daemon)
    daemon.stop()
    unharmed(daemon)


def test_two_that_compute_and_outgrow_the_gpu_together(
    daemon: Daemon, make_notebook: Callable[..., Notebook]
) -> None:
    """Both compute, and each wants 60 % of the GPU: one waits for the other, and neither fails."""
    pair = [make_notebook(daemon, name) for name in "AB"]
    for notebook in pair:
        known_small(notebook)
    go = daemon.directory / "go"
    cells = {
        notebook: notebook.start(
            growing(notebook, GPU_MIB * 6 // 10, daemon.directory / f"begun-{notebook.name}", go)
        )
        for notebook in pair
    }
    daemon.wait_for(lambda status: len(status.holders) == 2, "both have the GPU")
    go.touch()
    finish_all(cells, 120.0)
    assert [cell.text for cell in cells.values()] == ["RIGHT\n", "RIGHT\n"]
    went_out = [entry for entry in daemon.journal() if isinstance(entry.event, ev.PagedOut)]
    assert went_out, "they did not outgrow the GPU"
    for notebook in pair:
        assert notebook.check("print(grown_right())").text == "True\n"
    assert_books_agree(daemon)
    daemon.stop()
    unharmed(daemon)


def test_what_the_whole_gpu_would_not_hold_is_refused_at_once(
    daemon: Daemon, make_notebook: Callable[..., Notebook]
) -> None:
    """As without Kiwi, the program gets the error, keeps what it has, and continues."""
    a = make_notebook(daemon, "A", mib=SMALL_MIB)
    cell = a.run(f"check(cuda.cuMemAlloc({GPU_MIB + 1} * PIECE))")
    assert cell.error == "RuntimeError"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in cell.traceback
    a.assert_intact()
    assert_books_agree(daemon)
