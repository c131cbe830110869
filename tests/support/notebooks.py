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

    from kiwi_core.emulator import ProcessBooks
    from kiwi_core.wire.messages import SessionStatus


class Notebook:
    """``kernel`` has everything else: cells, interrupt, restart, kill."""

    def __init__(self, kernel: Kernel, daemon: Daemon, name: str) -> None:
        self.kernel = kernel
        self.daemon = daemon
        self.name = name

    @property
    def pid(self) -> int:
        return self.kernel.pid

    @property
    def session(self) -> SessionStatus:
        """As the daemon sees it; it must know it."""
        found = self.daemon.session(self.pid)
        assert found is not None, f"the daemon does not know notebook {self.name}"
        return found

    def is_out(self) -> bool:
        """Its memory, by the driver's own books."""
        process = self.daemon.books().process(self.pid)
        assert process is not None, f"the driver does not know notebook {self.name}"
        return self.daemon.pager.is_out(process)

    def in_gpu_mib(self) -> float:
        """What of its memory is in the GPU, its context left out, by the driver's own books."""
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
        """Fills ``mib`` MiB of the GPU with random bytes, in a burst of its own, which is over."""
        self.kernel.check(gpu_cells.PRELUDE)
        self.kernel.check(gpu_cells.take(mib, seed))
        self.wait_state("idle", "paging-out", "paged-out")

    def run(self, code: str, timeout_s: float = PATIENCE_S) -> Cell:
        return self.kernel.run(code, timeout_s)

    def check(self, code: str, **options: Any) -> Cell:
        return self.kernel.check(code, **options)

    def start(self, code: str) -> Cell:
        """Does not wait for its end: ``finish`` does."""
        return self.kernel.send(code)

    def finish(self, cell: Cell, timeout_s: float = PATIENCE_S) -> Cell:
        """Its end, which must be a good one."""
        self.kernel.finish(cell, timeout_s)
        assert cell.status == "ok", f"{self.name}: {cell.traceback}\n{self.kernel.log()}"
        return cell

    def work(
        self, seconds: float = 0.0, *, steps: int = 0, write: bool = False, until: Path | str = ""
    ) -> Cell:
        """Starts a loop of small copies that checks what it reads; see ``gpu_cells``. How long a
        quantum is depends on the machine's speed: loop ``until`` a file appears rather than for
        some time."""
        return self.start(gpu_cells.work(seconds, steps=steps, write=write, until=until))

    def assert_intact(self) -> None:
        """Reads all its GPU memory back, in a cell of its own."""
        text = self.finish(self.start(gpu_cells.INTACT)).text
        assert text == "INTACT\n", f"{self.name} says {text!r}"

    def wait_state(self, *states: str, timeout_s: float = PATIENCE_S) -> SessionStatus:
        return self.daemon.wait_state(self.pid, *states, timeout_s=timeout_s)

    def subshell(self) -> str | None:
        """A new one; ``None`` where this ipykernel has none (6.x)."""
        info = self.kernel.ask("kernel_info_request", {})["content"]
        if "kernel subshells" not in info.get("supported_features", []):
            return None
        made = self.kernel.ask("create_subshell_request", {}, control=True)["content"]
        return str(made["subshell_id"])

    def waits_seen(self, cell: Cell) -> list[str]:
        """What the waiting line said so far, without the empty text at its end."""
        self.kernel.pump()
        return [text for text in cell.displays() if text]


def finish_all(running: dict[Notebook, Cell], timeout_s: float = PATIENCE_S) -> None:
    """Several notebooks at once: takes in what all of them send until all cells are done."""

    def done() -> bool:
        for notebook in running:
            notebook.kernel.pump(0.005)
        return all(cell.done for cell in running.values())

    names = ", ".join(notebook.name for notebook in running)
    wait_until(done, f"the cells of {names} end", timeout_s)
    for notebook, cell in running.items():
        assert cell.status == "ok", f"{notebook.name}: {cell.traceback}\n{notebook.kernel.log()}"


def assert_books_agree(daemon: Daemon, timeout_s: float = 15.0) -> None:
    """The daemon's books say what the driver's own do, once nothing moves any more.

    In the GPU: every byte belongs to a session or to nobody that lives. Paged out: what the driver
    has parked; of sessions with a library also what that has, which nobody else knows.
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
    """The session process that ``pid`` belongs to: itself or an ancestor; itself if none."""
    try:
        family = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.NoSuchProcess:
        return pid
    return next((one for one in family if one in roots), pid)


def _library_has(session: SessionStatus, driver_has_bytes: int) -> int:
    """Nothing, of one that may compute."""
    if session.state in (SessionState.IDLE, SessionState.RUNNING):
        return 0
    return max(0, session.paged_out_bytes - driver_has_bytes)


def _driver_wants_back(process: ProcessBooks) -> int:
    """What a restore will take: the parked memory, and its context anew."""
    if process.state != CHECKPOINTED:
        return 0
    return process.parked_bytes.get(0, 0) + told_of_context(CONTEXT_BYTES)
