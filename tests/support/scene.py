"""A scene that real kernels play beside a real daemon, and that the simulator predicts: a long
training and four interactive notebooks whose memory does not fit together.

Times are scaled down (TQ 4 s instead of 30), and the emulated GPU only sleeps: the scene costs
little CPU time, so other load on the machine changes it little. Each kernel gets all its cells at
once, including the thinking times, and needs no input during the scene. At the end each kernel
checks every byte of its GPU memory.

The trace of the prediction comes from the daemon's journal (``simulate.recorded``): the times of
cells and of thinking, with the overheads of kernel and daemon, and the speed of memory moves. Waits
are not in the trace.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from daemon import running_daemon
from kernels import running_kernel
from notebooks import Notebook

import kiwi_emulator as emulator
from kiwi_core.sched.replay import JournalEntry, JournalHeader
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.model import GB, Setup, SimulatedMachine
from kiwi_core.simulate.recorded import read
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernels import Cell

    from kiwi_core.simulate.measure import Measures
    from kiwi_core.simulate.trace import Trace

POLICIES: Final = ("round-robin", "interactive")
GPU_MIB: Final = 96
TQ_S: Final = 4.0
"""Quantum. Not less: under every policy a runner has at least two seconds, whatever the quantum."""
COPY_BYTES_PER_S: Final = 500 * 10**6
"""Speed at which a swap takes about a tenth of a quantum: a bus of 20 GB/s and 30 to 60 GB each."""

STEP_S: Final = 0.02
"""Length of a cell's steps: a step under way cannot be suspended."""

TRAINING: Final = "training"
TRAINING_MIB: Final = 60
NOTEBOOKS: Final = {"n1": 20, "n2": 30, "n3": 40, "n4": 48}
"""MiB of each notebook, beside 1 for copies and a context of 8. Some pairs fit together; none fits
with training."""

CELL_S: Final = (0.1, 0.4)
THINK_S: Final = (1.0, 4.0)


@dataclass(frozen=True)
class Length:
    training_s: float = 15.0
    """Computing time of the training."""
    cells: int = 6
    """Number of cells of each notebook."""


WHOLE: Final = Length()

COMPUTE: Final = """
import ctypes

def compute(steps, step_s):
    module = check(cuda.cuModuleLoadData(b"kiwi-emulated-module\\0"))
    spin = check(cuda.cuModuleGetFunction(module, b"spin_ns"))
    arguments = ((int(step_s * 1e9),), (ctypes.c_uint64,))
    for _ in range(steps):
        check(cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
        check(cuda.cuCtxSynchronize())
"""


SETTLE_S: Final = 1.0
"""Time from the last order to the beginning of the scene."""
PATIENCE_S: Final = 150.0


def plan(seed: int, length: Length) -> dict[str, list[tuple[float, float]]]:
    """Return the thinking time before each cell and the cell's computing time, by kernel."""
    rng = random.Random(seed)
    cells = {
        name: [(rng.uniform(*THINK_S), rng.uniform(*CELL_S)) for _ in range(length.cells)]
        for name in NOTEBOOKS
    }
    return {TRAINING: [(0.0, length.training_s)], **cells}


# --- for real -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A measured or predicted outcome."""

    waits_s: list[float]
    """Waits of the notebooks' cells, from the request to the first grant, of all plays together."""
    training_s: float
    """Time from the request of the training's cell to its end; the mean over the plays."""

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.waits_s)

    @property
    def p95_s(self) -> float:
        return sorted(self.waits_s)[math.ceil(0.95 * len(self.waits_s)) - 1]


def pooled(outcomes: Iterable[Outcome]) -> Outcome:
    every = list(outcomes)
    return Outcome(
        [wait_s for one in every for wait_s in one.waits_s],
        statistics.mean(one.training_s for one in every),
    )


Records = list[JournalHeader | JournalEntry]


def play(seed: int, length: Length = WHOLE) -> dict[str, Records]:
    """Play under all policies at once, each with a GPU and a daemon of its own, and return the
    daemons' journals; the whole scene takes some 45 s. Raise ``AssertionError`` if a cell fails or
    a byte of GPU memory has changed."""
    with ExitStack() as stack:
        stages = {policy: _Stage(policy, plan(seed, length), stack) for policy in POLICIES}
        began_s = time.monotonic() + SETTLE_S
        for stage in stages.values():
            stage.begin(began_s)
        return {policy: stage.finish() for policy, stage in stages.items()}


class _Stage:
    def __init__(
        self, policy: str, planned: dict[str, list[tuple[float, float]]], stack: ExitStack
    ) -> None:
        options = ("--tq", str(TQ_S), "--policy", policy)
        self._daemon = stack.enter_context(running_daemon(f"1x{GPU_MIB}MiB", *options))
        emulator.set_copy_bandwidth(self._daemon.state_path, COPY_BYTES_PER_S)
        self._plan = planned
        self._notebooks: dict[str, Notebook] = {}
        self._cells: list[tuple[Notebook, Cell]] = []
        for name, mib in {TRAINING: TRAINING_MIB, **NOTEBOOKS}.items():
            kernel = stack.enter_context(running_kernel(self._daemon.env))
            notebook = self._notebooks[name] = Notebook(kernel, self._daemon, name)
            notebook.check(COMPUTE)
            notebook.take(mib, seed=mib)

    def begin(self, at_s: float) -> None:
        """Give each kernel all its cells, which it runs one after another from ``at_s`` on."""
        for name, cells in self._plan.items():
            self._send(name, f"time.sleep(max(0.0, {at_s} - time.monotonic()))")
            for think_s, compute_s in cells:
                self._send(name, f"time.sleep({think_s})")
                self._send(name, f"compute({round(compute_s / STEP_S)}, {STEP_S})")

    def _send(self, name: str, code: str) -> None:
        notebook = self._notebooks[name]
        self._cells.append((notebook, notebook.start(code)))

    def finish(self) -> Records:
        """Wait for the end of all cells, and return the journal up to then."""
        for notebook, cell in self._cells:
            notebook.finish(cell, PATIENCE_S)
        records = self._daemon.records()
        for notebook in self._notebooks.values():
            notebook.assert_intact()
        return records


def measured(records: Records) -> Outcome:
    """Return the outcome in the journal: from requests to first grants and to the ends of
    bursts."""
    trace, measures = read(records)
    return _outcome_of(measures, len(trace.sessions))


def _outcome_of(measures: Measures, sessions: int) -> Outcome:
    cells: list[list[tuple[float, float]]] = [[] for _ in range(sessions)]
    columns = (measures.session, measures.wait_ns, measures.response_ns)
    for session, wait_ns, response_ns in zip(*columns, strict=True):
        cells[session].append((wait_ns / NS_PER_S, response_ns / NS_PER_S))
    return _outcome(cells)


def _outcome(cells: list[list[tuple[float, float]]]) -> Outcome:
    """Return the outcome from wait and whole time of each burst, by kernel. The first burst of each
    kernel only takes memory. A busy kernel may keep its turn from one cell to the next, so there
    may be fewer bursts than cells."""
    training, *notebooks = cells
    assert [len(training), len(notebooks)] == [2, len(NOTEBOOKS)], cells
    return Outcome([wait_s for of in notebooks for wait_s, _ in of[1:]], training[1][1])


# --- as foretold --------------------------------------------------------------------------------


def foretold(records: Records, policy: str, seeds: int = 20) -> Outcome:
    """Return the simulator's outcome of the recorded work under ``policy``, which may differ from
    the recorded one. It is pooled over ``seeds``: each draws other speeds for every move."""
    trace, _ = read(records, contention=0.0)  # kernels that sleep do not slow each other down
    machine = measured_machine(trace)
    setup = Setup(policy=policy, tq_ns=round(TQ_S * NS_PER_S))
    return pooled(
        _outcome_of(Simulation(trace, machine, setup, seed=seed).run(), len(trace.sessions))
        for seed in range(seeds)
    )


def measured_machine(trace: Trace) -> SimulatedMachine:
    """Return a machine with the speeds of the journal, which contain all that a move costs;
    likewise the time of a burst contains the look at its end."""
    recorded = trace.recorded
    assert recorded is not None
    assert recorded.out_gbps
    assert recorded.in_gbps
    return SimulatedMachine(
        total_bytes=trace.total_bytes,
        host_budget_bytes=recorded.host_budget_bytes,
        out_bytes_per_s=recorded.out_gbps * GB,
        in_bytes_per_s=recorded.in_gbps * GB,
        swap_fixed_ns=0,
        contention=0.0,
        look_ns=0,
    )
