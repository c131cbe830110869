"""Simulates a cluster: sessions come and go, and a rule decides on which node and GPU each starts.

The nodes' engine (Slurm, Kubernetes) knows how many sessions each node has and, if Kiwi tells it,
how long a newcomer would wait there. It reads that *weight* now and then, so it may be out of date.
On the node Kiwi chooses the GPU, by the wait at that moment.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kiwi_core.simulate.compute import NEVER_NS
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import Placing
from kiwi_core.simulate.trace import Trace
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.simulate.model import Cluster, FaultRates, Setup, SimulatedMachine
    from kiwi_core.simulate.trace import SessionTrace


def arrivals(
    mix: str, cluster: Cluster, *, hours: float, sessions: int | None, seed: int, total_bytes: int
) -> list[SessionTrace]:
    """Return the sessions in the order in which they come, evenly spread over ``hours``. Each stays
    for ``cluster.stay_hours`` if it never waits, and so many come that each GPU has as many as the
    mix says, on average."""
    rng = random.Random(f"{mix}/{seed}/arrivals")
    groups = round(cluster.gpus_in_all * max(1.0, hours / cluster.stay_hours))
    coming: list[SessionTrace] = []
    for group in range(groups):
        made = generate(
            mix, hours=cluster.stay_hours, seed=seed + group, sessions=sessions,
            total_bytes=total_bytes,
        )  # fmt: skip
        for session in made.sessions:
            name = f"{session.id}.{group}"
            starts_ns = int(rng.uniform(0, hours * 3600.0) * NS_PER_S)
            coming.append(replace(session, id=name, user=name, starts_ns=starts_ns, leaves_ns=0))
    return sorted(coming, key=_starts_ns)


def _starts_ns(session: SessionTrace) -> int:
    return session.starts_ns


class ClusterSimulation:
    """One run over ``coming``, sessions in the order of ``starts_ns``."""

    def __init__(
        self,
        cluster: Cluster,
        coming: Iterable[SessionTrace],
        machine: SimulatedMachine,
        setup: Setup,
        *,
        seed: int,
        faults: FaultRates,
    ) -> None:
        empty = Trace(name="", total_bytes=machine.total_bytes, sessions=())
        self.gpus = [
            Simulation(empty, machine, setup, seed=seed + gpu, faults=faults)
            for gpu in range(cluster.gpus_in_all)
        ]
        self._cluster = cluster
        self._placing = setup.placing
        self._coming = deque(coming)
        self._unplaced: deque[SessionTrace] = deque()
        """Sessions that found no free place, in the order in which they came."""
        self._due: list[int] = [NEVER_NS] * len(self.gpus)
        """When each GPU's next step is due."""
        self._heap: list[tuple[int, int]] = []
        """The same with the number of the GPU; an entry that differs from ``_due`` is stale."""
        self._weights: list[tuple[int, int]] = [(0, 0)] * cluster.nodes
        """The wait (ns) and the number of sessions of each node, as last read."""
        self._tick_ns = 0 if setup.placing is Placing.WAIT else NEVER_NS
        """When the weights are read next."""
        self.place_waits_ns: list[int] = []
        """How long each session waited for a place that did not get one at once."""

    def run(self, progress: Callable[[float], None] | None = None) -> Measures:
        """Run until the last session has left. ``progress`` gets the share of sessions placed."""
        total = max(1, len(self._coming))
        for gpu, simulation in enumerate(self.gpus):
            simulation.begin()
            self._plan(gpu)
        while self._coming or self._heap:
            while self._heap and self._heap[0][0] != self._due[self._heap[0][1]]:
                heapq.heappop(self._heap)
            due_ns = self._heap[0][0] if self._heap else NEVER_NS
            comes_ns = self._coming[0].starts_ns if self._coming else NEVER_NS
            if self._tick_ns <= min(due_ns, comes_ns) and self._coming:
                self._read_weights(comes_ns)
            elif self._coming and comes_ns <= due_ns:
                self._arrive(self._coming.popleft())
                if progress is not None and len(self._coming) % 64 == 0:
                    progress(1.0 - len(self._coming) / total)
            elif self._heap:
                self._step(heapq.heappop(self._heap)[1])
        if progress is not None:
            progress(1.0)
        return self._pooled()

    def _pooled(self) -> Measures:
        pooled = Measures([])
        for simulation in self.gpus:
            pooled.add(simulation.result())
        pooled.place_wait_ns.extend(self.place_waits_ns)
        return pooled

    # --- time -----------------------------------------------------------------------------------

    def _plan(self, gpu: int) -> None:
        simulation = self.gpus[gpu]
        idle = not simulation.unfinished and not simulation.processes
        self._due[gpu] = NEVER_NS if idle else simulation.next_ns
        if not idle:
            heapq.heappush(self._heap, (self._due[gpu], gpu))

    def _step(self, gpu: int) -> None:
        simulation = self.gpus[gpu]
        before = simulation.unfinished
        simulation.step()
        if simulation.unfinished < before and self._unplaced:
            session = self._unplaced.popleft()
            self.place_waits_ns.append(simulation.now_ns - session.starts_ns)
            simulation.add(replace(session, starts_ns=simulation.now_ns))
        self._plan(gpu)

    def _arrive(self, session: SessionTrace) -> None:
        now_ns = session.starts_ns
        gpu = self._choose(now_ns)
        if gpu is None:
            self._unplaced.append(session)
            return
        self.gpus[gpu].add(session)
        self._plan(gpu)

    # --- rules ----------------------------------------------------------------------------------

    def _choose(self, now_ns: int) -> int | None:
        """Return the GPU for a session that comes now; ``None``: every place is taken."""
        free = [node for node in range(self._cluster.nodes) if self._free(node)]
        if not free or self._unplaced:
            return None
        if self._placing is Placing.PACK:
            return self._free(free[0])[0]
        if self._placing is Placing.SPREAD:
            node = min(free, key=self._sessions_of_node)
            return min(self._free(node), key=self._sessions)
        node = min(free, key=self._weights.__getitem__)
        return min(
            self._free(node), key=lambda gpu: (self._wait_ns(gpu, now_ns), self._sessions(gpu))
        )

    def _read_weights(self, comes_ns: int) -> None:
        """Read the weights now, unless the next session, at ``comes_ns``, comes after the next
        reading."""
        now_ns, self._tick_ns = self._tick_ns, self._tick_ns + self._cluster.weight_delay_ns
        if comes_ns < self._tick_ns:
            for node in range(self._cluster.nodes):
                wait_ns = min(self._wait_ns(gpu, now_ns) for gpu in self._gpus(node))
                self._weights[node] = (wait_ns, self._sessions_of_node(node))

    def _wait_ns(self, gpu: int, now_ns: int) -> int:
        wait_ns = self.gpus[gpu].scheduler.newcomer_wait_ns(now_ns)
        return NEVER_NS if wait_ns is None else wait_ns

    def _gpus(self, node: int) -> range:
        return range(node * self._cluster.gpus, (node + 1) * self._cluster.gpus)

    def _free(self, node: int) -> list[int]:
        return [gpu for gpu in self._gpus(node) if self._sessions(gpu) < self._cluster.places]

    def _sessions(self, gpu: int) -> int:
        return self.gpus[gpu].unfinished

    def _sessions_of_node(self, node: int) -> int:
        return sum(map(self._sessions, self._gpus(node)))
