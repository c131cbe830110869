"""Tests of the simulator: arithmetic by hand, conservation, and the same result from the same
seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct
from simulated_work import cell, session, trace
from untimed import UNTIMED

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, PageIn, PageOut
from kiwi_core.sched.policy import names
from kiwi_core.simulate.driver import CallVerdict
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.measure import Measures, summarise
from kiwi_core.simulate.mixes import MIXES, generate
from kiwi_core.simulate.model import FaultRates, Setup, SimulatedMachine
from kiwi_core.simulate.process import SimulatedProcess
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, MIB, NS_PER_S, seconds_to_ns

RR = Setup(policy="round-robin")


def run(work: Trace, machine: SimulatedMachine, setup: Setup = RR, **more: object) -> Measures:
    return Simulation(work, machine, setup, checks=True, **more).run()  # type: ignore[arg-type]


def seconds(values: object) -> list[float]:
    return [round(value / NS_PER_S, 6) for value in values]  # type: ignore[attr-defined]


# --- by hand ------------------------------------------------------------------------------------


def test_one_cell_alone_waits_for_nothing(exact: SimulatedMachine) -> None:
    measures = run(trace(session("a", cell(12.0, think_s=3.0, cpu_s=2.0))), exact)
    assert seconds(measures.wait_ns) == [0.0]
    assert seconds(measures.response_ns) == [12.0]
    assert measures.makespan_ns == seconds_to_ns(17.0)
    assert measures.swaps == 0


@pytest.mark.parametrize(
    ("leaves_s", "wait_s", "swaps"), [(None, 6.1, 1), (0.5, 0.0, 0), (2.0, 6.1, 1)]
)
def test_a_session_that_leaves_makes_room(
    exact: SimulatedMachine, leaves_s: float | None, wait_s: float, swaps: int
) -> None:
    """A is done after 10 s, B asks after 11. If A leaves during its page-out, it ends when that is
    done."""
    first = session("a", cell(10.0), leaves_s=leaves_s)
    measures = run(trace(first, session("b", cell(10.0), starts_s=11.0)), exact)
    assert seconds(measures.wait_ns) == [0.0, wait_s]
    assert measures.swaps == swaps


def test_many_who_come_and_go_need_no_more_system_ram_than_some(exact: SimulatedMachine) -> None:
    little = replace(exact, host_budget_bytes=130 * GIB)
    come = [session(f"s{n}", cell(5.0), starts_s=20.0 * n, leaves_s=30.0) for n in range(12)]
    assert run(trace(*come), little).cells == 12
    stay = [replace_struct(one, leaves_ns=None) for one in come]
    with pytest.raises(CallerError, match="nobody can go on"):
        run(trace(*stay), little)


def test_two_jobs_that_do_not_fit_take_turns(exact: SimulatedMachine) -> None:
    """A move of 60 GiB takes 6.1 s.

    A runs 0 to 30, moves out until 36.1; B runs until 66.1, moves out until 72.2; A moves in until
    78.3, runs until 108.3, out until 114.4; B in until 120.5, runs its last 10 s until 130.5. Its
    place is kept for a switch there and back (24.4 s), as its user may run another cell. It is
    moved out until 161.0; A is in at 167.1 and runs its last 40 s."""
    work = trace(session("a", cell(100.0)), session("b", cell(40.0), starts_s=1.0))
    measures = run(work, exact)
    assert list(measures.session) == [1, 0]
    assert seconds(measures.wait_ns) == [35.1, 0.0]
    assert seconds(measures.response_ns) == [129.5, 207.1]
    assert measures.swaps == 7
    assert measures.suspensions == 3
    assert measures.swapping_ns == seconds_to_ns(7 * 6.1)
    summary = summarise(measures)
    assert summary.useful_share == pytest.approx(140.0 / 207.1)
    assert summary.short.wait_s.n == 0


def test_short_cells_wait_less_under_interactive(exact: SimulatedMachine) -> None:
    """After a swap of 12.2 s the long one computes again, and 3.9 s later the next short cell
    comes. It waits until the long one's quantum of 30 s is over (interactive: until it has run as
    long as the swap took), and then for a swap."""
    work = trace(session("long", cell(300.0)), session("short", *[cell(2.0, think_s=16.1)] * 5))
    at_once = replace(DEFAULTS, tenancy_trips=0)  # nobody's place is kept
    fair, quick = (
        run(work, exact, Setup(policy=name, config=at_once))
        for name in ("round-robin", "interactive")
    )
    assert seconds(fair.wait_ns) == [30.0 - 16.1 + 6.1, *[30.0 - 3.9 + 12.2] * 4, 0.0]
    assert seconds(quick.wait_ns) == [6.1, *[12.2 - 3.9 + 12.2] * 4, 0.0]


def test_the_quantum_is_at_least_a_round_trip(exact: SimulatedMachine) -> None:
    """At 1 GiB/s a round trip of 60 GiB takes over two minutes: once that is known, nobody is
    stopped after 30 s again."""
    slow = replace(exact, out_bytes_per_s=1.0 * GIB, in_bytes_per_s=1.0 * GIB)
    work = trace(session("a", cell(100.0)), session("b", cell(110.0), starts_s=1.0))
    measures = run(work, slow)
    # A stops at 30 (nothing is known yet), is out at 90.1; B runs 110 s in one piece until 200.1.
    assert seconds(measures.response_ns)[0] == 199.1
    assert measures.suspensions == 1


def test_two_that_fit_share_the_time(exact: SimulatedMachine) -> None:
    """B's first cell may need everything, so A is moved out (2.1 s) and comes back with its own
    next cell. Then both are known and ask at 100 s: they run at once, at half speed each."""
    warm = [cell(1.0, gib=20.0) for _ in range(4)]
    back, last = cell(1.0, gib=20.0, think_s=60.0), cell(10.0, gib=20.0, think_s=32.9)
    work = trace(
        session("a", *warm, back, last),
        session("b", *warm, cell(10.0, gib=20.0, think_s=68.9), starts_s=25.0),
    )
    measures = run(work, exact)
    assert seconds(measures.wait_ns[-2:]) == [0.0, 0.0]
    assert seconds(measures.response_ns[-2:]) == [20.0, 20.0]
    alone = run(work, replace(exact, contention=0.0))
    assert seconds(alone.response_ns[-2:]) == [10.0, 10.0]


def test_the_end_of_a_burst_waits_for_the_look_at_its_memory(exact: SimulatedMachine) -> None:
    """As in the daemon, the next one begins only when it is known what this one has taken."""
    work = trace(session("a", cell(10.0, gib=30.0)), session("b", cell(1.0), starts_s=1.0))
    quick = run(work, exact)
    late = run(work, replace(exact, look_ns=NS_PER_S))
    assert late.wait_ns[1] - quick.wait_ns[1] == NS_PER_S


def test_a_growing_session_is_seen_to_grow(exact: SimulatedMachine) -> None:
    seen: list[ev.MemoryObserved] = []

    def record(now_ns: int, event: ev.Event, actions: object) -> None:
        if isinstance(event, ev.MemoryObserved) and event.resident_bytes:
            seen.append(event)

    work = trace(session("a", cell(10.0, gib=10.0), cell(10.0, gib=30.0)))
    run(work, exact, record=record)
    held = [event.resident_bytes["a"] // GIB for event in seen]
    assert held == [0, 10, 10, 30]  # as it joins, while it runs, as its burst ends, while …
    assert seen[-1].free_bytes == 50 * GIB


# --- what must always hold ----------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
def test_all_that_was_asked_is_given(mix: str) -> None:
    work = generate(mix, hours=1.0, seed=3)
    measures = run(work, SimulatedMachine(), seed=3)
    conserved(work, measures)
    assert measures.cells == sum(len(s.cells) for s in work.sessions)
    assert measures.makespan_ns >= max(map(gpu_ns, work.sessions))


def gpu_ns(session: SessionTrace) -> int:
    return sum(cell.gpu_ns for cell in session.cells)


def conserved(work: Trace, measures: Measures) -> None:
    """Compare to a few nanoseconds per event, which rounding of times may add."""
    asked_ns = sum(map(gpu_ns, work.sessions)) - measures.killed_work_ns
    rounding_ns = 20 * measures.events
    assert measures.given_ns == pytest.approx(asked_ns, abs=rounding_ns)
    assert measures.busy_ns <= measures.given_ns + rounding_ns
    assert measures.busy_ns <= measures.wanted_ns + rounding_ns
    # The makespan ends with the last cell that finished; a killed one may have run on.
    killed_ns = sum(map(gpu_ns, work.sessions)) if measures.killed else 0
    assert measures.wanted_ns <= measures.makespan_ns + killed_ns + rounding_ns
    assert measures.cells + measures.killed == sum(len(s.cells) for s in work.sessions)


def test_the_same_seed_gives_the_same_again() -> None:
    work = generate("6+1", hours=0.5, seed=7)
    assert work == generate("6+1", hours=0.5, seed=7)
    assert work != generate("6+1", hours=0.5, seed=8)
    faults = FaultRates(refuse=0.05, hang=0.02, kill=0.02)
    first = run(work, SimulatedMachine(), seed=1, faults=faults)
    assert first == run(work, SimulatedMachine(), seed=1, faults=faults)
    assert first != run(work, SimulatedMachine(), seed=2, faults=faults)


def test_faults_happen_and_nothing_is_lost_by_them() -> None:
    work = generate("heavy", hours=0.5, seed=5)
    measures = run(work, SimulatedMachine(), faults=FaultRates(refuse=0.05, hang=0.02, kill=0.05))
    conserved(work, measures)
    summary = summarise(measures)
    assert summary.refused > 0
    assert summary.hung > 0
    assert summary.killed > 0


class Bounded(Simulation):
    """Check every wait against round robin's stated bound."""

    longest_share = 0.0

    def _ask(self, proc: SimulatedProcess) -> None:
        state = self.scheduler._st
        ahead = len(state.queue) + state.holders + len(state.chosen) + 1
        machine = self._machine
        move_ns = int(80 * GIB * NS_PER_S / machine.out_bytes_per_s / (1 - machine.noise))
        swap_ns = 2 * (move_ns + machine.swap_fixed_ns) + machine.look_ns
        quantum_ns = max(state.turn_settings.tq_ns, swap_ns)
        self.bounds = {**getattr(self, "bounds", {}), proc.id: ahead * (quantum_ns + swap_ns)}
        super()._ask(proc)

    def _granted(self, action: Grant) -> None:
        proc = self._procs[action.session]
        begun = proc.granted_ns
        super()._granted(action)
        if proc.granted_ns != begun:
            share = (proc.granted_ns - proc.asked_ns) / self.bounds[proc.id]
            assert share <= 1.0
            self.longest_share = max(self.longest_share, share)


@pytest.mark.parametrize("gbps", [5, 25])
@pytest.mark.parametrize("mix", ["6+2", "heavy"])
def test_round_robins_bound_holds(mix: str, gbps: int) -> None:
    machine = SimulatedMachine(out_bytes_per_s=gbps * 1e9, in_bytes_per_s=gbps * 1e9)
    simulation = Bounded(generate(mix, hours=1.0, seed=1), machine, RR, seed=1)
    simulation.run()
    assert simulation.longest_share > 0.3  # otherwise the comparison proves little


cells = st.builds(
    Cell,
    think_ns=st.integers(0, 60 * NS_PER_S),
    cpu_ns=st.integers(0, NS_PER_S),
    gpu_ns=st.integers(0, 90 * NS_PER_S),
    peak_bytes=st.integers(0, 79 * 1024).map(lambda mib: mib * MIB),
)
works = st.lists(st.lists(cells, min_size=1, max_size=6), min_size=1, max_size=5).map(
    lambda lives: trace(
        *(
            SessionTrace(
                id=f"s{number}",
                user=f"u{number % 3}",
                starts_ns=0,
                cells=tuple(life),
                leaves_ns=(None, 0, 5 * NS_PER_S)[number % 3],
            )
            for number, life in enumerate(lives)
        )
    )
)


@settings(UNTIMED, max_examples=60)
@given(
    works,
    st.sampled_from(list(AntiThrash)),
    st.sampled_from([FaultRates(), FaultRates(refuse=0.2, hang=0.1, kill=0.1)]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_trace_comes_to_its_end(
    work: Trace, mode: AntiThrash, faults: FaultRates, contention: float
) -> None:
    machine = SimulatedMachine(contention=contention)
    setup = Setup(policy="round-robin", anti_thrash=mode)
    simulation = Simulation(work, machine, setup, faults=faults, checks=True)
    measures = simulation.run()
    conserved(work, measures)
    assert 0 <= simulation.free_bytes <= machine.total_bytes
    held = sum(proc.resident_bytes for proc in simulation._procs.values())
    moving = sum(
        proc.flight.moved_bytes
        for proc in simulation._procs.values()
        if proc.flight is not None
        and isinstance(proc.flight.action, PageIn)
        and proc.flight.verdict is CallVerdict.DONE
    )
    assert simulation.free_bytes + held + moving == machine.total_bytes


def test_what_was_read_while_a_call_hung_is_read_anew() -> None:
    """Otherwise memory that a killed program has held counts as held outside Kiwi for ever, and
    nobody can go on."""
    idle = Cell(think_ns=0, cpu_ns=0, gpu_ns=0, peak_bytes=0)
    whole = replace_struct(idle, gpu_ns=19_460_054_745, peak_bytes=79 * GIB)
    small = replace_struct(idle, gpu_ns=1, peak_bytes=MIB)
    late = replace_struct(whole, think_ns=17_463_095_706, cpu_ns=NS_PER_S, gpu_ns=994_000_000)
    last = replace_struct(idle, think_ns=2_919_999, peak_bytes=84_185_972_736)
    almost = replace_struct(whole, gpu_ns=19_460_054_741)
    lives = ((idle, idle), (small, late, last), (whole,), (almost,))
    work = trace(
        *(
            SessionTrace(id=f"s{n}", user=f"u{n % 3}", starts_ns=0, cells=cells, leaves_ns=leaves)
            for n, (cells, leaves) in enumerate(
                zip(lives, (None, 0, 5 * NS_PER_S, None), strict=True)
            )
        )
    )
    setup = Setup(policy="round-robin", anti_thrash=AntiThrash.ALWAYS)
    faults = FaultRates(refuse=0.2, hang=0.1, kill=0.1)
    Simulation(work, SimulatedMachine(contention=1.0), setup, faults=faults).run()


def test_memory_that_does_not_fit_system_ram_is_an_error_with_a_remedy(
    exact: SimulatedMachine,
) -> None:
    work = trace(session("a", cell(1.0)), session("b", *[cell(1.0)] * 2, starts_s=30.0))
    orders: list[object] = []
    with pytest.raises(CallerError, match="nobody can go on") as raised:
        run(
            work, replace(exact, host_budget_bytes=GIB),
            record=lambda _now, _event, actions: orders.extend(actions),
        )  # fmt: skip
    assert "system RAM" in raised.value.remedy
    assert not any(isinstance(order, PageOut) for order in orders)


def test_an_unknown_policy_is_an_error_with_a_remedy(exact: SimulatedMachine) -> None:
    with pytest.raises(CallerError, match="'best'") as raised:
        run(trace(session("a", cell(1.0))), exact, Setup(policy="best"))
    assert "round-robin" in raised.value.remedy


def test_settings_are_the_schedulers_own(exact: SimulatedMachine) -> None:
    config = replace(DEFAULTS, tq_ns=7 * NS_PER_S)
    setup = Setup(
        policy="round-robin", tq_ns=11 * NS_PER_S, anti_thrash=AntiThrash.ALWAYS, config=config
    )
    scheduler = Simulation(trace(session("a", cell(1.0))), exact, setup).scheduler
    assert scheduler.tq_ns == 11 * NS_PER_S
    assert scheduler.anti_thrash is AntiThrash.ALWAYS


# --- owners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize("by_owner", [True, False])
def test_a_user_of_three_programs_gets_half_beside_a_user_of_one(
    exact: SimulatedMachine, policy: str, by_owner: bool
) -> None:
    """Ada's cell takes 600 s alone, and Bob's three programs compute all the time."""
    bobs = [
        session(f"b{n}", *[cell(400.0, think_s=1.0, gib=30.0)] * 5, user="bob") for n in range(3)
    ]
    work = trace(session("a", cell(600.0, gib=30.0), user="ada", starts_s=5.0), *bobs)
    config = replace(DEFAULTS, turns_by_owner=by_owner)
    setup = Setup(policy=policy, anti_thrash=AntiThrash.ALWAYS, config=config)
    measures = Simulation(work, exact, setup).run()
    (ada_ns,) = (
        response_ns
        for index, response_ns in zip(measures.session, measures.response_ns, strict=True)
        if index == 0
    )
    share = 600.0 * NS_PER_S / ada_ns
    if by_owner:
        assert 0.42 < share < 0.58
    else:
        assert share < 0.32
