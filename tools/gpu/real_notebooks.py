"""Real notebooks: kernels of the carried ipykernel, controlled as by Jupyter."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pairs import ballast, kind_of_job
from stage import GIB, MIB, Daemon, Skipped, Stage, daemon, wait_until

if TYPE_CHECKING:
    from kernels import Cell, Kernel

TQ_S = 3.0
LARGE_BYTES = 16 * GIB
"""Size whose page-in is timed; a program outside Kiwi takes the rest of the GPU."""
SMALL_BYTES = 6 * GIB
"""Size of two notebooks that take turns: the driver's checkpoint moves some 4 GB/s."""


def run(stage: Stage) -> None:
    """Run the demo's two notebooks."""
    _check_packages()
    with stage.attempt("two notebooks that do not fit"):
        _two(stage)


def run_shift_enter(stage: Stage) -> None:
    """Time Shift+Enter of a large notebook that is paged out."""
    _check_packages()
    with stage.attempt("Shift+Enter to the first kernel"):
        _shift_enter(stage)


def _check_packages() -> None:
    for package in ("ipykernel", "jupyter_client"):
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not there; benchmarks/README.md says what to carry")


class Notebook:
    """A kernel that holds ``size`` bytes of known contents."""

    def __init__(self, stage: Stage, one: Daemon, name: str, stack: ExitStack) -> None:
        from kernels import running_kernel

        self.stage = stage
        env = one.env | {"JPY_SESSION_NAME": f"/home/somebody/{name}.ipynb"}
        self.kernel: Kernel = stack.enter_context(running_kernel(env))
        stack.callback(self._leave)

    def _leave(self) -> None:
        """End the kernel as Jupyter does, not by a signal: its memory may have been restored."""
        with suppress(Exception):
            self.kernel.manager.shutdown_kernel(now=False)

    def take(self, size: int) -> None:
        kind = "TorchWork" if kind_of_job(self.stage) == "torch" else "DriverWork"
        here = str(Path(__file__).parent)
        self.check(f"import sys; sys.path.insert(0, {here!r})\nfrom job import {kind}")
        self.check(f"work = {kind}({size})\nwork.round()")

    def check(self, code: str) -> Cell:
        """Run a cell that must not fail."""
        cell = self.kernel.run(code, timeout_s=max(1.0, self.stage.left_s))
        if cell.status != "ok":
            raise RuntimeError(f"{code!r} failed: {cell.traceback[-400:]}")
        return cell

    def digest(self) -> str:
        return self.check("print(work.digest())").text.strip()

    def compute(self, seconds: float) -> Cell:
        """Begin a cell that computes for ``seconds``, with any suspensions included."""
        code = (
            "import time\nends = time.monotonic() + {}\nwhile time.monotonic() < ends: work.round()"
        )
        return self.kernel.send(code.format(seconds))

    def finish(self, cell: Cell) -> None:
        self.kernel.finish(cell, timeout_s=max(1.0, self.stage.left_s))
        if cell.status != "ok":
            raise RuntimeError(f"a computing cell failed: {cell.traceback[-400:]}")

    def timed_s(self, code: str) -> float:
        began_s = time.monotonic()
        self.check(code)
        return time.monotonic() - began_s


def _two(stage: Stage) -> None:
    """Let two kernels of 60 % each compute at the same time: both are suspended, all bytes stay."""
    tq_s = 1.0 if stage.emulated else TQ_S
    size = min(stage.size(0.6), SMALL_BYTES)
    with daemon(stage, tq_s) as one, ExitStack() as stack:
        ballast(stage, size, stack)
        a, b = (Notebook(stage, one, name, stack) for name in ("A", "B"))
        a.take(size)
        b.take(size)
        before = (a.digest(), b.digest())
        cells = [(book, book.compute(8 * tq_s)) for book in (a, b)]
        for book, cell in cells:
            book.finish(cell)
        after = (a.digest(), b.digest())
        sessions = one.status()["sessions"]
    suspensions = [session["suspensions"] for session in sessions]
    stage.row(
        "two notebooks: bytes as before", before == after, target="True", passed=before == after
    )
    enough = len(suspensions) == 2 and sum(suspensions) > 0
    stage.row("two notebooks: suspensions", suspensions, target="two sessions, ≥ 1", passed=enough)


def _shift_enter(stage: Stage) -> None:
    size = min(stage.size(0.6), LARGE_BYTES)
    tq_s = 1.0 if stage.emulated else TQ_S
    with daemon(stage, tq_s) as one, ExitStack() as stack:
        ballast(stage, size, stack)
        large, other = (Notebook(stage, one, name, stack) for name in ("large", "other"))
        large.take(size)
        stage.row(
            "Shift+Enter, memory in the GPU", round(large.timed_s("work.round()"), 3), unit="s"
        )
        # Leaves no room for the large one.
        other.take(size)
        _wait_out(one, size, stage)
        seconds = large.timed_s("work.round()")
        stage.row(
            f"Shift+Enter, {size // MIB} MiB paged out, the room taken by an idle notebook",
            round(seconds, 3), unit="s", swaps=_rates(one),
        )  # fmt: skip
        cell = other.compute(3 * tq_s)
        wait_until(lambda: _out(one, "large") >= size // 2, 60.0, "the large notebook is out")
        seconds = large.timed_s("work.round()")
        stage.row(
            f"Shift+Enter, {size // MIB} MiB paged out, the GPU taken",
            round(seconds, 3), unit="s", tq_s=tq_s, swaps=_rates(one),
        )  # fmt: skip
        other.finish(cell)
        _wait_out(one, size, stage)
        other.check("del work")
        other.kernel.restart(now=False)
        wait_until(lambda: len(one.status()["sessions"]) < 2 or _free(one) > size, 20, "room")
        seconds = large.timed_s("work.round()")
        stage.row(
            f"Shift+Enter, {size // MIB} MiB paged out, the GPU free", round(seconds, 3), unit="s",
            swaps=_rates(one),
        )  # fmt: skip


def _wait_out(one: Daemon, size: int, stage: Stage) -> None:
    def out() -> bool:
        return any(session["paged_out_bytes"] >= size // 2 for session in one.status()["sessions"])

    wait_until(out, max(1.0, min(60.0, stage.left_s)), "the large notebook is paged out")


def _out(one: Daemon, name: str) -> int:
    return sum(s["paged_out_bytes"] for s in one.status()["sessions"] if s["name"].startswith(name))


def _free(one: Daemon) -> int:
    return int(one.status()["memory"]["free_bytes"])


def _rates(one: Daemon) -> list[dict[str, Any]]:
    return [
        {
            "direction": swap["direction"],
            "gb_s": round(swap["bytes_moved"] / swap["seconds"] / 1e9, 3),
        }
        for swap in one.swaps()[-3:]
    ]
