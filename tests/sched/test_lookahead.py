"""Tests of the copy of the scheduler that runs ahead: it decides like the scheduler, and does not
change it."""

from __future__ import annotations

import pickle

import pytest
from simulation import Simulation
from world import World

from kiwi_core.sched import events as ev
from kiwi_core.sched.forecast import simulated_future
from kiwi_core.sched.forecast.futures import CROWD, GRANTS, futures, tail_ns
from kiwi_core.sched.forecast.simulated_future import NEVER_NS, SimulatedFuture, burst_ns
from kiwi_core.sched.forecast.state_copy import copy_of
from kiwi_core.sched.model.session import RoomRequest, Session
from kiwi_core.sched.model.state import State
from kiwi_core.sched.policy import names
from kiwi_core.states import Notice
from kiwi_core.units import NS_PER_S, SessionId

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
S = NS_PER_S


def usual(*lengths_s: float) -> Session:
    session = Session(A)
    session.durations_ns.extend(round(length * S) for length in lengths_s)
    return session


def state(world: World) -> State:
    return world.scheduler._st


def two(line: str = "gpu 10 tq=30 ram=64") -> World:
    """Return a world: a runs with 8 GiB, in bursts of 5 s; b waits with as much in system RAM."""
    world = World(line)
    world.do(0, "a joins; b joins paged-out 8; memory")
    for n in range(1, 6):
        world.do(10 * n, f"a asks {n}; memory a=8")
        world.do(10 * n + 5, f"a ends {n}")
    world.do(61, "a asks 6")
    world.do(62, "b asks 1")
    return world


def swap_s(world: World) -> float:
    speed = state(world).speed
    return (speed.out_ns(8 << 30) + speed.in_ns(8 << 30)) / S


# --- lengths --------------------------------------------------------------------------------------


def test_a_burst_takes_as_long_as_those_that_took_longer_than_it_has() -> None:
    session = usual(1, 2, 4, 8, 100)
    assert burst_ns(session, 0, 0.4) == 4 * S
    assert burst_ns(session, 3 * S, 0.5) == 100 * S
    assert burst_ns(session, 4 * S, 0.1) == 8 * S


def test_one_longer_than_ever_does_not_end_by_itself() -> None:
    """The forecast guesses no end: the end of the turn by the policy counts."""
    assert burst_ns(usual(1, 2, 4), 5 * S, 0.1) == NEVER_NS
    assert burst_ns(usual(1, 2, 4), 3 * S, 0.9) == NEVER_NS
    assert burst_ns(usual(), 0, 0.1) == NEVER_NS
    assert burst_ns(usual(2), 0, 0.5) == NEVER_NS, "a single one says little"


# --- runs -----------------------------------------------------------------------------------------


def test_the_next_waiter_waits_for_the_burst_and_two_moves() -> None:
    world = two()
    found = futures(state(world), 62 * S).waits_ns
    assert set(found) == {B}
    assert found[B][0] / S == pytest.approx(4 + swap_s(world), abs=0.1)


def test_behind_a_burst_longer_than_ever_the_end_of_the_quantum_is_the_answer() -> None:
    world = two()
    found = futures(state(world), 70 * S).waits_ns[B]
    assert len(found) > 1
    assert all(ns / S == pytest.approx(21 + swap_s(world), abs=0.1) for ns in found)


def test_a_hung_driver_call_is_waited_for_by_nobody() -> None:
    world = two()
    world.do(66, "a ends 6")
    world.do(200, "#1 overdue")
    assert futures(state(world), 201 * S).waits_ns == {}


def test_a_session_that_leaves_waits_for_its_memory() -> None:
    world = World("gpu 10")
    world.do(0, "a joins paged-out 8; memory")
    world.do(1, "a detaches")
    found = futures(state(world), S).waits_ns
    assert set(found[A]) == {state(world).speed.in_ns(8 << 30)}


def test_nobody_knows_when_it_is_never_serialised_and_nothing_ends() -> None:
    world = World("gpu 10 mode=off")
    world.do(0, "a joins; b joins paged-out 8; memory; a asks 1; memory a=8; b asks 1")
    assert futures(state(world), S).waits_ns == {}


def test_a_run_has_an_end() -> None:
    world = two()
    assert SimulatedFuture(state(world), 62 * S, 0.5, spread=True).waits_ns(9, steps_max=1) == {}


def test_a_long_queue_is_run_to_its_head_and_summed_to_its_tail() -> None:
    world = two()
    for number in range(12):
        world.do(62 + number / 100, f"w{number} joins; w{number} asks 1")
    found = futures(state(world), 63 * S)
    assert len(found.waits_ns) == GRANTS
    assert found.has_tail
    further = tail_ns(state(world), found.waits_ns)
    assert len(further) == 13 - GRANTS
    tail = [further[SessionId(f"w{n}")] for n in range(12) if f"w{n}" in further]
    assert tail == sorted(tail)
    assert tail[0] > 0


def test_a_crowd_is_run_less_far() -> None:
    world = two()
    for number in range(CROWD + 4):
        world.do(62 + number / 100, f"w{number} joins; w{number} asks 1")
    found = futures(state(world), 63 * S)
    assert {len(every) for every in found.waits_ns.values()} == {1}
    assert len(found.waits_ns) == GRANTS // 2
    assert len(tail_ns(state(world), found.waits_ns)) == CROWD + 5 - GRANTS // 2


def test_a_turn_in_the_tail_takes_the_usual_burst_and_the_swap() -> None:
    world = World("gpu 10 tq=30 ram=640 policy=round-robin")
    world.do(0, "memory; a joins; a asks 1; memory a=8")
    for number in range(8):
        world.do(1, f"w{number} joins paged-out 8; w{number} asks 1")
    state(world).sessions[SessionId("w5")].durations_ns.append(5 * S)
    further = tail_ns(state(world), {SessionId("w4")})
    first_s, second_s, third_s = (further[SessionId(f"w{n}")] / S for n in (5, 6, 7))
    assert second_s - first_s == pytest.approx(5 + swap_s(world)), "the usual burst"
    assert third_s - second_s == pytest.approx(30 + swap_s(world)), "the quantum"


def test_where_nobody_takes_turns_the_tail_waits_for_the_moves_only() -> None:
    world = World("gpu 10 mode=off ram=640 policy=round-robin")
    world.do(0, "memory; a joins; a asks 1; memory a=8")
    for number in range(8):
        world.do(1, f"w{number} joins paged-out 8; w{number} asks 1")
    further = tail_ns(state(world), {SessionId("w4")})
    moves_s = [further[SessionId(f"w{n}")] / S for n in (5, 6, 7)]
    assert moves_s == pytest.approx([n * state(world).speed.in_ns(8 << 30) / S for n in (1, 2, 3)])


def test_a_blocked_waiter_in_the_tail_gets_no_forecast() -> None:
    world = two()
    for number in range(8):
        world.do(62 + number / 100, f"w{number} joins; w{number} asks 1")
    stuck = state(world).queue[SessionId("w7")]
    stuck.blocked = Notice.BLOCKED_REFUSED
    found = futures(state(world), 63 * S)
    assert stuck.id not in tail_ns(state(world), found.waits_ns)


# --- the copy -------------------------------------------------------------------------------------


@pytest.mark.seeded
@pytest.mark.parametrize("policy", names())
def test_running_ahead_changes_nothing_whatever_goes_on(policy: str) -> None:
    """Checked in worlds with faults."""
    looked = found = 0
    for seed in range(3):
        world = Simulation(seed)
        world.tell(ev.SettingsChanged(policy=policy))
        for step in range(260):
            world._step()
            st = world.scheduler._st
            if step % 8 or not st.queue:
                continue
            before = pickle.dumps(st)
            ahead_of = futures(st, world.now_ns)
            assert pickle.dumps(st) == before
            assert set(ahead_of.waits_ns) <= set(st.queue)
            assert all(ns >= 0 for every in ahead_of.waits_ns.values() for ns in every)
            looked += 1
            found += bool(ahead_of.waits_ns)
    assert looked > 12
    assert found > 6


@pytest.mark.parametrize("policy", names())
def test_the_copy_shares_nothing_that_changes(policy: str) -> None:
    world = two(f"gpu 10 tq=30 ram=64 policy={policy}")
    st = state(world)
    twin = copy_of(st)
    assert [*twin.queue] == [B]
    assert [*twin.runners] == [A]
    assert twin.sessions[A] is not st.sessions[A]
    assert twin.runners[A] is twin.sessions[A]
    assert twin.sessions[A].durations_ns == st.sessions[A].durations_ns
    assert twin.sessions[A].durations_ns is not st.sessions[A].durations_ns
    assert [s.id for s in twin.policy.order(twin)] == [B]
    assert next(iter(twin.policy.order(twin))) is twin.sessions[B]
    assert twin.policy is not st.policy
    assert twin.usage is not st.usage


def test_sessions_that_nothing_refers_to_are_not_copied() -> None:
    world = two()
    world.do(63, "c joins")
    assert set(copy_of(state(world)).sessions) == {A, B}


def test_requests_for_room_are_copied() -> None:
    st = state(two())
    st.room_requests[A, 1] = RoomRequest(st.sessions[A], 1, 1 << 30, 62 * S)
    twin = copy_of(st)
    assert twin.room_requests[A, 1].session is twin.sessions[A]
    assert twin.room_requests[A, 1] is not st.room_requests[A, 1]


# --- a newcomer -----------------------------------------------------------------------------------


def newcomer_s(world: World) -> float | None:
    wait_ns = world.scheduler.newcomer_wait_ns(world.now_ns)
    return None if wait_ns is None else wait_ns / S


def test_a_newcomer_to_an_empty_gpu_does_not_wait() -> None:
    world = World("gpu 10")
    world.do(0, "memory")
    assert newcomer_s(world) == 0.0


def test_a_newcomer_waits_until_idle_memory_is_out() -> None:
    """Nobody knows what it needs, so it gets the whole GPU."""
    world = World("gpu 10")
    world.do(0, "a joins; memory; a asks 1; memory a=8")
    world.do(9, "a ends 1")
    assert newcomer_s(world) == pytest.approx(state(world).speed.out_ns(8 << 30) / S, abs=0.1)


def test_a_newcomer_waits_for_those_ahead_of_it() -> None:
    world = two("gpu 10 tq=30 ram=64 policy=round-robin")
    until_b_has_had_its_turn_s = 4 + swap_s(world) + 30
    assert newcomer_s(world) == pytest.approx(
        until_b_has_had_its_turn_s + state(world).speed.out_ns(8 << 30) / S, abs=0.5
    )


def test_the_question_changes_nothing() -> None:
    world = two()
    before = pickle.dumps(state(world).sessions)
    assert newcomer_s(world) is not None
    assert pickle.dumps(state(world).sessions) == before
    world.scheduler.check()


def test_behind_more_waiters_than_a_run_can_see_the_turns_that_are_left_are_added_up() -> None:
    world = World("gpu 10 tq=30 ram=2000 policy=round-robin")
    names_ = [f"s{n}" for n in range(60)]
    world.do(0, "; ".join(f"{name} joins paged-out 8" for name in names_) + "; memory")
    for name in names_:
        world.do(1, f"{name} asks 1")
    assert newcomer_s(world) == pytest.approx(60 * (30 + swap_s(world)), rel=0.02)


def test_nobody_knows_a_newcomers_wait_if_it_is_held_up_at_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_future, "STEPS_MAX", 1)
    world = World("gpu 10 tq=10 ram=1")
    world.do(0, "a joins; memory; a asks 1; memory a=6")
    assert newcomer_s(world) is None


def test_nobody_knows_a_newcomers_wait_behind_a_call_that_hangs() -> None:
    world = two()
    world.do(66, "a ends 6")
    world.do(200, "#1 overdue")
    assert newcomer_s(world) is None


def test_newcomers_that_are_expected_before_have_their_turns_first() -> None:
    world = World("gpu 10 tq=30 policy=round-robin")
    world.do(0, "memory")
    waits_ns = [world.scheduler.newcomer_wait_ns(0, before) for before in (0, 1, 2, 99)]
    assert waits_ns[0] == 0
    assert [ns / S for ns in waits_ns[1:3] if ns] == pytest.approx(
        [31, 62], abs=0.1
    )  # turns and their swaps
    assert waits_ns[3] is not None
    assert waits_ns[3] > 400 * S
