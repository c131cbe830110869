"""Tests of a driver that fails, hangs or has no room: notebooks and ``kiwi status`` say so in plain
words, nothing is lost needlessly, and the others continue.

The GPU has 128 MiB. Two notebooks of 72 MiB (and a context each) do not fit together; one of 8 MiB
fits beside each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gpu_cells
import pytest
from checks import unharmed
from cuda_processes import Worker
from daemon import wait_until
from notebooks import assert_books_agree

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from cli_process import Result
    from daemon import Daemon
    from kernels import Cell
    from notebooks import Notebook

pytestmark = pytest.mark.e2e

GPU = "1x128MiB"
MIB = 1 << 20

SPIN = """
module = check(cuda.cuModuleLoadData(b"kiwi-emulated-module\\0"))
spin = check(cuda.cuModuleGetFunction(module, b"spin_ns"))
import ctypes
def long_kernel(seconds, begun=None):
    arguments = ((int(seconds * 1e9),), (ctypes.c_uint64,))
    check(cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
    if begun:  # the GPU is at it: from here on a lock has to wait
        open(begun, "w").close()
    check(cuda.cuCtxSynchronize())
"""
FREE = "check(cuda.cuMemFree(memory.address))"


@pytest.fixture
def start(make_daemon: Callable[..., Daemon]) -> Iterator[Callable[..., Daemon]]:
    """Start daemons, and check at the end that they logged no error of their own."""
    made = []

    def make(*args: str) -> Daemon:
        made.append(make_daemon(GPU, *args))
        return made[-1]

    yield make
    for daemon in made:
        daemon.stop()
        unharmed(daemon)


@pytest.fixture
def kiwi_status(kiwi: Callable[..., Result]) -> Callable[[Daemon], str]:
    """Return the text of ``kiwi status``."""

    def look(daemon: Daemon) -> str:
        result = kiwi(daemon, "status")
        assert result.code == 0, result.err
        return result.out

    return look


def waits_with(notebook: Notebook, cell: Cell, words: str) -> None:
    """Wait until the line below the waiting cell says ``words``."""
    notebook.kernel.until(
        lambda: any(words in text for text in cell.displays()), f"{notebook.name} reads {words!r}"
    )


def has_problem(daemon: Daemon, notebook: Notebook, problem: str, words: str = "") -> None:
    def has_it() -> bool:
        told = notebook.session
        return told.problem == problem and words in told.problem_text

    daemon.wait_for(lambda _: has_it(), f"{notebook.name} has {problem!r} and is told {words!r}")


def goes_on(notebook: Notebook) -> None:
    """Check that a short GPU cell succeeds."""
    notebook.finish(notebook.work(steps=2))


@pytest.mark.usefixtures("pager")
def test_a_lock_that_times_out(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    """A very long GPU kernel causes the first one; if the driver moves memory, a fault the
    second."""
    daemon = start("--tq", "0.3", "--lock-timeout", "0.5")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=72)
    a.check(SPIN)
    stop, begun = daemon.directory / "stop", daemon.directory / "begun"
    a_cell = a.start(f"long_kernel(6, {str(begun)!r})\n{gpu_cells.work(until=stop)}")
    # before its kernel has started, A can be stopped like any other
    wait_until(begun.exists, "A's long kernel")
    b_cell = b.work(steps=5)
    has_problem(daemon, a, "page-out-refused")
    waits_with(b, b_cell, "the GPU memory of another notebook cannot be moved out at the moment")
    said = (
        "A.ipynb",
        "could not be moved out, so others wait longer (lock-timeout",
        "Waiting because the GPU memory of another notebook cannot be moved out",
    )
    # each new try is shown as a page-out under way, not as the problem
    wait_until(lambda: _all_in(said, kiwi_status(daemon)), "a status between two tries")
    assert not b.kernel.finished(b_cell)
    b.finish(b_cell)
    stop.touch()
    a.finish(a_cell)
    if daemon.pager.driver_moves:
        _the_driver_refuses_once(daemon, a, b)
    a.assert_intact()
    b.assert_intact()
    assert_books_agree(daemon)


def _all_in(texts: tuple[str, ...], whole: str) -> bool:
    return all(text in whole for text in texts)


def _the_driver_refuses_once(daemon: Daemon, a: Notebook, b: Notebook) -> None:
    stop = daemon.directory / "stop"
    emulator.faults(daemon.state_path).set("lock_timeout", pid=b.pid)
    stop.unlink()
    b_cell = b.work(until=stop)
    b.wait_state("running")
    a_cell = a.work(steps=5)
    has_problem(daemon, b, "page-out-refused")
    a.finish(a_cell)
    assert b.session.problem == "", "it could be moved at the second attempt"
    stop.touch()
    b.finish(b_cell)


@pytest.mark.usefixtures("pager")
def test_programs_outside_kiwi_hold_the_memory(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    stack: ExitStack,
    kiwi_status: Callable[[Daemon], str],
) -> None:
    daemon = start("--tq", "0.3")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=8)
    b.check("%kiwi release")
    daemon.wait_for(lambda _: b.state == "paged-out", "B is out")
    outsider = stack.enter_context(_outsider(daemon))
    outsider.do(f"init(); held = alloc({60 * MIB})")
    daemon.wait_for(lambda status: status.memory.outside_bytes > 60 * MIB, "it is seen")
    b_cell = b.work(steps=5)
    waits_with(b, b_cell, "Waiting because programs outside Kiwi hold GPU memory")
    goes_on(a)
    a.wait_state("idle")  # its turn is over
    status = kiwi_status(daemon)
    assert "held by programs outside Kiwi" in status
    assert "Waiting because programs outside Kiwi hold GPU memory that this program" in status
    assert "start them with `kiwi run`" in status
    outsider.close()
    b.finish(b_cell)
    b.assert_intact()

    # The same while the daemon does not know it: it reads an idle GPU every few seconds only, so
    # its figures are old, and the restore itself is refused.
    b.check("%kiwi release")
    daemon.wait_for(lambda _: b.state == "paged-out", "B is out")
    assert_books_agree(daemon)
    outsider = stack.enter_context(_outsider(daemon))
    outsider.do(f"init(); held = alloc({60 * MIB})")
    b_cell = b.work(steps=5)
    # Asked at once: the next look shows the program outside, and B waits for that then.
    has_problem(daemon, b, "page-in-refused", "no-room: It needs")
    waits_with(b, b_cell, "could not be brought back yet; nothing is lost, and Kiwi tries again")
    goes_on(a)
    outsider.close()
    b.finish(b_cell)
    b.assert_intact()
    assert_books_agree(daemon)


class _outsider(Worker):  # noqa: N801 - used like a function
    """A program that is not a session of Kiwi."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(emulator.environment(daemon.state_path, emulator.build()))

    def __enter__(self) -> _outsider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_driver_calls_that_hang(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    daemon = start("--tq", "0.3", "--lock-timeout", "0.5", "--stuck-after", "0.5")
    faults = emulator.faults(daemon.state_path)
    c = make_notebook(daemon, "C", mib=8)
    for _ in range(3):  # until its needs are known: a newcomer gets half of the GPU, or waits
        goes_on(c)
        c.wait_state("idle")  # each burst ends with a reading of its memory
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=72)
    hangs = "A driver call that moves the GPU memory of this program hangs; the others go on"

    # A is idle and has to go out for B, but its page-out hangs.
    faults.set("hang", pid=a.pid, operation="checkpoint")
    b_cell = b.work(steps=5)
    has_problem(daemon, a, "stuck")
    waits_with(b, b_cell, "a driver call on another session hangs")
    status = kiwi_status(daemon)
    assert hangs in status
    assert "Waiting because the GPU memory of another notebook cannot be moved out" in status
    goes_on(c)
    assert not b.kernel.finished(b_cell)
    faults.clear("hang")
    b.finish(b_cell)
    has_problem(daemon, a, "")

    # A is to come back, but its page-in hangs.
    assert a.state == "paged-out"
    faults.set("hang", pid=a.pid, operation="restore")
    a_cell = a.work(steps=5)
    has_problem(daemon, a, "stuck")
    waits_with(a, a_cell, hangs)
    assert hangs in kiwi_status(daemon)
    goes_on(c)
    shown = c.check("%kiwi status").result
    assert shown is not None
    assert hangs in shown, "who waits, and why"
    faults.clear("hang")
    a.finish(a_cell)
    has_problem(daemon, a, "")
    for notebook in (a, b, c):
        notebook.assert_intact()
    assert_books_agree(daemon)


CHILD = """
import subprocess, sys
source = '''
import sys
{prelude}
memory = Memory({mib}, 5)
print("ready", flush=True)
for line in sys.stdin:
    print("INTACT" if memory.intact() else "DAMAGED", flush=True)
'''
child = subprocess.Popen(
    [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
print(child.pid)
"""
ASK_CHILD = "child.stdin.write('\\n'); child.stdin.flush(); print(child.stdout.readline(), end='')"


def test_a_page_out_that_fails_half_way(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    """A kernel and its child: one is already out when the other cannot go. Both come back, and the
    next attempt moves both."""
    daemon = start("--tq", "0.3")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=40)
    child_pid = int(a.check("%%kiwi gpu\n" + CHILD.format(prelude=gpu_cells.PRELUDE, mib=24)).text)
    daemon.wait_for(lambda _: a.session.resident_bytes > 66 * MIB, "both processes are counted")
    faults = emulator.faults(daemon.state_path)
    for pid in (child_pid, a.pid):
        faults.set("checkpoint_fail", pid=pid)
        b_cell = b.work(steps=5)
        has_problem(daemon, a, "page-out-refused")
        assert "could not be moved out, so others wait longer (driver" in kiwi_status(daemon)
        b.finish(b_cell)
        assert faults.hits("checkpoint_fail") == 1
        faults.clear()
        assert a.check("%%kiwi gpu\n" + ASK_CHILD).text == "INTACT\n"
        a.assert_intact()
    b.assert_intact()
    assert_books_agree(daemon)
    a.check("child.stdin.close(); child.wait(); child.stdout.close()")


def test_contents_that_are_lost(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    daemon = start("--tq", "0.3")
    a = make_notebook(daemon, "A", mib=72)
    b = make_notebook(daemon, "B", mib=72)
    assert a.state == "paged-out"
    emulator.faults(daemon.state_path).set("restore_fail", pid=a.pid)
    cell = a.run(gpu_cells.INTACT)
    assert (cell.error, cell.text) == ("GpuMemoryLost", "")
    words = "The contents of this program's GPU memory are lost"
    assert words in cell.stream("stderr")
    assert "Restart this kernel" in cell.traceback
    assert a.state == "lost"
    status = kiwi_status(daemon)
    assert words in status
    assert "restart the kernel" in status
    shown = a.check("%kiwi status").result
    assert shown is not None
    assert words in shown
    assert a.run(gpu_cells.INTACT).error == "GpuMemoryLost", "still lost, and still said"
    assert a.check("%%kiwi cpu\nprint(len(memory.digests))").text == "72\n"
    b.assert_intact()
    a.kernel.restart(now=False)
    a.take(72, seed=7)

    # In mid-cell it is stopped in a driver call that never returns, and still says why.
    stop = daemon.directory / "stop"
    a_cell = a.work(until=stop)
    a.wait_state("running")
    emulator.faults(daemon.state_path).set("restore_fail", pid=a.pid)
    b_cell = b.work(steps=5)
    a.wait_state("lost")
    b.finish(b_cell)
    a.kernel.until(lambda: words in a_cell.stream("stderr"), "A reads that its memory is lost")
    a.kernel.restart(now=False)
    a.take(72, seed=8)
    a.assert_intact()
    b.assert_intact()
    assert_books_agree(daemon)


@pytest.mark.usefixtures("pager")
def test_system_ram_is_full(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    daemon = start("--tq", "0.3", "--host-budget", "90MiB")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=72)
    stop = daemon.directory / "stop"
    a_cell = a.work(until=stop)
    a.wait_state("running")
    b_cell = b.work(steps=5)
    words = "Waiting because system RAM has no room for the GPU memory that would have to be moved"
    waits_with(b, b_cell, words)
    status = kiwi_status(daemon)
    assert words in status
    assert "Restart a notebook that is no longer needed, or free system RAM." in status
    stop.touch()
    a.finish(a_cell)
    shown = a.check("%kiwi status").result
    assert shown is not None
    assert f"B.ipynb, held up: {words}" in shown
    info = b.kernel.ask("kernel_info_request", {}, control=True)["content"]
    # otherwise its shell channel waits
    if "kernel subshells" in info.get("supported_features", []):
        made = b.kernel.ask("create_subshell_request", {}, control=True)["content"]
        shown = b.kernel.check("%kiwi status", subshell=made["subshell_id"]).result
        assert shown is not None
        assert f"Problem        {words}" in shown
    a.assert_intact()
    assert not b.kernel.finished(b_cell)
    a.check(FREE)
    b.finish(b_cell)
    b.assert_intact()
    assert_books_agree(daemon)
