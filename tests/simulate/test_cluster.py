"""Tests of clusters: which node and GPU a new session gets."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_work import cell, session, trace

from kiwi_core.simulate.cluster import ClusterSimulation, arrivals
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.measure import Measures, summarise
from kiwi_core.simulate.model import (
    NO_FAULTS,
    Cluster,
    FaultRates,
    Placing,
    Setup,
    SimulatedMachine,
)
from kiwi_core.simulate.trace import SessionTrace
from kiwi_core.units import GIB, NS_PER_S


def played(
    cluster: Cluster, coming: list[SessionTrace], machine: SimulatedMachine, placing: Placing
) -> ClusterSimulation:
    simulation = ClusterSimulation(
        cluster, coming, machine, Setup(placing=placing), seed=0, faults=NO_FAULTS
    )
    simulation.measures = simulation.run()  # type: ignore[attr-defined]
    return simulation


def where(simulation: ClusterSimulation) -> list[int]:
    """Return how many sessions each GPU has had."""
    return [len(gpu.measures.users) for gpu in simulation.gpus]


def some(number: int, *, every_s: float = 1.0, gpu_s: float = 100.0) -> list[SessionTrace]:
    """Return sessions of one cell, one after the other."""
    return [
        session(f"s{n}", cell(gpu_s, gib=10.0), starts_s=n * every_s, leaves_s=0.0)
        for n in range(number)
    ]


def test_packing_fills_one_gpu_after_the_other(exact: SimulatedMachine) -> None:
    cluster = Cluster(nodes=2, gpus=2, places=3)
    assert where(played(cluster, some(7), exact, Placing.PACK)) == [3, 3, 1, 0]


def test_spreading_takes_the_node_and_gpu_with_the_fewest_sessions(exact: SimulatedMachine) -> None:
    cluster = Cluster(nodes=2, gpus=2, places=3)
    assert where(played(cluster, some(6), exact, Placing.SPREAD)) == [2, 1, 2, 1]


def test_the_shortest_wait_is_found_where_sessions_are_many_but_idle(
    exact: SimulatedMachine,
) -> None:
    """Node 0 has one session that computes, node 1 has two that think."""
    busy = session("busy", cell(1000.0), starts_s=0.0, leaves_s=0.0)
    thinkers = [
        session(f"t{n}", cell(1.0, think_s=2000.0, gib=10.0), starts_s=61.0 + n, leaves_s=0.0)
        for n in range(2)
    ]
    last = session("last", cell(1.0), starts_s=200.0, leaves_s=0.0)
    cluster = Cluster(nodes=2, gpus=1, weight_delay_ns=30 * NS_PER_S)
    coming = [busy, *thinkers, last]
    by_wait = played(cluster, coming, exact, Placing.WAIT)
    assert where(by_wait) == [1, 3]
    by_number = played(cluster, coming, exact, Placing.SPREAD)
    assert by_number.gpus[0].measures.users[-1] == "t1"  # beside the one that computes


def test_weights_that_are_out_of_date_send_all_to_one_node(exact: SimulatedMachine) -> None:
    coming = some(8, every_s=10.0)
    fresh = Cluster(nodes=4, gpus=1, weight_delay_ns=NS_PER_S)
    stale = Cluster(nodes=4, gpus=1, weight_delay_ns=1000 * NS_PER_S)
    assert min(where(played(fresh, coming, exact, Placing.WAIT))) >= 1
    assert where(played(stale, coming, exact, Placing.WAIT)) == [8, 0, 0, 0]


def test_a_session_without_a_place_waits_until_one_leaves(exact: SimulatedMachine) -> None:
    cluster = Cluster(nodes=1, gpus=1, places=1)
    simulation = played(cluster, some(3, every_s=10.0), exact, Placing.PACK)
    summary = summarise(simulation.measures)  # type: ignore[attr-defined]
    assert summary.cells == 3
    waits_s = [ns / NS_PER_S for ns in simulation.place_waits_ns]
    assert waits_s == pytest.approx([90.0, 180.0], abs=1.0)  # each cell takes 100 s
    assert (summary.place_wait_s.n, summary.all.wait_s.max) == (2, pytest.approx(0.0, abs=0.1))


def test_one_gpu_is_simulated_as_it_is_alone(exact: SimulatedMachine) -> None:
    sessions = [
        session(name, *[cell(20.0, think_s=5.0)] * 5, starts_s=starts_s, leaves_s=0.0)
        for name, starts_s in (("a", 0.0), ("b", 3.0), ("c", 4.0))
    ]
    alone = Simulation(trace(*sessions), exact, Setup()).run()
    cluster = Cluster(nodes=1, gpus=1)
    for placing in Placing:
        together = played(cluster, sessions, exact, placing).measures  # type: ignore[attr-defined]
        assert isinstance(together, Measures)
        assert together.wait_ns == alone.wait_ns
        assert together.response_ns == alone.response_ns


@pytest.mark.parametrize("placing", list(Placing))
def test_all_work_is_done_whoever_places_it(placing: Placing) -> None:
    cluster = Cluster(nodes=2, gpus=2, places=6, stay_hours=0.3)
    coming = arrivals("6+1", cluster, hours=0.9, sessions=None, seed=1, total_bytes=80 * GIB)
    assert len(coming) == 4 * 3 * 7
    simulation = ClusterSimulation(
        cluster, coming, SimulatedMachine(), Setup(placing=placing), seed=1,
        faults=FaultRates(refuse=0.02, hang=0.01, kill=0.02),
    )  # fmt: skip
    measures = simulation.run()
    cells = Counter(one.gpu_ns for life in coming for one in life.cells)
    done = Counter(measures.gpu_ns)
    assert not done - cells  # a killed kernel's cell is lost, none is done twice
    assert done.total() + measures.killed == cells.total()
    assert all(gpu.unfinished == gpu.processes == 0 for gpu in simulation.gpus)


def test_a_cluster_is_a_column_of_a_comparison() -> None:
    def plan(placing: Placing) -> Plan:
        return Plan(
            work=Work(mix="small", hours=0.2), setup=Setup(placing=placing),
            cluster=Cluster(nodes=2, gpus=1, stay_hours=0.1),
        )  # fmt: skip

    shares: list[float] = []
    plans = [plan(Placing.PACK), plan(Placing.SPREAD)]
    two = run(plans, jobs=2, progress=shares.append)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert [one.gpu_ns for one in two] == [one.gpu_ns for one in run(plans)]
