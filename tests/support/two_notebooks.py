"""Two notebooks that do not fit together beside one daemon, brought into any state, repeatedly.

The GPU has 128 MiB; A and B hold 72 MiB and a context each. ``reach`` is about A; B must go on
whatever happens to A.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from daemon import PATIENCE_S, Daemon, running_daemon, wait_until
from kernels import running_kernel
from notebooks import Notebook, assert_books_agree, finish_all

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels import Cell
    from pagers import PagerUnderTest

MIB = 1 << 20
GPU = "1x128MiB"
SIZE_MIB = 72
SLOW = 60 * MIB
"""Bytes per second: a notebook's memory takes 1.3 seconds, long enough to be caught moving."""
VERY_SLOW = 25 * MIB
"""Bytes per second: 3.2 seconds, longer than Jupyter waits for a kernel to shut down by itself."""

STATES = ("waiting", "running", "suspended", "paged-out", "paging-out", "paging-in")
"""States of A, the slow ones last: the scheduler's quanta grow with the swaps it has measured."""

PATIENT = "c.Kiwi.daemon_grace_s = 60.0"
"""Setting with a grace time in which a killed daemon is back, even on a busy machine."""

LOOP = """
while not os.path.exists({stop!r}):
    memory.step(write={write})
    os.utime({beat!r})
    time.sleep(0.02)
print("worked")
"""


class TwoNotebooks:
    def __init__(self, *args: str, pager: PagerUnderTest) -> None:
        self._stack = ExitStack()
        self._working: dict[Notebook, Cell] = {}
        try:
            self.daemon: Daemon = self._stack.enter_context(running_daemon(GPU, *args, pager=pager))
            self.a, self.b = self._notebook("A"), self._notebook("B")
        except BaseException:
            self._stack.close()
            raise

    def _notebook(self, name: str) -> Notebook:
        env = self.daemon.env | {"JPY_SESSION_NAME": f"/home/somebody/{name}.ipynb"}
        kernel = self._stack.enter_context(running_kernel(env, config=PATIENT))
        notebook = Notebook(kernel, self.daemon, name)
        self._file(notebook, "beat").touch()
        notebook.take(SIZE_MIB, seed=ord(name))
        return notebook

    def close(self) -> None:
        self._stack.close()

    def check(self) -> None:
        """Check at the very end that no daemon had an error, and that each journal replays."""
        self.daemon.stop()
        unharmed(self.daemon)

    # --- work

    def _file(self, notebook: Notebook, what: str) -> Path:
        return self.daemon.directory / f"{what}-{notebook.name}"

    def work(self, notebook: Notebook, *, write: bool = True) -> Cell:
        """Start a loop until ``stop``; each step is a beat."""
        stop, beat = self._file(notebook, "stop"), self._file(notebook, "beat")
        stop.unlink(missing_ok=True)
        cell = notebook.start(LOOP.format(stop=str(stop), beat=str(beat), write=write))
        self._working[notebook] = cell
        return cell

    def beat_s(self, notebook: Notebook) -> float:
        """Return when the notebook's loop made its last step (``time.time()``)."""
        return self._file(notebook, "beat").stat().st_mtime

    def wait_beat(self, notebook: Notebook, within_s: float = PATIENCE_S) -> float:
        """Wait for a step that ends after this call; return the time until then."""
        began_s = time.time()
        wait_until(lambda: self.beat_s(notebook) > began_s, f"{notebook.name} goes on", within_s)
        return self.beat_s(notebook) - began_s

    def end(self, *notebooks: Notebook) -> dict[Notebook, Cell]:
        """End the loops, which must succeed, and return their cells."""
        for notebook in notebooks:
            self._file(notebook, "stop").touch()
        ended = {n: self._working.pop(n) for n in notebooks if n in self._working}
        finish_all(ended)
        return ended

    def working(self) -> list[Notebook]:
        return list(self._working)

    def forget_work(self, notebook: Notebook) -> None:
        """Forget the cell of a notebook whose kernel is dead."""
        self._working.pop(notebook, None)

    # --- states

    def set(self, tq_s: float, copy_bytes_per_s: int | None = None) -> None:
        if copy_bytes_per_s is not None:
            self.speed(copy_bytes_per_s)
        client = self.daemon.client()
        try:
            client.set(tq_s=tq_s)
        finally:
            client.close()

    def speed(self, copy_bytes_per_s: int) -> None:
        emulator.set_copy_bandwidth(self.daemon.state_path, copy_bytes_per_s)

    def reach(self, state: str, slow: int = SLOW) -> None:
        """Bring A into ``state``, where it stays: a quantum lasts longer than any test waits. B is
        in a cell. Before, both hold memory and no cell runs."""
        self._slow = slow
        getattr(self, "_reach_" + state.replace("-", "_"))()
        self.a.wait_state(state)
        self.set(600)

    def _reach_waiting(self) -> None:
        self.work(self.b)
        self.b.wait_state("running")
        self.work(self.a)

    def _reach_running(self) -> None:
        self.work(self.a)
        self.a.wait_state("running")
        self.wait_beat(self.a)
        self.work(self.b)
        self.b.wait_state("waiting")

    def _reach_suspended(self) -> None:
        self.work(self.a)
        self.a.wait_state("running")
        self.wait_beat(self.a)
        self.work(self.b)
        self.daemon.in_a_long_turn(
            lambda _: (self.a.state, self.b.state) == ("suspended", "running"),
            "A suspended, B running",
        )

    def _reach_paged_out(self) -> None:
        self.work(self.b)
        self.b.wait_state("running")

    def _reach_paging_out(self) -> None:
        self.work(self.a)
        self.a.wait_state("running")
        self.wait_beat(self.a)
        self.set(0.3, self._slow)
        self.work(self.b)

    def _reach_paging_in(self) -> None:
        self.work(self.b)
        self.b.wait_state("running")
        self.wait_beat(self.b)
        self.set(0.3, self._slow)
        self.work(self.a)

    def reset(self, tq_s: float = 60) -> None:
        """Set fast copies and a long quantum, and end all work."""
        self.end(self.a, self.b)
        self.set(tq_s, 0)

    def assert_all_well(self) -> None:
        """Check that every byte is right, and that the books of driver and daemon agree."""
        self.a.assert_intact()
        self.b.assert_intact()
        assert_books_agree(self.daemon)


class Arena:
    """A pair for many tests, with a new pair after a failed test. ``with arena as pair: …``"""

    def __init__(self, pager: PagerUnderTest, tq_s: float = 60) -> None:
        self._pager, self._tq_s = pager, tq_s
        self._pair: TwoNotebooks | None = None
        self._clean = False

    def __enter__(self) -> TwoNotebooks:
        if not self._clean or self._host_is_down():
            self.close()
            self._pair = TwoNotebooks("--tq", f"{self._tq_s:g}", pager=self._pager)
        assert self._pair is not None
        self._clean = False
        self._pair.reset(self._tq_s)
        return self._pair

    def _host_is_down(self) -> bool:
        return self._pair is None or bool(emulator.host_down(self._pair.daemon.state_path))

    def __exit__(self, kind: object, *_: object) -> None:
        self._clean = kind is None

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def check(self) -> None:
        if self._pair is not None:
            self._pair.check()


class Arenas:
    """An arena of each pager, for tests that have the pager as one of several parameters: pytest
    ends a fixture that depends on a parameter as soon as any of them changes."""

    def __init__(self) -> None:
        self._arenas: dict[str, Arena] = {}

    def of(self, pager: PagerUnderTest) -> Arena:
        if pager.name not in self._arenas:
            self._arenas[pager.name] = Arena(pager)
        return self._arenas[pager.name]

    def check(self) -> None:
        for arena in self._arenas.values():
            arena.check()

    def close(self) -> None:
        with ExitStack() as stack:
            for arena in self._arenas.values():
                stack.callback(arena.close)


@pytest.fixture(scope="module")
def arenas() -> Iterator[Arenas]:
    """Lend pairs to the tests of a module, and check at the end that no daemon had an error."""
    arenas = Arenas()
    try:
        yield arenas
        arenas.check()
    finally:
        arenas.close()


class Deathwatch:
    """A watcher of when process ``pid`` ended."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self._at_s = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(60_000):
            self._at_s = time.time()
        os.close(self._pidfd)

    def died_s(self) -> float:
        """Return the time of death on the clock of ``time.time()``, which file times use."""
        self._thread.join()
        assert self._at_s, "the process did not end"
        return self._at_s
