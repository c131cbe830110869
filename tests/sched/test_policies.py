"""Tests of the policies: choosing one, their bounds, priority classes, and adding one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from world import World

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant
from kiwi_core.sched.model import usage
from kiwi_core.sched.model.policy import Policy, TurnSettings
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.model.usage import RecentUsage
from kiwi_core.sched.policy import check_name, names, registry
from kiwi_core.sched.policy.interactive import Interactive
from kiwi_core.sched.replay import JournalHeader, Replay, decode_line, encode_line
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.model import GB, Setup, SimulatedMachine
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.states import Notice, Priority
from kiwi_core.units import GIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from kiwi_core.sched.model.policy import PolicyContext

A, B = SessionId("a"), SessionId("b")


# --- choosing -----------------------------------------------------------------------------------


def test_the_default_is_named_first() -> None:
    assert names() == ("interactive", "round-robin")
    assert Scheduler(GIB, host_budget_bytes=GIB).policy == "interactive"
    assert all(policy.summary for policy in registry.POLICIES.values())


def test_an_unknown_policy_is_an_error_that_lists_those_that_there_are() -> None:
    with pytest.raises(CallerError, match="'best'") as raised:
        check_name("best")
    assert raised.value.code == "unknown-policy"
    assert "interactive, round-robin" in raised.value.remedy
    with pytest.raises(CallerError, match="'best'"):
        Scheduler(GIB, host_budget_bytes=GIB, policy="best")


def test_the_policy_is_changed_while_sessions_run_and_wait() -> None:
    """Round robin gives A its 30 s; interactive lets B in when A leaves B's level."""
    world = World("gpu 10 tq=30")
    world.do(0, "memory outside=0; a joins; b joins; c joins")
    world.do(0, "a asks 1; b asks 1")
    assert world.scheduler.next_deadline_ns() == 30 * NS_PER_S
    world.do(1, "policy interactive")
    assert world.scheduler.view(world.now_ns).policy == world.scheduler.policy == "interactive"
    assert world.scheduler.next_deadline_ns() == 10 * NS_PER_S
    world.do(2, "policy interactive; tq 60")
    assert world.scheduler.next_deadline_ns() == 20 * NS_PER_S
    world.do(3, "policy round-robin")
    assert world.scheduler.next_deadline_ns() == 60 * NS_PER_S


def test_a_journal_from_before_there_were_policies_is_round_robin_s() -> None:
    config = '"config":{}'
    line = (
        '{"journal":"header","total_bytes":1,"tq_ns":1,"anti_thrash":"on","host_budget_bytes":1,'
        f'"gpu_uuid":"","wall_time_s":0,"first_op":1,{config}}}'
    )
    header = decode_line(line.encode())
    assert isinstance(header, JournalHeader)
    assert header.policy == "round-robin"
    assert Replay(header).scheduler.policy == "round-robin"
    again = decode_line(encode_line(header))
    assert again == header


# --- bounds -------------------------------------------------------------------------------------


def test_round_robin_promises_one_turn_of_each_that_is_ahead() -> None:
    policy, settings = registry.make("round-robin"), TurnSettings(30 * NS_PER_S, 0, 2.0)
    assert policy.bound_ns(settings, 3, NS_PER_S) == 3 * 31 * NS_PER_S
    # Nobody is suspended before it has run twice as long as the swap.
    assert policy.bound_ns(settings, 3, 20 * NS_PER_S) == 3 * (40 + 20) * NS_PER_S


def test_interactive_promises_a_turn_of_each_once_a_wait_is_old() -> None:
    policy, settings = registry.make("interactive"), TurnSettings(30 * NS_PER_S, 0, 1.0)
    bounds_ns = [policy.bound_ns(settings, others, NS_PER_S) for others in range(20)]
    assert bounds_ns == sorted(bounds_ns)
    of_each_ns = bounds_ns[-1] - bounds_ns[-2]
    assert of_each_ns >= 30 * NS_PER_S, "a turn, and what it waits longer before it is old"
    assert policy.bound_ns(settings, 19, 90 * NS_PER_S) > bounds_ns[-1] + 19 * 90 * NS_PER_S


def test_the_first_waiter_that_waits_for_room_gains_nothing_by_ageing() -> None:
    world = World("gpu 10 tq=30 policy=interactive")
    world.do(0, "a joins paged-out 6; memory outside=8; a asks 1")
    world.do(1000, "time")
    assert world.look("a, queue, wake") == "a waiting, queue a blocked-outside, wake never"


def test_one_at_a_time_without_swaps_nobody_waits_longer_for_them() -> None:
    world = World("gpu 10 tq=30 mode=always policy=interactive")
    world.do(0, "a joins; b joins; memory; a asks 1; memory a=1; a ends 1; memory a=1; b asks 1")
    world.do(1, "#1 out 1 1s")
    assert world.scheduler._st.typical_swap_ns() > 0, "B's need is not known yet"
    world.do(2, "memory b=1; b ends 1; memory b=1; b asks 2; a asks 2")
    assert world.look("holders") == "holders b"
    assert world.scheduler._st.typical_swap_ns() == 0


# --- adding one ---------------------------------------------------------------------------------


def test_a_policy_is_added_by_registering_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest waiter goes first. All else is unchanged: room, quanta and failures."""
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))

    @registry.register
    class LastFirst(Policy):
        name = "last-first"
        summary = "for those who come late"

        def order(self, context):  # type: ignore[no-untyped-def]
            return reversed(context.queue.values())

    assert names() == ("interactive", "last-first", "round-robin")
    assert LastFirst().bound_ns(TurnSettings(NS_PER_S, 0, 1.0), 3, NS_PER_S) is None
    world = World("gpu 10 policy=last-first")
    world.do(0, "memory outside=0; a joins; b joins; c joins")
    world.do(1, "a asks 1; b asks 1; c asks 1")
    assert any("grant c burst 1" in answer for answer in world.do(2, "a ends 1"))


def test_a_policy_without_an_order_serves_in_order_of_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))

    @registry.register
    class Plain(Policy):
        name = "plain"
        summary = "first come, first served"

    world = World("gpu 10 policy=plain")
    world.do(0, "memory outside=0; a joins; b joins; c joins")
    world.do(1, "a asks 1; c asks 1; b asks 1")
    assert any("grant c burst 1" in answer for answer in world.do(2, "a ends 1"))
    assert any("grant b burst 1" in answer for answer in world.do(3, "c ends 1"))


# --- what interactive does ----------------------------------------------------------------------


def three(policy: str = "interactive") -> World:
    """Return a world of three sessions, each with most of a GPU of 10 GiB; a swap takes 2 s."""
    world = World(f"gpu 10 tq=30 policy={policy}")
    world.do(0, "memory outside=0; a joins paged-out 6; b joins paged-out 6; c joins paged-out 6")
    return world


def play(world: World, at_s: float, words: str) -> list[str]:
    """Feed ``words``, let all operations succeed at once (moves report 1 s), and return the
    actions in words."""
    answers = world.do(at_s, words)
    for answer in tuple(answers):
        if answer.startswith("#"):
            number, verb = answer.split()[0], answer.split(" ", 1)[1]
            outcome = "resumed"
            if verb.startswith("suspend"):
                held = world.scheduler.view(world.now_ns).session(SessionId(verb.split()[1]))
                assert held is not None
                outcome = f"held {held.record.resident_bytes / GIB}"
            if verb.startswith("page"):
                outcome = "in 6 1s" if verb.startswith("page in") else "out 6 1s"
            answers += play(world, at_s, f"{number} {outcome}")
    return answers


def granted(answers: list[str]) -> list[str]:
    return [answer.split()[1] for answer in answers if answer.startswith("grant")]


def test_a_short_cell_does_not_wait_for_the_end_of_a_long_quantum() -> None:
    world = three()
    assert granted(play(world, 1, "a asks 1")) == ["a"]
    play(world, 100, "b asks 1")
    # A has run long enough for the swap, and is on a higher level: it makes way at once.
    assert world.scheduler.view(world.now_ns).holders == ("b",)
    # B, which has had nothing, keeps the GPU although A, which has had much, waits.
    assert play(world, 110, "time") == []
    assert world.scheduler.view(world.now_ns).holders == ("b",)
    assert granted(play(world, 112, "b ends 1")) == ["a"]
    # Now A runs for 2 s in any case.
    assert granted(play(world, 113, "b asks 2")) == []
    assert world.scheduler.next_deadline_ns() == 114 * NS_PER_S
    assert granted(play(world, 114, "time")) == ["b"]


def test_equals_take_turns_and_who_has_had_more_is_last() -> None:
    world = three()
    play(world, 1, "a asks 1; b asks 1; c asks 1")
    # After 10 s each is on the second level, behind those that have had nothing.
    assert granted(play(world, 10.9, "time")) == []
    assert granted(play(world, 11, "time")) == ["b"]
    assert granted(play(world, 21, "time")) == ["c"]
    assert world.scheduler.next_deadline_ns() == 36 * NS_PER_S
    assert granted(play(world, 36, "time")) == ["a"]
    assert world.scheduler.next_deadline_ns() == 71 * NS_PER_S  # when it has had 45 s


def test_turns_are_short_where_nothing_has_to_move() -> None:
    """A and B are in the GPU; C waits, too, but does not fit beside them."""
    world = World("gpu 10 tq=30 policy=interactive")
    world.do(0, "memory outside=0; a joins; b joins; c joins paged-out 4")
    world.do(1, "a asks 1; memory a=4; a ends 1; a asks 2; a ends 2; b asks 1")
    world.do(2, "#1 out 4 1s; memory b=4; b ends 1; b asks 2; b ends 2; a asks 3")
    world.do(3, "#2 in 4 1s; a ends 3")
    assert granted(world.do(4, "a asks 4; c asks 1; b asks 3")) == ["a"]
    assert world.scheduler.next_deadline_ns() == 7 * NS_PER_S  # a tenth of TQ
    assert granted(play(world, 7, "time")) == ["b"]
    assert granted(play(world, 10, "time")) == ["a"]


def test_an_old_waiter_goes_first_and_is_protected() -> None:
    """A training waits while two other sessions take turns with ever new cells."""
    world = three()
    play(world, 1, "a asks 1")
    play(world, 200, "b asks 1")
    at_s, burst = 200.0, 1
    while world.scheduler.view(world.now_ns).holders != ("a",):
        at_s += 5
        burst += 1
        first, second = ("b", "c") if burst % 2 else ("c", "b")
        play(world, at_s, f"{first} asks {burst}; {second} ends {burst - 1}")
        assert at_s < 400
    waited_s = at_s - 200
    assert 120 <= waited_s <= 130  # 4 TQ; more than 3 × 1 × (TQ + swap)
    ahead = "b" if burst % 2 else "c"
    wakes_s = (world.scheduler.next_deadline_ns() or 0) / NS_PER_S
    assert wakes_s == at_s + 20, ahead
    assert granted(play(world, wakes_s, "time")) == [ahead]


def test_a_waiter_of_a_higher_level_waits_until_the_runner_would_be_behind_it() -> None:
    world = three()
    play(world, 1, "a asks 1")
    play(world, 100, "b asks 1")  # A is stopped, on the last level
    # B would be served before A again until it has had 45 s of the GPU, as A has.
    assert world.scheduler.next_deadline_ns() == 145 * NS_PER_S
    assert granted(play(world, 145, "time")) == ["a"]


def test_blocked_ones_do_not_keep_the_next_old_one_back() -> None:
    world = three()
    play(world, 1, "a asks 1; b asks 1; c asks 1")
    (order,) = [a for a in world.do(2, "a ends 1") if a.startswith("#")][:1]
    world.do(3, f"{order.split()[0]} out 6 1s" if "page out" in order else "time")
    refused = max(world.orders)
    world.do(4, f"#{refused} refuses driver")
    assert world.scheduler.view(world.now_ns).queue
    play(world, 300, "time")
    world.do(301, "time")
    assert world.scheduler.view(world.now_ns).holders or world.orders


def test_only_the_first_of_an_owners_many_waiters_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bob's waiter is old before those of Alice, who came first: hers wait for her turns, too."""
    world = World("gpu 10 tq=1 policy=interactive")
    hers = [f"a{number}" for number in range(60)]
    world.do(0, "memory; b joins of bob; " + "; ".join(f"{name} joins of alice" for name in hers))
    world.do(1, "; ".join(f"{name} asks 1" for name in hers) + "; b asks 1")
    st, looked_at = world.scheduler._st, []
    old_at_ns = Interactive._old_at_ns

    def noted(self: Interactive, context: PolicyContext, waiter: Session) -> int:
        looked_at.append(waiter.id)
        return old_at_ns(self, context, waiter)

    monkeypatch.setattr(Interactive, "_old_at_ns", noted)
    st.now_ns, st.wake_ns = st.policy._soonest_old_at_ns(st, st.sessions[B]), None
    assert next(iter(st.policy.order(st))).id == B
    first = next(iter(st.queue.values()))
    assert st.policy.reorders_at_ns(st) == old_at_ns(st.policy, st, first) > st.now_ns
    assert set(looked_at) == {first.id, B}


def test_time_changes_nothing_where_each_waiter_is_old_and_blocked() -> None:
    world = World("gpu 10 tq=1 policy=interactive")
    world.do(0, "memory; a joins; b joins")
    world.do(1, "a asks 1; memory a=8; b asks 1")
    st = world.scheduler._st
    waiter = st.sessions[B]
    st.now_ns, st.wake_ns = st.policy.old_at_ns(st, waiter, st.sessions[A]) + 1, None
    waiter.block(Notice.BLOCKED_REFUSED, "another session cannot be moved")
    assert st.policy.reorders_at_ns(st) is None


def test_waiters_that_a_runner_hinders_do_not_each_ask_when_the_order_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer may look at the whole queue."""
    world = World("gpu 10 tq=30 policy=interactive")
    crowd = [f"w{number}" for number in range(30)]
    world.do(0, "memory; a joins; a unguarded; a asks 1; memory a=8")
    world.do(1, "; ".join(f"{name} joins; {name} asks 1" for name in crowd))
    asked = []

    def noted(self: Interactive, context: PolicyContext) -> int | None:
        asked.append(context.now_ns)
        return reorders_at_ns(self, context)

    reorders_at_ns = Interactive.reorders_at_ns
    monkeypatch.setattr(Interactive, "reorders_at_ns", noted)
    told = world.do(100, "time")
    assert sum("blocked-unguarded" in one for one in told) == len(crowd)
    assert len(asked) <= 1


def test_what_nobody_else_wanted_is_not_held_against_anybody() -> None:
    """A has computed alone for an hour, in short cells. After that it ranks no lower than B."""
    world = three()
    for number in range(1, 400):
        play(world, 10 * number, f"a asks {number}")
        play(world, 10 * number + 9, f"a ends {number}")
    play(world, 5000, "b asks 1")
    play(world, 5100, "a asks 400")
    assert world.scheduler.view(world.now_ns).holders == ("a",)


def test_lanes_that_do_not_agree_with_the_queue_are_found() -> None:
    world = three()
    play(world, 1, "a asks 1; b asks 1; b priority training; c asks 1")
    st = world.scheduler._st
    st.sessions[B].share = 0.0
    with pytest.raises(AssertionError, match="sharing"):
        st.policy.check(st)
    st.sessions[SessionId("c")].level = 1
    with pytest.raises(AssertionError, match="lane 0"):
        st.policy.check(st)


def test_turns_that_do_not_agree_with_the_queue_are_found() -> None:
    world = three("round-robin")
    play(world, 1, "a asks 1; b asks 1; c asks 1")
    st = world.scheduler._st
    del st.queue[B]
    with pytest.raises(AssertionError, match="turns"):
        st.policy.check(st)


# --- usage --------------------------------------------------------------------------------------


def test_usage_fades_and_sums_stay_right() -> None:
    book = RecentUsage()
    a, b = Session(A), Session(B)
    everybody = (a, b)
    for session in everybody:
        book.wants(session)
    now_ns = 10**15
    book.somebody_waits(now_ns)
    assert book.fair_ns(now_ns) == 0
    rng = random.Random(1)
    for _ in range(200):
        session = rng.choice(everybody)
        session.began_ns = book.clock_ns(now_ns)
        now_ns += rng.randrange(usage.HALF_LIFE_NS)
        book.add(session, book.clock_ns(now_ns) - session.began_ns, 1, now_ns, everybody)
        both = sum(s.had for s in everybody) * book.fading(now_ns)
        assert book.fair_ns(now_ns) == pytest.approx(both / 2)
        assert 0 <= book.favoured_ns(session, now_ns) <= session.had * book.fading(now_ns)
    had_ns = a.had * book.fading(now_ns)
    assert a.had * book.fading(now_ns + usage.HALF_LIFE_NS) == pytest.approx(had_ns / 2)
    book.rests(a)
    book.rests(b)
    assert book.fair_ns(now_ns) == book.had == 0.0


# --- fair shares --------------------------------------------------------------------------------


def crowd(cells_s: list[float], hours: float) -> Trace:
    rng = random.Random(7)
    sessions = []
    for number, cell_s in enumerate(cells_s):
        size = int(rng.uniform(0.3, 0.8) * 80 * GIB)
        cells = tuple(
            Cell(think_ns=NS_PER_S // 10, cpu_ns=0, gpu_ns=int(cell_s * NS_PER_S), peak_bytes=size)
            for _ in range(int(hours * 3600 / cell_s) + 1)
        )
        sessions.append(SessionTrace(id=f"s{number}", user=f"u{number}", starts_ns=0, cells=cells))
    return Trace(name="crowd", total_bytes=80 * GIB, sessions=tuple(sessions))


def shares(
    trace: Trace, hours: float, policy: str = "interactive", **priorities: Priority
) -> list[float]:
    """Return each session's share of the time that all held the GPU."""
    machine = SimulatedMachine(out_bytes_per_s=25.0 * GB, in_bytes_per_s=25.0 * GB)
    simulation = Simulation(trace, machine, Setup(policy=policy), seed=1)
    simulation.begin()
    while simulation.now_ns < hours * 3600 * NS_PER_S:
        simulation.step()
        if priorities and simulation.now_ns > NS_PER_S:
            for session, priority in priorities.items():
                event = ev.PriorityChanged(session=SessionId(session), priority=priority)
                simulation._tell(event)
            priorities = {}
    held = [one.held_ns for one in simulation.scheduler.view(simulation.now_ns).sessions]
    return [one / sum(held) for one in held]


@pytest.mark.parametrize("cell_s", [2.0, 8.0, 55.0])
def test_chopping_work_into_short_cells_gains_little(cell_s: float) -> None:
    found = shares(crowd([cell_s, *[600.0] * 5], 3.0), 3.0)
    assert found[0] <= 1.2 / 6
    assert min(found[1:]) >= 0.7 / 6


@pytest.mark.parametrize("policy", names())
def test_weights_decide_how_the_long_ones_share(policy: str) -> None:
    cells = crowd([600.0] * 4, 3.0)
    high, low, *normal = shares(cells, 3.0, policy, s0=Priority.HIGH, s1=Priority.LOW)
    assert high == pytest.approx(2 / 4.5, abs=0.05)
    assert low == pytest.approx(0.5 / 4.5, abs=0.05)
    assert sum(normal) / 2 == pytest.approx(1 / 4.5, abs=0.05)


def test_a_training_has_its_share_however_many_short_cells_there_are() -> None:
    cells = crowd([36_000.0, *[4.0] * 9], 1.0)
    without = shares(cells, 1.0)[0]
    assert shares(cells, 1.0, s0=Priority.TRAINING)[0] >= 0.19
    assert without < 0.15


def test_shares_together_leave_half_to_the_others() -> None:
    cells = crowd([36_000.0] * 4 + [4.0] * 6, 1.0)
    trainings = {f"s{number}": Priority.TRAINING for number in range(4)}
    found = shares(cells, 1.0, **trainings)
    assert 0.42 <= sum(found[:4]) <= 0.62


def test_a_priority_set_in_the_queue_counts_at_once_and_is_told() -> None:
    world = three()
    play(world, 1, "a asks 1; b asks 1")
    world.do(2, "b priority training; b priority training; nobody priority high")
    view = world.scheduler.view(world.now_ns)
    assert view.session(B) is not None
    assert [s.record.priority for s in view.sessions] == [
        Priority.NORMAL, Priority.TRAINING, Priority.NORMAL,
    ]  # fmt: skip
    story = [line.text for line in world.scheduler.story(B)]
    assert "priority is now training" in story
    world.do(3, "a detaches; b detaches")
    joined = ev.SessionJoined(session=SessionId("d"), priority=Priority.HIGH)
    world.scheduler.handle(joined, 4 * NS_PER_S)
    view = world.scheduler.view(4 * NS_PER_S)
    assert view.sessions[-1].record.priority is Priority.HIGH


def test_a_grant_says_the_quantum_of_its_class() -> None:
    world = World("gpu 10 tq=30")
    world.do(0, "memory outside=0; a joins; a priority high")
    (grant,) = world.scheduler.handle(ev.LeaseRequested(session=A, burst=1), NS_PER_S)
    assert isinstance(grant, Grant)
    assert grant.quantum_ns == 60 * NS_PER_S
