"""What a switch between two notebooks costs beside its cell, in starts of a bare Python.

Two real kernels of 38 MiB and a real daemon, with the default pager, on an emulated GPU that has
room for one of them. Their cells run in turns: each has to have the other's memory moved out and
its own moved in. A *switch* is the time of such a cell, from its request to its end, less the time
of the same cell with its memory in. The yardstick, ``python -I -S -c pass``, is measured in turns
with them. Between cells there is a pause, as a person makes one: a notebook that may come back in a
moment keeps its place for about as long as a switch takes.

The emulated driver copies at the speed of the machine's memory, so this is what Kiwi adds to the
moves, and not what a move costs on a GPU. ``--parent`` measures another commit beside this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from bench_cpu_cell import ask
from common import ROOT, Samples, arguments, machine, report, samples_table, target
from daemon import running_daemon
from gpu_cells import PRELUDE, take
from kernels import running_kernel
from pagers import DEFAULT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from daemon import Daemon
    from kernels import Kernel

LIMIT = 5.0

GPU = "1x64MiB"
MIB = 38

PAUSE_S = 0.4
"""Pause before each cell. The place of a notebook is kept for a switch there and back at most."""

CELL = "memory.step()"

BARE = (sys.executable, "-I", "-S", "-c", "pass")

BUILD = (
    "from kiwi_core import preload; import kiwi_emulator; kiwi_emulator.build(); preload.library()"
)
"""Program that compiles the C libraries of its Kiwi, so that no kernel runs without the gate."""

WHICH = "import kiwi_core; print(kiwi_core.__file__)"


class Pair:
    """Two notebooks beside a daemon, with the Kiwi in ``where``."""

    def __init__(self, stack: ExitStack, where: Path) -> None:
        env = leading_to(where)
        self._daemon: Daemon = stack.enter_context(running_daemon(GPU, env=env, pager=DEFAULT))
        self._kernels = [
            stack.enter_context(running_kernel(self._daemon.env | env)) for _ in range(2)
        ]
        started = psutil.Process(self._daemon.status().daemon_pid).cmdline()
        _must_be_in(where, started[1])
        for seed, kernel in enumerate(self._kernels):
            _must_be_in(where, kernel.check(WHICH).text)
            kernel.check(PRELUDE)
            kernel.check(take(MIB, seed))
        self._turn = 0

    def measure(self) -> tuple[int, int]:
        """Return the times of the next notebook's cell with its memory out and in, in
        nanoseconds."""
        kernel = self._kernels[self._turn % 2]
        self._turn += 1
        self._daemon.wait_state(kernel.pid, "paged-out")
        return _cell_ns(kernel), _cell_ns(kernel)


def _cell_ns(kernel: Kernel) -> int:
    time.sleep(PAUSE_S)
    began_ns = time.perf_counter_ns()
    ask(kernel, CELL)
    return time.perf_counter_ns() - began_ns


def _bare_ns() -> int:
    began_ns = time.perf_counter_ns()
    subprocess.run(BARE, check=True)
    return time.perf_counter_ns() - began_ns


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check ``commit`` out beside this checkout, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="kiwi-switch-") as directory:
        where = Path(directory) / "kiwi"
        _git("worktree", "add", "--quiet", "--detach", str(where), commit)
        try:
            yield where
        finally:
            _git("worktree", "remove", "--force", str(where))


def _git(*words: str) -> None:
    subprocess.run(("git", "-C", str(ROOT), *words), check=True)


def leading_to(where: Path) -> dict[str, str]:
    """Return the environment of programs that use the Kiwi in ``where``, whose C libraries are
    compiled now."""
    env = {"PYTHONPATH": str(where)}
    subprocess.run([sys.executable, "-c", BUILD], env=os.environ | env, check=True)
    return env


def _must_be_in(where: Path, path: str) -> None:
    if not Path(path.strip()).is_relative_to(where):
        raise SystemExit(f"another Kiwi would be measured: {path}")


def measured(places: dict[str, Path], rounds: int) -> dict[str, Samples]:
    """Measure each of ``places``, by name, and the bare Python in turns. Two cells that differ only
    in where the memory was belong together, so a switch is the difference of the two."""
    samples = {"bare python": Samples()}
    with ExitStack() as stack:
        pairs = {name: Pair(stack, where) for name, where in places.items()}
        names = list(pairs)
        for number in range(-4, rounds):  # the first switches measure the moves, and fill caches
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                bare_ns = _bare_ns()
                out_ns, in_ns = pairs[name].measure()
                if number < 0:
                    continue
                samples["bare python"].add(bare_ns)
                for what, took_ns in (
                    ("cell, memory in", in_ns),
                    ("cell, memory out", out_ns),
                    ("switch", out_ns - in_ns),
                ):
                    samples.setdefault(f"{name}: {what}", Samples()).add(took_ns)
    return samples


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--parent", metavar="COMMIT", help="measure that commit, too, in turns")


def main() -> int:
    args = arguments(__doc__, options)
    where = machine("emulated")
    if args.json:
        args.json = args.json.absolute()
    os.chdir("/")  # python -m looks for Kiwi in the working directory first
    with ExitStack() as stack:
        places = {"this checkout": ROOT}
        if args.parent:
            places[args.parent] = stack.enter_context(checkout(args.parent))
        samples = measured(places, 3 if args.quick else args.rounds)
    samples_table(samples)
    bare_ns = samples["bare python"].median_ns
    ratios = {name: samples[f"{name}: switch"].median_ns / bare_ns for name in places}
    for name, ratio in ratios.items():
        print(f"{name}: a switch takes {ratio:.1f} starts of a bare python")
    results: dict[str, Any] = {
        "machine": where,
        "samples": {name: one.summary() for name, one in samples.items()},
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "targets": [target("a switch / a bare python", ratios["this checkout"], LIMIT)],
    }
    report("switch", results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
