"""Simulates many GPUs, each with a trace of its own, in several processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import NO_FAULTS, Faults, Machine, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kiwi_core.simulate.trace import Trace

PARTS_PER_JOB: Final = 8
"""Number of parts of a process's GPUs: small parts end at about the same time and show progress."""


@dataclass(frozen=True)
class Work:
    """The source of each GPU's trace: a mix (each GPU has another seed), or one trace for all."""

    mix: str = ""
    trace: Trace | None = None
    hours: float = 24.0
    sessions: int | None = None

    def of(self, seed: int, machine: Machine) -> Trace:
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
    machine: Machine = field(default_factory=Machine)
    setup: Setup = field(default_factory=Setup)
    faults: Faults = NO_FAULTS
    seed: int = 0
    gpus: int = 1


def run(
    plans: Sequence[Plan], *, jobs: int = 1, progress: Callable[[float], None] | None = None
) -> list[Measures]:
    """Return the pooled measures of each plan's GPUs, which do not depend on ``jobs``. ``progress``
    gets the share that is done."""
    parts = list(_parts(plans, jobs))
    done: dict[int, Measures] = {}
    for number, measures in _run_all(plans, parts, jobs):
        done[number] = measures
        if progress is not None:
            progress(len(done) / len(parts))
    pooled = [Measures([]) for _ in plans]
    for number, (plan_number, _) in enumerate(parts):
        pooled[plan_number].add(done[number])
    return pooled


def _parts(plans: Sequence[Plan], jobs: int) -> Iterator[tuple[int, range]]:
    for number, plan in enumerate(plans):
        size = max(1, plan.gpus // (jobs * PARTS_PER_JOB))
        for first in range(0, plan.gpus, size):
            yield number, range(first, min(first + size, plan.gpus))


def _run_all(
    plans: Sequence[Plan], parts: Sequence[tuple[int, range]], jobs: int
) -> Iterator[tuple[int, Measures]]:
    if jobs == 1 or len(parts) == 1:
        for number, (plan, gpus) in enumerate(parts):
            yield number, run_part(plans[plan], gpus)
        return
    workers = min(jobs, len(parts))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(run_part, plans[plan], gpus): number
            for number, (plan, gpus) in enumerate(parts)
        }
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def run_part(plan: Plan, gpus: range) -> Measures:
    """Simulate some GPUs of a plan, one after the other. Also called in other processes."""
    pooled = Measures([])
    for number in gpus:
        seed = plan.seed + number
        trace = plan.work.of(seed, plan.machine)
        pooled.add(Simulation(trace, plan.machine, plan.setup, seed=seed, faults=plan.faults).run())
    return pooled
