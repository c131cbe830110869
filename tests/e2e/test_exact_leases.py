"""Tests that, with the in-process pager, the first call that needs the GPU asks for it.

A call that nobody foresees waits at the gate, in C, and is served like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ledger
import leftovers
import pytest
from daemon import wait_until
from gpu_cells import CPU, CPU_PRINTS, PRELUDE
from notebooks import assert_books_agree
from pagers import CHECKPOINTED, DEFAULT, PagerUnderTest
from two_notebooks import SIZE_MIB, Arena, TwoNotebooks

from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]


@pytest.fixture(scope="module")
def pager() -> PagerUnderTest:
    return DEFAULT


private_tmp = leftovers.module_tmp


@pytest.fixture(scope="module")
def arena(pager: PagerUnderTest) -> Iterator[Arena]:
    """Lend a pair of notebooks whose quanta never end; at the end no error is in the log."""
    arena = Arena(pager, tq_s=600)
    try:
        yield arena
        with arena as pair:
            assert ledger.read(pair.daemon.journal()).overlaps() == []
        arena.check()
    finally:
        arena.close()


@pytest.fixture
def pair(arena: Arena) -> Iterator[TwoNotebooks]:
    """Lend the notebooks: A is idle, B is out."""
    with arena as pair:
        pair.a.assert_intact()
        pair.b.wait_state("paged-out")
        yield pair
        assert_books_agree(pair.daemon)


THREAD = """
def later(go, done):
    check(cuda.cuCtxSetCurrent(memory.context))
    while not os.path.exists(go):
        time.sleep(0.01)
    right = memory.intact()
    with open(done + ".part", "w") as file:
        file.write(str(right))
    os.rename(done + ".part", done)
"""


def test_a_thread_that_was_started_earlier(pair: TwoNotebooks) -> None:
    """It outlives its cell, does nothing for long, and then needs the GPU: idle A makes room for
    it."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    go, done = daemon.directory / "go", daemon.directory / "done"
    b.check(THREAD)
    b.check(
        f"threading.Thread(target=later, args=({str(go)!r}, {str(done)!r}), daemon=True).start()"
    )
    b.wait_state("idle")  # its burst ended after the GPU had been idle for it
    a.assert_intact()
    b.wait_state("paged-out")
    go.touch()
    wait_until(done.exists, "the thread has read its memory", 60.0)
    assert done.read_text() == "True"
    b.wait_state("idle")  # the thread's burst ends by itself, too
    for notebook in (a, b):
        notebook.assert_intact()


UNSEEN = """
import ctypes
driver_itself = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter's lock in each call
def unseen(number):
    source = ctypes.c_uint64(memory.address + number * PIECE)
    data = ctypes.create_string_buffer(PIECE)
    error = driver_itself.cuMemcpyDtoH_v2(data, source, ctypes.c_size_t(PIECE))
    return error == 0 and hashlib.sha1(data.raw).digest() == memory.digests[number]
"""
CALL = "%%kiwi cpu\nprint(unseen(3))"
"""The user says that it stays on the CPU, and is wrong."""


def test_a_call_in_a_cell_that_passes_for_cpu(pair: TwoNotebooks) -> None:
    """It waits with the interpreter's lock while A continues, and gets the GPU when A's cell ends.
    A CPU cell requests nothing."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    b.check(UNSEEN)
    enough = daemon.directory / "enough"
    loop = a.work(until=enough)
    a.wait_state("running")
    b.wait_state("paged-out")
    assert b.check(CPU).text == CPU_PRINTS
    assert b.session.state.value == "paged-out"
    cell = b.start(CALL)
    b.wait_state("waiting")
    assert daemon.status().holders == [a.id]
    assert not b.kernel.finished(cell)
    enough.touch()
    a.finish(loop)
    assert b.finish(cell).text == "True\n"
    a.assert_intact()
    b.assert_intact()


WIDGET = """
checked = []
def opened(comm, message):
    comm.on_msg(lambda message: checked.append(memory.intact()))
get_ipython().kernel.comm_manager.register_target("test", opened)
"""


def test_the_callback_of_a_widget(pair: TwoNotebooks) -> None:
    """It waits at the gate, and says so below its widget."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    b.check(WIDGET)
    client = b.kernel.client
    content = {"comm_id": "slider", "target_name": "test", "data": {}}
    client.shell_channel.send(client.session.msg("comm_open", content))
    enough = daemon.directory / "enough of the slider"
    loop = a.work(until=enough)
    a.wait_state("running")
    b.wait_state("paged-out")
    callback = b.kernel.to_widget("slider")
    shown = b.kernel.until(lambda: callback.of_type("comm_msg"), "the line below the widget")
    assert shown[0]["content"]["data"]["widget"] == "slider"
    assert "A.ipynb has it" in shown[0]["content"]["data"]["text"]
    enough.touch()
    a.finish(loop)
    assert b.check("%%kiwi cpu\nprint(checked)").text == "[True]\n"
    assert callback.of_type("comm_msg")[-1]["content"]["data"]["html"] == ""
    b.assert_intact()


CORE = """
from cuda.core import Device
device = Device()
device.set_current()
stream = device.create_stream()
ours = device.allocate(PIECE, stream=stream)
stream.sync()
module = check(cuda.cuModuleLoadData(b"kiwi-emulated-module\\0"))
spin = check(cuda.cuModuleGetFunction(module, b"spin_ns"))
def launch():
    check(cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, ((1000,), (ctypes.c_uint64,)), 0))
"""
AT_THE_GATE = {
    "a call that keeps the interpreter's lock": "print(unseen(3))",
    "an allocation": "check(cuda.cuMemAlloc(PIECE))",
    "a copy": "check(cuda.cuMemsetD8(memory.scratch, 1, PIECE))",
    "a launch": "launch()",
    "an allocation of cuda.core": "device.allocate(PIECE, stream=stream)",
    "a copy of cuda.core": "ours.copy_to(ours, stream=stream)",
    "with an error that the program catches": (
        "try:\n    check(cuda.cuMemAlloc(PIECE))\nexcept RuntimeError:\n    print('caught')"
    ),
}


@pytest.mark.parametrize("what", AT_THE_GATE)
def test_an_interrupt_at_the_gate(pair: TwoNotebooks, what: str) -> None:
    """It ends the wait and the cell. The request is withdrawn, and the context stays usable."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    b.check(f"{UNSEEN}\n{CORE}")
    enough = daemon.directory / f"enough of {what}"
    loop = a.work(until=enough)
    a.wait_state("running")
    b.wait_state("paged-out")
    cell = b.start(f"%%kiwi cpu\n{AT_THE_GATE[what]}")
    b.wait_state("waiting")
    b.kernel.interrupt()
    b.kernel.finish(cell)
    assert cell.error == "KeyboardInterrupt"
    assert not cell.text
    b.wait_state("paged-out")
    assert daemon.status().holders == [a.id]
    assert not a.kernel.finished(loop)
    enough.touch()
    a.finish(loop)
    assert b.check("print(unseen(4)); launch(); stream.sync()").text == "True\n"
    b.assert_intact()
    a.assert_intact()


BESIDE = """
libc, mutex, said = ctypes.CDLL(None), ctypes.create_string_buffer(64), []
ready, go, locked = (threading.Event() for _ in range(3))
def call():
    check(cuda.cuCtxSetCurrent(memory.context))
    ready.set()
    go.wait()
    libc.pthread_mutex_lock(mutex)
    locked.set()
    said.append(cuda.cuMemsetD8(memory.scratch, 1, PIECE)[0].name)
    libc.pthread_mutex_unlock(mutex)
thread = threading.Thread(target=call)
thread.start()
ready.wait()
"""
BEGIN = "go.set(); locked.wait()"


@pytest.mark.parametrize(
    ("waits", "becomes"),
    [
        ("libc.pthread_mutex_lock(mutex)", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ("time.sleep(600)", "CUDA_SUCCESS"),
    ],
    ids=["in C, for the thread", "in Python"],
)
def test_an_interrupt_while_a_thread_waits_at_the_gate(
    pair: TwoNotebooks, waits: str, becomes: str
) -> None:
    """The thread's call is refused if the cell cannot end without it, and only then."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    b.check(f"{UNSEEN}\n{BESIDE}")
    enough = daemon.directory / f"enough of {becomes}"
    loop = a.work(until=enough)
    a.wait_state("running")
    b.wait_state("paged-out")
    cell = b.start(f"%%kiwi cpu\n{BEGIN}\n{waits}")
    b.wait_state("waiting")
    b.kernel.interrupt()
    assert b.kernel.finish(cell).error == "KeyboardInterrupt"
    assert not a.kernel.finished(loop)
    enough.touch()
    a.finish(loop)
    assert b.check("thread.join(); print(said)").text == f"['{becomes}']\n"
    b.assert_intact()


LONG = """
module = check(cuda.cuModuleLoadData(b"kiwi-emulated-module\\0"))
spin = check(cuda.cuModuleGetFunction(module, b"spin_ns"))
import ctypes
def long_operation(seconds, begun):
    arguments = ((int(seconds * 1e9),), (ctypes.c_uint64,))
    check(cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
    open(begun, "w").close()
    check(cuda.cuCtxSynchronize())
"""


def test_an_interrupt_in_a_long_operation(pair: TwoNotebooks) -> None:
    """B waits meanwhile, and gets the GPU once the operation has ended with KeyboardInterrupt."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    a.check(LONG)
    begun = daemon.directory / "begun"
    long = a.start(f"long_operation(2, {str(begun)!r})\ntime.sleep(600)")
    wait_until(begun.exists, "the operation")
    waits = b.start("print(memory.intact())")
    b.wait_state("waiting")
    a.kernel.interrupt()
    assert a.kernel.finish(long).error == "KeyboardInterrupt"
    assert b.finish(waits).text == "True\n"
    a.assert_intact()
    assert a.check("long_operation(0.01, os.devnull); print('again')").text == "again\n"


BARE_CHILD = f"""
import subprocess
source = '''
import sys
{PRELUDE}
memory = Memory(16, 5)
print("ready", flush=True)
for line in sys.stdin:
    print("INTACT" if memory.intact() else "DAMAGED", flush=True)
'''
bare = {{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}}
child = subprocess.Popen([sys.executable, "-c", source], env=bare, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert child.stdout.readline() == "ready\\n"
print(child.pid)
"""
ASK_CHILD = "child.stdin.write('\\n'); child.stdin.flush(); print(child.stdout.readline(), end='')"


def test_a_child_without_the_library(pair: TwoNotebooks) -> None:
    """The library moves the kernel's memory and the driver moves the child's: both or neither."""
    a, b, daemon = pair.a, pair.b, pair.daemon
    b.check(f"check(cuda.cuMemFree(memory.address))\nmemory = Memory({SIZE_MIB - 24}, 9)")
    pid = int(b.check("%%kiwi gpu\n" + BARE_CHILD).text)
    for _ in range(2):
        daemon.wait_for(lambda _: b.session.pager is MovedBy.BOTH, "both move B")
        a.assert_intact()
        daemon.wait_for(lambda _: b.session.state.value == "paged-out" and b.is_out(), "B is out")
        child = daemon.books().process(pid)
        assert child is not None
        assert child.state == CHECKPOINTED
        assert b.check("%%kiwi gpu\n" + ASK_CHILD).text == "INTACT\n"
        b.assert_intact()
    b.check("child.stdin.close(); child.wait(); child.stdout.close()")
    daemon.wait_for(lambda _: b.session.pager is MovedBy.INPROCESS, "the library alone moves B")
    b.check("check(cuda.cuMemFree(memory.address))")
    b.take(SIZE_MIB, seed=6)
