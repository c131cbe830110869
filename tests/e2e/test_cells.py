"""Tests that each kind of cell shows the same while it waits for the GPU as without Kiwi."""

from __future__ import annotations

import copy
import re
import shutil
from typing import TYPE_CHECKING, Any

import gpu_cells
import ledger
import pytest
from kernels import Cell, Kernel, running_kernel
from notebooks import Notebook, assert_books_agree

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from daemon import Daemon

pytestmark = pytest.mark.e2e

MIB = 70

CHILD = """
import hashlib, os, sys, time
from cuda.bindings import driver as cuda
def ok(result):
    assert not result[0], result
    return result[1] if len(result) == 2 else result[1:]
ok(cuda.cuInit(0))
ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))))
data, back = os.urandom(8 << 20), bytearray(8 << 20)
address = ok(cuda.cuMemAlloc(len(data)))
ok(cuda.cuMemcpyHtoD(address, data, len(data)))
for _ in range(20):
    ok(cuda.cuMemcpyDtoH(back, address, len(back)))
    assert back == data
    time.sleep(0.02)
print("the child's bytes are right")
"""

ASYNC_TASK = """
go_on = asyncio.Event()

async def later():
    for n in range(30):
        memory.step()
        await asyncio.sleep(0.02)
    await go_on.wait()  # it prints in the next cell, however late that comes
    print("task done")
    return memory.right(5)

task = asyncio.create_task(later())
"""

THREAD = """
found = []

def in_background():
    check(cuda.cuCtxSetCurrent(memory.context))
    memory.work(steps=100)
    found.append(memory.right(6))

thread = threading.Thread(target=in_background)
thread.start()
"""

GENERATOR = """
def pieces():
    for n in range(3):
        yield memory.right(n)

list(pieces())
"""

CELLS = [
    "%%time\nmemory.right(3)",
    "%%timeit -n 2 -r 2\nmemory.right(3)",
    "%%capture captured\nprint(memory.right(3))",
    "captured.stdout",
    "import asyncio\nprint('first')\nawait asyncio.sleep(0.01)\nmemory.right(4)",
    "%run -i script.py",
    "!{sys.executable} child.py",
    ASYNC_TASK,
    "go_on.set()\nawait task",
    THREAD,
    "thread.join()\nfound",
    "memory.step()\n1 / 0",
    "memory.step()\nsys.exit('enough')",
    "answer = input('how many? ')\nmemory.work(steps=int(answer))\nprint(memory.right(7))",
    "result = get_ipython().run_cell('memory.right(8)')\nresult.success",
    GENERATOR,
    "with open('x.txt', 'w') as file:\n    print(memory.right(9), file=file)\nopen('x.txt').read()",
]


@pytest.mark.usefixtures("pager")
@pytest.mark.timeout(240)
def test_cells_in_contention_do_what_they_do_without_kiwi(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    private_tmp: Path,
    stack: ExitStack,
) -> None:
    plain = _plain_kernel(private_tmp, stack)
    expected = [_run(plain, code) for code in CELLS]
    daemon = make_daemon("1x128MiB", "--tq", "0.2")
    other = make_notebook(daemon, "other", mib=75)
    notebook = make_notebook(daemon, "B", mib=MIB)
    _files(notebook.kernel)
    enough = daemon.directory / "enough"
    loop = other.work(until=enough)
    cells = [_run(notebook.kernel, code) for code in CELLS]
    # only now, because some print after their end
    for cell, without in zip(cells, expected, strict=True):
        assert _comparable(cell) == _comparable(without), cell.code
    _subshells(notebook)
    enough.touch()
    other.finish(loop)
    notebook.wait_state("idle", "paged-out")  # no thread or task counts as left over
    for one in (other, notebook):
        one.assert_intact()
    assert_books_agree(daemon)
    read = ledger.read(daemon.journal())
    assert read.overlaps() == []
    waits = [wait for wait in read.waits if wait.session == notebook.id and wait.ahead]
    assert len(waits) >= len(CELLS) // 3, (
        "there was hardly any contention"
    )  # a turn has several cells


def _plain_kernel(private_tmp: Path, stack: ExitStack) -> Kernel:
    """Start a kernel without Kiwi, on its own emulated GPU."""
    state = private_tmp / "plain"
    stack.callback(lambda: [_remove(path) for path in private_tmp.glob("plain*")])
    emulator.create_state(state, emulator.parse_gpus("128MiB"))
    env = emulator.environment(state, emulator.build()) | {"KIWI_DISABLE": "1"}
    kernel = stack.enter_context(running_kernel(env))
    kernel.check(gpu_cells.PRELUDE)
    kernel.check(gpu_cells.take(MIB, ord("B")))
    _files(kernel)
    return kernel


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _files(kernel: Kernel) -> None:
    (kernel.directory / "child.py").write_text(CHILD)
    (kernel.directory / "script.py").write_text("memory.step()\nprint('script', memory.right(1))\n")


def _run(kernel: Kernel, code: str) -> Cell:
    """Run the cell, and answer ``100`` if it asks for input."""
    cell = kernel.send(code, allow_stdin=True)
    kernel.until(lambda: cell.done or cell.of_type("input_request"), code)
    if cell.of_type("input_request"):
        kernel.client.input("100")
    return kernel.finish(cell)


_NUMBERS = re.compile(r"\d[\d.,]*(e[+-]\d+)?( ?(ns|us|µs|μs|ms|s|min|loops?)\b)?")
_PLACES = re.compile(r"(/[\w.+-]+)+")


def _comparable(cell: Cell) -> list[Any]:
    """Return what would be saved, without times and paths."""
    assert cell.reply is not None
    outputs = copy.deepcopy(cell.outputs())
    for output in outputs:
        for where in ("text", "evalue"):
            if where in output:
                output[where] = _without_times(output[where])
        if "traceback" in output:
            output["traceback"] = [_PLACES.sub("PLACE", line) for line in output["traceback"]]
        if "data" in output and "per loop" in output["data"].get("text/plain", ""):
            output["data"] = "timed"
    return [cell.status, cell.error, *outputs]


def _without_times(text: str) -> str:
    if "time" not in text and "per loop" not in text:
        return text
    lines = (line for line in text.splitlines() if not line.startswith("The slowest run"))
    return "\n".join(_NUMBERS.sub("N", line) for line in lines)


def _subshells(notebook: Notebook) -> None:
    """Two cells of one kernel run at the same time with one lease, and both finish."""
    kernel = notebook.kernel
    subshell = notebook.subshell()
    if subshell is None:
        return
    set_up = "check(cuda.cuCtxSetCurrent(memory.context))"
    ask = f"{set_up}\ntotal = check(cuda.cuMemGetInfo())[1]"
    # Compare no results of last expressions: IPython itself may lose one of two cells'.
    side = kernel.send(ask, subshell=subshell)
    main = kernel.send("right = memory.right(2)")
    for cell in (main, side):
        kernel.finish(cell)
        assert cell.status == "ok", cell.traceback
    assert kernel.check("right, total >> 20").result == "(True, 128)"
