"""Simulates many GPUs, each with a trace of its own, in several processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING

from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import NO_FAULTS, FaultRates, Setup, SimulatedMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kiwi_core.simulate.trace import Trace


@dataclass(frozen=True)
class Work:
    """The source of each GPU's trace: a mix (each GPU has another seed), or one trace for all."""

    mix: str = ""
    trace: Trace | None = None
    hours: float = 24.0
    sessions: int | None = None

    def of(self, seed: int, machine: SimulatedMachine) -> Trace:
        if self.trace is not None:
            return self.trace
        return generate(
            self.mix, hours=self.hours, seed=seed, sessions=self.sessions,
            total_bytes=machine.total_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One column of a comparison: ``work`` on ``gpus`` GPUs under one set-up. GPU number n has the
    seed ``seed + n`` under every set-up, so that all are compared on the same work."""

    work: Work
    machine: SimulatedMachine = field(default_factory=SimulatedMachine)
    setup: Setup = field(default_factory=Setup)
    faults: FaultRates = NO_FAULTS
    seed: int = 0
    gpus: int = 1


def run(
    plans: Sequence[Plan], *, jobs: int = 1, progress: Callable[[float], None] | None = None
) -> list[Measures]:
    """Return the pooled measures of each plan's GPUs, which do not depend on ``jobs``. ``progress``
    gets the share that is done."""
    gpus = [(number, gpu) for number, plan in enumerate(plans) for gpu in range(plan.gpus)]
    pooled = [Measures([]) for _ in plans]
    with _workers(min(jobs, len(gpus))) as each:
        done = each(_run_one, [plans[number] for number, _ in gpus], [gpu for _, gpu in gpus])
        for ended, ((number, _), measures) in enumerate(zip(gpus, done, strict=True), start=1):
            pooled[number].add(measures)
            if progress is not None:
                progress(ended / len(gpus))
    return pooled


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Iterator[Measures]]]:
    """Yield a ``map`` that uses ``jobs`` processes."""
    if jobs <= 1:
        yield map
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    try:
        yield pool.map
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_one(plan: Plan, gpu: int) -> Measures:
    seed = plan.seed + gpu
    trace = plan.work.of(seed, plan.machine)
    return Simulation(trace, plan.machine, plan.setup, seed=seed, faults=plan.faults).run()
