"""Places that are kept, and page-outs that give a turn, under each policy.

``scenarios/tenancy.txt`` tells the usual course; ``simulation`` checks the bounds at every event.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import World

from kiwi_core.sched.policy import names
from kiwi_core.sched.rules import tenancy
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures, summarise
from kiwi_core.simulate.model import GB, Setup, SimulatedMachine
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.units import GIB, NS_PER_S, SessionId, seconds_to_ns

POLICIES = pytest.mark.parametrize("policy", names())

SLOW = replace(SimulatedMachine(), out_bytes_per_s=2.3 * GB, in_bytes_per_s=6.0 * GB, noise=0.0)


def crowded(policy: str, more: str = "") -> World:
    """Return a world in which ann has just ended a cell, and the training waits for her room. A
    trip takes 4 s. Ann's last three pauses were 1 s each."""
    world = World(f"gpu 10 tq=30 tenancy=6 policy={policy}{more}")
    world.do(0, "train joins; ann joins; memory")
    world.do(1, "train asks 1")
    world.do(2, "memory train=7")
    world.do(3, "ann asks 1")
    world.do(31, "time")
    world.do(32, "#1 out 7 1s")
    world.do(33, "memory ann=7")
    world.do(34, "ann ends 1")
    for burst in range(2, 5):
        assert world.do(33 + 2 * (burst - 1), f"ann asks {burst}")[0].startswith("grant ann")
        world.do(34 + 2 * (burst - 1), f"ann ends {burst}")
    assert world.now_ns == 40 * NS_PER_S
    return world


def kept_until_s(world: World) -> float | None:
    kept = world.scheduler._st.keeps
    return None if kept is None else kept.until_ns / NS_PER_S


def goes_out(answers: list[str]) -> bool:
    return any("page out ann (room for" in answer for answer in answers)


@POLICIES
def test_a_place_is_kept_somewhat_longer_than_the_known_pauses(policy: str) -> None:
    world = crowded(policy)
    assert kept_until_s(world) == 41.5
    assert world.scheduler.place_kept(40 * NS_PER_S) == ("ann", 1.5 * NS_PER_S)
    assert not goes_out(world.do(41.4, "time"))
    assert goes_out(world.do(41.6, "time"))
    assert kept_until_s(world) is None
    assert world.scheduler.place_kept(world.now_ns) is None


@POLICIES
def test_a_tenant_that_comes_back_goes_first(policy: str) -> None:
    world = crowded(policy)
    assert world.do(41, "ann asks 5")[0].startswith("grant ann burst 5")


@POLICIES
def test_no_place_is_kept_longer_than_a_tenancy(policy: str) -> None:
    """It began at 32 s, with her first cell, and is TQ: six trips are less."""
    world = crowded(policy)
    for number in range(14):
        at_s = 41 + 1.5 * number
        world.do(at_s, f"ann asks {number + 5}")
        world.do(at_s + 0.5, f"ann ends {number + 5}")
    assert world.now_ns == 61 * NS_PER_S
    assert kept_until_s(world) == 62.0
    assert goes_out(world.do(62, "time"))


@POLICIES
def test_no_place_is_kept_where_memory_fits(policy: str) -> None:
    world = crowded(policy)
    world.do(40.2, "memory ann=2")
    assert kept_until_s(world) is None


@POLICIES
def test_no_place_is_kept_for_somebody_who_is_kept_out(policy: str) -> None:
    world = crowded(policy)
    assert "→ #2 page out ann" in f"→ {world.do(40.5, 'ann suspended boss')[0]}"


def test_a_session_that_goes_on_to_leave_gets_its_room_at_once() -> None:
    world = crowded("interactive")
    answers = world.do(40.5, "train detaches")
    assert goes_out(answers)


@POLICIES
def test_who_goes_out_for_a_waiter_does_not_precede_it(policy: str) -> None:
    world = crowded(policy)
    world.do(41.6, "time")
    world.do(42, "ann asks 5")
    world.do(42.5, "#2 out 7 1s")
    assert world.do(43.5, "#3 in 7 1s")[-1].startswith("grant train")


@POLICIES
def test_that_ends_with_the_wait(policy: str) -> None:
    world = crowded(policy)
    world.do(41.6, "time; train ends 1; ann asks 5")
    assert world.scheduler._st.out_for == {}
    assert "page in ann" in world.do(42.5, "#2 out 7 1s")[0]


def test_three_that_went_out_for_each_other_are_all_served() -> None:
    world = World("gpu 10 policy=round-robin")
    world.do(0, "a joins; b joins; c joins; d joins; memory")
    world.do(1, "d asks 1")
    world.do(2, "memory d=7")
    world.do(3, "a asks 1; b asks 1; c asks 1")
    st = world.scheduler._st
    a, b, c = (st.sessions[SessionId(name)] for name in "abc")
    st.goes_out_for(a, b)
    assert [one.id for one in tenancy.order(st)] == ["b", "a", "c"]
    st.goes_out_for(b, c)
    assert [one.id for one in tenancy.order(st)] == ["c", "b", "a"]
    st.goes_out_for(c, a)
    assert [one.id for one in tenancy.order(st)] == ["a", "b", "c"]


def test_nobody_precedes_the_levels_if_all_old_waiters_are_blocked() -> None:
    world = World("gpu 10 policy=interactive mode=always")
    world.do(0, "a joins; b joins; c joins; memory")
    world.do(1, "c asks 1; a asks 1; b asks 1; a stops by hand; b stops by hand")
    world.do(900, "time")
    assert [one.id for one in tenancy.order(world.scheduler._st)] == ["a", "b"]
    assert world.scheduler.view(world.now_ns).holders == ("c",)


# --- what it is good for --------------------------------------------------------------------------


def notebook(name: str, gib: float, cells: int, think_s: float, cell_s: float) -> SessionTrace:
    one = Cell(
        think_ns=seconds_to_ns(think_s),
        cpu_ns=0,
        gpu_ns=seconds_to_ns(cell_s),
        peak_bytes=int(gib * GIB),
    )
    return SessionTrace(id=name, user=name, starts_ns=0, cells=(one,) * cells)


def lost_s(policy: str, *sessions: SessionTrace) -> tuple[float, Measures]:
    trace = Trace(name="test", total_bytes=80 * GIB, sessions=sessions)
    measures = Simulation(trace, SLOW, Setup(policy=policy), checks=True).run()
    return summarise(measures).lost_s, measures


@POLICIES
def test_two_notebooks_that_do_not_fit_do_not_thrash(policy: str) -> None:
    """With a switch for each cell, they would lose more than an hour and a half."""
    ann, bob = (notebook(name, 50, 100, think_s=5, cell_s=2) for name in ("ann", "bob"))
    lost, measures = lost_s(policy, ann, bob)
    assert lost < 2 * 100 * 5 + 8 * 35
    assert measures.swaps < 20


@POLICIES
def test_short_cells_beside_a_training_cost_few_switches(policy: str) -> None:
    train = notebook("train", 60, 1, think_s=1, cell_s=7200)
    ann = notebook("ann", 40, 100, think_s=4, cell_s=1)
    lost, measures = lost_s(policy, train, ann)
    assert lost < 100 * 4 + 6 * 65
    assert measures.swaps < 20


@POLICIES
def test_a_user_who_thinks_longer_than_a_switch_takes_keeps_nobody_waiting(policy: str) -> None:
    train = notebook("train", 20, 1, think_s=1, cell_s=12_000)
    ann = notebook("ann", 70, 30, think_s=300, cell_s=1)
    lost, _ = lost_s(policy, train, ann)
    assert lost < 30 * 60 + 3 * 70
