"""Simulates many GPUs, each with a trace of its own, or a cluster, in several processes."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

from kiwi_core.simulate.cluster import ClusterSimulation, arrivals
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import NO_FAULTS, Cluster, FaultRates, Setup, SimulatedMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence, Sequence

    from kiwi_core.simulate.trace import Trace

PARTS_PER_JOB: Final = 8
"""Number of parts of a process's GPUs: small parts end at about the same time."""

REPORT_S: Final = 1.0
"""Time between two reports of the progress."""


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
    cluster: Cluster | None = None
    """With a cluster, ``work`` is a mix, and ``gpus`` is not used."""


def run(
    plans: Sequence[Plan], *, jobs: int = 1, progress: Callable[[float], None] | None = None
) -> list[Measures]:
    """Return the pooled measures of each plan's GPUs, which do not depend on ``jobs``. ``progress``
    gets the share that is done."""
    parts = list(_parts(plans, jobs))
    done = _run_all(plans, parts, jobs, progress or (lambda _: None))
    pooled = [Measures([]) for _ in plans]
    for (plan_number, _), measures in zip(parts, done, strict=True):
        pooled[plan_number].add(measures)
    return pooled


def _parts(plans: Sequence[Plan], jobs: int) -> Iterator[tuple[int, range]]:
    for number, plan in enumerate(plans):
        if plan.cluster is not None:  # its GPUs depend on each other
            yield number, range(1)
            continue
        size = max(1, plan.gpus // (jobs * PARTS_PER_JOB))
        for first in range(0, plan.gpus, size):
            yield number, range(first, min(first + size, plan.gpus))


def _run_all(
    plans: Sequence[Plan],
    parts: Sequence[tuple[int, range]],
    jobs: int,
    progress: Callable[[float], None],
) -> list[Measures]:
    if jobs == 1 or len(parts) == 1:
        return [
            run_part(plans[plan], gpus, lambda share, n=number: progress((n + share) / len(parts)))  # type: ignore[misc]
            for number, (plan, gpus) in enumerate(parts)
        ]
    context = get_context("spawn")
    shares = context.Array("d", len(parts), lock=False)
    with ProcessPoolExecutor(
        min(jobs, len(parts)), context, initializer=_use, initargs=(shares,)
    ) as pool:
        running = {
            pool.submit(_run_there, plans[plan], gpus, number)
            for number, (plan, gpus) in enumerate(parts)
        }
        done: dict[int, Measures] = {}
        try:
            while running:
                ended, running = wait(running, REPORT_S, FIRST_COMPLETED)
                done.update(future.result() for future in ended)
                progress(sum(shares) / len(parts))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [done[number] for number in range(len(parts))]


_shares: MutableSequence[float] = []
"""In a worker process: the share of each part that is done, seen by all processes."""


def _use(shares: MutableSequence[float]) -> None:
    global _shares
    _shares = shares


def _run_there(plan: Plan, gpus: range, number: int) -> tuple[int, Measures]:
    def progress(share: float) -> None:
        _shares[number] = share

    return number, run_part(plan, gpus, progress)


def run_part(plan: Plan, gpus: range, progress: Callable[[float], None]) -> Measures:
    """Simulate some GPUs of a plan, one after the other. Also called in other processes."""
    if plan.cluster is not None:
        return _run_cluster(plan, plan.cluster, progress)
    pooled = Measures([])
    for done, number in enumerate(gpus, start=1):
        seed = plan.seed + number
        trace = plan.work.of(seed, plan.machine)
        pooled.add(Simulation(trace, plan.machine, plan.setup, seed=seed, faults=plan.faults).run())
        progress(done / len(gpus))
    return pooled


def _run_cluster(plan: Plan, cluster: Cluster, progress: Callable[[float], None]) -> Measures:
    work, machine = plan.work, plan.machine
    coming = arrivals(
        work.mix, cluster, hours=work.hours, sessions=work.sessions, seed=plan.seed,
        total_bytes=machine.total_bytes,
    )  # fmt: skip
    return ClusterSimulation(
        cluster, coming, machine, plan.setup, seed=plan.seed, faults=plan.faults
    ).run(progress)
