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

import kiwi_emulator as emulator
from kiwi_core.sched import events as ev
from kiwi_core.states import Reason

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

LONG_WORK = """
import ctypes
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def wait_in_stream(_):
    open(begun, "w").close()  # from here on a lock has to wait
    while not os.path.exists(over):
        time.sleep(0.01)
def long_work():
    work = cuda.CUhostFn(ctypes.cast(wait_in_stream, ctypes.c_void_p).value)
    check(cuda.cuLaunchHostFunc(0, work, 0))
    check(cuda.cuCtxSynchronize())
"""
"""Work in the GPU's queue that begins with the file ``begun`` and lasts until there is ``over``."""
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


def says(daemon: Daemon, kiwi_status: Callable[[Daemon], str], *texts: str) -> None:
    """Wait until one ``kiwi status`` has all ``texts``. A refused page-out is tried repeatedly, and
    each try is shown as a page-out under way, not as the problem."""

    def said() -> bool:
        status = kiwi_status(daemon)
        return all(text in status for text in texts)

    wait_until(said, f"a status with {texts}")


def refusals(daemon: Daemon, kind: type[ev.PageOutRefused | ev.PageInRefused]) -> list[Reason]:
    """Return the reasons of the refused operations. The journal has all of them; a status has the
    last one, and only until the next try."""
    events = (entry.event for entry in daemon.journal())
    return [event.reason for event in events if isinstance(event, kind)]


def goes_on(notebook: Notebook) -> None:
    """Check that a short GPU cell succeeds."""
    notebook.finish(notebook.work(steps=2))


@pytest.mark.usefixtures("pager")
def test_a_lock_that_times_out(
    start: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi_status: Callable[[Daemon], str],
) -> None:
    """Work of the GPU that does not end causes it. ``tests/daemon/test_faults.py`` has one that a
    fault of the driver causes."""
    daemon = start("--tq", "0.3", "--lock-timeout", "0.5")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=72)
    stop, begun, over = (daemon.directory / name for name in ("stop", "begun", "over"))
    a.check(f"begun, over = {str(begun)!r}, {str(over)!r}\n{LONG_WORK}")
    a_cell = a.start(f"long_work()\n{gpu_cells.work(until=stop)}")
    # before its work has started, A can be stopped like any other
    wait_until(begun.exists, "A's long work")
    b_cell = b.work(steps=5)
    has_problem(daemon, a, "page-out-refused")
    waits_with(b, b_cell, "the GPU memory of another notebook cannot be moved out at the moment")
    says(
        daemon,
        kiwi_status,
        "A.ipynb",
        "could not be moved out, so others wait longer (draining",
        "Waiting because the GPU memory of another notebook cannot be moved out",
    )
    assert not b.kernel.finished(b_cell)
    over.touch()
    b.finish(b_cell)
    stop.touch()
    a.finish(a_cell)
    a.assert_intact()
    b.assert_intact()
    assert_books_agree(daemon)


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
    daemon.wait_for(lambda status: status.memory.outside_bytes > 60 * MIB, "it is seen")
    b_cell = b.work(steps=5)
    waits_with(b, b_cell, "Waiting because programs outside Kiwi hold GPU memory")
    goes_on(a)
    a.wait_state("idle")  # its turn is over
    says(
        daemon,
        kiwi_status,
        "held by programs outside Kiwi",
        "Waiting because programs outside Kiwi hold GPU memory that this program",
        "start them with `kiwi run`",
    )
    outsider.close()
    b.finish(b_cell)
    b.assert_intact()

    # The same while the daemon does not know it.
    outsider, b_cell = _refused_for_room(daemon, b, stack)
    goes_on(a)
    outsider.close()
    b.finish(b_cell)
    b.assert_intact()
    assert_books_agree(daemon)


def _refused_for_room(daemon: Daemon, b: Notebook, stack: ExitStack) -> tuple[_outsider, Cell]:
    """Let a program outside Kiwi take the room of B, which is out, and B ask for it before the
    daemon knows: its restore is refused, and B is told so until the daemon has seen the program.

    The daemon reads an idle GPU every few seconds only. It may read before B asks, and B waits for
    that program at once; or the words may change before they are read. Then this begins again."""
    words = "could not be brought back yet; nothing is lost, and Kiwi tries again"
    while True:
        b.check("%kiwi release")
        daemon.wait_for(lambda _: b.state == "paged-out", "B is out")
        assert_books_agree(daemon)
        outsider = stack.enter_context(_outsider(daemon))
        refused = len(refusals(daemon, ev.PageInRefused))
        cell, told = b.work(steps=5), set()

        def known() -> bool:
            session = b.session
            told.add((session.problem, "no-room: It needs" in session.problem_text))  # noqa: B023
            return session.problem == "blocked-outside"

        daemon.wait_for(lambda _: known(), "B waits for the program outside")
        waits_with(b, cell, "Waiting because programs outside Kiwi hold GPU memory")
        reasons = refusals(daemon, ev.PageInRefused)[refused:]
        assert set(reasons) <= {Reason.NO_ROOM}
        read = any(words in text for text in cell.displays())
        assert reasons or not read
        if read and ("page-in-refused", True) in told:
            return outsider, cell
        outsider.close()
        b.finish(cell)


class _outsider(Worker):  # noqa: N801 - used like a function
    """A program that is not a session of Kiwi, and holds half of the GPU."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(emulator.environment(daemon.state_path, emulator.build()))
        self.do(f"init(); held = alloc({60 * MIB})")

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
    faults = emulator.Faults(daemon.state_path)
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
    """A kernel and its child: one is already out when the other cannot go. Both come back each
    time, and the first attempt without the fault moves both."""
    daemon = start("--tq", "0.3")
    b = make_notebook(daemon, "B", mib=72)
    a = make_notebook(daemon, "A", mib=40)
    child_pid = int(a.check("%%kiwi gpu\n" + CHILD.format(prelude=gpu_cells.PRELUDE, mib=24)).text)
    daemon.wait_for(lambda _: a.session.resident_bytes > 66 * MIB, "both processes are counted")
    faults = emulator.Faults(daemon.state_path)
    for pid in (child_pid, a.pid):
        before = len(refusals(daemon, ev.PageOutRefused))
        faults.set("checkpoint_fail", pid=pid, count=-1)
        b_cell = b.work(steps=5)
        has_problem(daemon, a, "page-out-refused")
        says(daemon, kiwi_status, "could not be moved out, so others wait longer (driver")
        assert not b.kernel.finished(b_cell)
        faults.clear()
        b.finish(b_cell)
        assert set(refusals(daemon, ev.PageOutRefused)[before:]) == {Reason.DRIVER}
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
    emulator.Faults(daemon.state_path).set("restore_fail", pid=a.pid)
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
    emulator.Faults(daemon.state_path).set("restore_fail", pid=a.pid)
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
