"""A notebook of the end-to-end tests: a plain kernel that uses the GPU beside a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gpu_cells
import psutil
from daemon import wait_until
from kernels import PATIENCE_S, Cell, Kernel
from pagers import CHECKPOINTED, CONTEXT_BYTES, told_of_context

from kiwi_core.states import MovedBy, SessionState

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from daemon import Daemon

    from kiwi_core.wire.messages import SessionStatus
    from kiwi_emulator import ProcessBooks


class Notebook:
    """A notebook; ``kernel`` has everything else: cells, interrupt, restart, kill."""

    def __init__(self, kernel: Kernel, daemon: Daemon, name: str) -> None:
        self.kernel = kernel
        self.daemon = daemon
        self.name = name

    @property
    def pid(self) -> int:
        return self.kernel.pid

    @property
    def session(self) -> SessionStatus:
        """Return the notebook's session, which the daemon must know."""
        found = self.daemon.session(self.pid)
        assert found is not None, f"the daemon does not know notebook {self.name}"
        return found

    def is_out(self) -> bool:
        """Return whether the notebook's memory is out, by the driver's own books."""
        process = self.daemon.books().process(self.pid)
        assert process is not None, f"the driver does not know notebook {self.name}"
        return self.daemon.pager.is_out(process)

    def in_gpu_mib(self) -> float:
        """Return the MiB of its memory in the GPU, without its context, by the driver's own
        books."""
        process = self.daemon.books().process(self.pid)
        assert process is not None, f"the driver does not know notebook {self.name}"
        if process.state == CHECKPOINTED:
            return 0
        return process.device_bytes.get(0, 0) / (1 << 20)

    @property
    def state(self) -> str:
        return str(self.session.state.value)

    @property
    def id(self) -> str:
        return str(self.session.id)

    def take(self, mib: int, seed: int = 1) -> None:
        """Fill ``mib`` MiB of the GPU with random bytes, in a burst of its own, and wait for its
        end."""
        self.kernel.check(gpu_cells.PRELUDE)
        self.kernel.check(gpu_cells.take(mib, seed))
        self.wait_state("idle", "paging-out", "paged-out")

    def run(self, code: str, timeout_s: float = PATIENCE_S) -> Cell:
        return self.kernel.run(code, timeout_s)

    def check(self, code: str, **options: Any) -> Cell:
        return self.kernel.check(code, **options)

    def start(self, code: str) -> Cell:
        """Start a cell without waiting for its end; ``finish`` waits."""
        return self.kernel.send(code)

    def finish(self, cell: Cell, timeout_s: float = PATIENCE_S) -> Cell:
        """Wait for the cell's end, which must be a success."""
        self.kernel.finish(cell, timeout_s)
        assert cell.status == "ok", f"{self.name}: {cell.traceback}\n{self.kernel.log()}"
        return cell

    def work(
        self, seconds: float = 0.0, *, steps: int = 0, write: bool = False, until: Path | str = ""
    ) -> Cell:
        """Start a loop of small copies that checks what it reads; see ``gpu_cells``. The length of
        a quantum depends on the machine's speed: loop ``until`` a file appears rather than for some
        time."""
        return self.start(gpu_cells.work(seconds, steps=steps, write=write, until=until))

    def assert_intact(self) -> None:
        """Read all GPU memory back, in a cell of its own, and check it."""
        text = self.finish(self.start(gpu_cells.INTACT)).text
        assert text == "INTACT\n", f"{self.name} says {text!r}"

    def wait_state(self, *states: str, timeout_s: float = PATIENCE_S) -> SessionStatus:
        return self.daemon.wait_state(self.pid, *states, timeout_s=timeout_s)

    def subshell(self) -> str | None:
        """Return a new subshell; ``None`` if this ipykernel (6.x) has none."""
        info = self.kernel.ask("kernel_info_request", {})["content"]
        if "kernel subshells" not in info.get("supported_features", []):
            return None
        made = self.kernel.ask("create_subshell_request", {}, control=True)["content"]
        return str(made["subshell_id"])

    def waits_seen(self, cell: Cell) -> list[str]:
        """Return the texts of the waiting line so far, without the empty text at its end."""
        self.kernel.pump()
        return [text for text in cell.displays() if text]


def finish_all(running: dict[Notebook, Cell], timeout_s: float = PATIENCE_S) -> None:
    """Process the messages of several notebooks until all their cells are done."""

    def done() -> bool:
        for notebook in running:
            notebook.kernel.pump(0.005)
        return all(cell.done for cell in running.values())

    names = ", ".join(notebook.name for notebook in running)
    wait_until(done, f"the cells of {names} end", timeout_s)
    for notebook, cell in running.items():
        assert cell.status == "ok", f"{notebook.name}: {cell.traceback}\n{notebook.kernel.log()}"


def assert_books_agree(daemon: Daemon, timeout_s: float = PATIENCE_S) -> None:
    """Check that the daemon's books agree with the driver's, once nothing moves any more.

    In the GPU, every byte belongs to a session or to no live process. Paged out are the bytes that
    the driver has parked, and for sessions with a library also the library's, which only it knows.
    """
    seen = ""

    def agree() -> bool:
        nonlocal seen
        status, books = daemon.status(), daemon.books()
        ours = {s.pid: (s.resident_bytes, s.paged_out_bytes) for s in status.sessions}
        theirs: dict[int, tuple[int, int]] = {}
        for process in books.processes:
            root = _root_of(process.pid, ours)
            resident, out = theirs.get(root, (0, 0))
            context_bytes = told_of_context(process.context_bytes.get(0, 0))
            held = process.device_bytes.get(0, 0) + context_bytes
            theirs[root] = (resident + held, out + _driver_wants_back(process))
        for session in status.sessions:
            if session.pager is not MovedBy.CHECKPOINT:
                resident, out = theirs.get(session.pid, (0, 0))
                theirs[session.pid] = (resident, out + _library_has(session, out))
        wrong = [
            f"process {pid}: daemon {ours.get(pid, (0, 0))}, driver {theirs.get(pid, (0, 0))}"
            for pid in ours.keys() | theirs.keys()
            if ours.get(pid, (0, 0)) != theirs.get(pid, (0, 0))
        ]
        free_bytes = books.gpus[0].total_bytes - books.gpus[0].used_bytes
        if status.memory.free_bytes != free_bytes:
            wrong.append(f"free: daemon {status.memory.free_bytes}, driver {free_bytes}")
        out_bytes = sum(out for _, out in theirs.values())
        if status.memory.paged_out_bytes != out_bytes:
            wrong.append(f"out: daemon {status.memory.paged_out_bytes}, driver {out_bytes}")
        seen = "; ".join(wrong)
        return not wrong

    try:
        wait_until(agree, "the books agree", timeout_s)
    except AssertionError:
        raise AssertionError(f"the books do not agree: {seen}\n{daemon.log()}") from None


def _root_of(pid: int, roots: Container[int]) -> int:
    """Return the session process of ``pid``: the process itself or an ancestor; itself if none."""
    try:
        family = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.NoSuchProcess:
        return pid
    return next((one for one in family if one in roots), pid)


def _library_has(session: SessionStatus, driver_has_bytes: int) -> int:
    """Return the paged-out bytes that the library has: 0 for a session that may compute."""
    if session.state in (SessionState.IDLE, SessionState.RUNNING):
        return 0
    return max(0, session.paged_out_bytes - driver_has_bytes)


def _driver_wants_back(process: ProcessBooks) -> int:
    """Return the bytes that a restore will take: the parked memory, and the context again."""
    if process.state != CHECKPOINTED:
        return 0
    return process.parked_bytes.get(0, 0) + told_of_context(CONTEXT_BYTES)
