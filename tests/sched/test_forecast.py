"""The forecast: a copy that runs ahead and leaves the scheduler as it was, and what it promises."""

from __future__ import annotations

import pickle
import time

import pytest
from simulation import Simulation
from world import World

from kiwi_core.sched import events as ev
from kiwi_core.sched import forecast
from kiwi_core.sched.forecast import Outlook, Run, Wait, burst_ns, copy_of, waits
from kiwi_core.sched.session import Session
from kiwi_core.simulate import engine
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import Machine, Setup
from kiwi_core.units import NS_PER_S, SessionId

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
S = NS_PER_S


def usual(*lengths_s: float) -> Session:
    session = Session(A)
    session.durations_ns.extend(round(length * S) for length in lengths_s)
    return session


def test_a_burst_takes_as_long_as_those_that_took_longer_than_it_has() -> None:
    session = usual(1, 2, 4, 8, 100)
    assert burst_ns(session, 0, 0.5) == 4 * S
    assert burst_ns(session, 3 * S, 0.5) == 8 * S
    assert burst_ns(session, 50 * S, 0.9) == 100 * S
    assert burst_ns(session, 200 * S, 0.5) == 400 * S  # longer than ever: as long again
    assert burst_ns(usual(), 0, 0.5) == forecast.UNKNOWN_BURST_NS
    assert burst_ns(usual(), 0, 0.1) < burst_ns(usual(), 0, 0.9)


def two(line: str = "gpu 10 tq=30 ram=64") -> World:
    """a holds 8 GiB and runs, its bursts last 5 s; b waits with as much in system RAM."""
    world = World(line)
    world.do(0, "a joins; b joins paged-out 8; memory")
    for n in range(1, 6):
        world.do(10 * n, f"a asks {n}; memory a=8")
        world.do(10 * n + 5, f"a ends {n}")
    world.do(61, "a asks 6")
    world.do(62, "b asks 1")
    return world


def state(world: World) -> object:
    return world.scheduler._st


def test_who_comes_next_waits_for_the_burst_and_two_moves() -> None:
    world = two()
    st = world.scheduler._st
    found = waits(st, 62 * S)
    assert set(found) == {B}
    swap_s = (st.speed.out_ns(8 << 30) + st.speed.in_ns(8 << 30)) / S
    assert found[B].expected_ns / S == pytest.approx(4 + swap_s, abs=0.1)
    assert found[B].low_ns <= found[B].expected_ns <= found[B].high_ns


def test_a_second_later_it_is_a_second_less() -> None:
    world = two()
    first = world.scheduler.view(62 * S, ahead=True).queue[0].expected_wait_ns
    later = world.scheduler.view(63 * S, ahead=True).queue[0].expected_wait_ns
    assert first is not None
    assert later is not None
    assert first - later == S


def test_who_is_blocked_is_told_nothing() -> None:
    world = World("gpu 10")
    world.do(0, "a joins paged-out 9; memory outside=8; a asks 1")
    entry = world.scheduler.view(0, ahead=True).queue[0]
    assert entry.blocked is not None
    assert (entry.expected_low_ns, entry.expected_high_ns) == (None, None)


def test_a_hung_driver_call_is_waited_for_by_nobody() -> None:
    world = two()
    world.do(66, "a ends 6")
    world.do(200, "#1 overdue")
    assert waits(world.scheduler._st, 201 * S) == {}


def test_one_that_leaves_waits_for_its_memory() -> None:
    world = World("gpu 10")
    world.do(0, "a joins paged-out 8; memory")
    world.do(1, "a detaches")
    found = waits(world.scheduler._st, S)
    assert found[A].expected_ns == world.scheduler._st.speed.in_ns(8 << 30)


def test_a_long_queue_is_looked_at_less_often_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = two()
    assert Run(world.scheduler._st, 62 * S, 0.5).until_all_are_granted(1) == {}
    monkeypatch.setattr(forecast, "RUNS_MAX", 1)
    found = waits(world.scheduler._st, 62 * S)
    assert found[B].low_ns == found[B].high_ns


# --- the copy -----------------------------------------------------------------------------------


def frozen(st: object) -> bytes:
    """Everything that a scheduler knows."""
    return pickle.dumps(st)


@pytest.mark.parametrize("policy", ["round-robin", "interactive"])
def test_a_forecast_changes_nothing_whatever_goes_on(policy: str) -> None:
    """Over worlds with faults; and each of them has nothing that is another one's."""
    looked = promised = 0
    for seed in range(8):
        world = Simulation(seed)
        world.tell(ev.SettingsChanged(policy=policy))
        for step in range(260):
            world._step()
            if step % 6 or not world.scheduler._st.queue:
                continue
            st = world.scheduler._st
            before = frozen(st)
            found = waits(st, world.now_ns)
            assert frozen(st) == before
            assert set(found) <= set(st.queue)
            assert all(0 <= w.low_ns <= w.expected_ns <= w.high_ns for w in found.values())
            looked += 1
            promised += bool(found)
    assert looked > 60
    assert promised > 30


def test_the_copy_goes_on_as_the_original_does() -> None:
    world = two()
    twin, _ = copy_of(world.scheduler._st)
    assert [*twin.queue] == [B]
    assert [*twin.runners] == [A]
    assert twin.sessions[A] is not world.scheduler._st.sessions[A]
    assert twin.runners[A] is twin.sessions[A]


# --- promises -----------------------------------------------------------------------------------


def test_a_forecast_is_kept_for_a_moment_and_made_anew_when_somebody_comes() -> None:
    world, outlook = two(), Outlook()
    st = world.scheduler._st
    first = outlook.waits(st, 62 * S)
    assert outlook.waits(st, 62 * S + S // 10) == {B: first[B].later(S // 10)}
    world.do(62.11, "c joins; c asks 1")
    assert set(outlook.waits(st, round(62.11 * S))) == {B, C}
    assert Wait(5, 3, 9).later(4) == Wait(1, 0, 5)


def test_what_was_promised_is_compared_with_what_came() -> None:
    world = two()
    look = lambda at_s: world.scheduler.view(round(at_s * S), ahead=True)  # noqa: E731
    promised_ns = look(62).queue[0].expected_wait_ns
    assert promised_ns is not None
    assert (look(62.2).foretold, look(62.2).foretold_well) == (0, 0)
    world.do(66, "a ends 6")
    world.do(69, "#1 out 8 3s")
    world.do(72, "#2 in 8 3s")
    view = look(72.5)
    (kept,) = world.scheduler._outlook.kept
    assert kept == (promised_ns, 10 * S)
    assert view.foretold == 1
    assert view.foretold_well == (abs(promised_ns - 10 * S) <= 2.5 * S)


def test_who_gives_up_or_hardly_waits_is_not_counted() -> None:
    world = two()
    world.scheduler.view(62 * S, ahead=True)
    world.do(64, "b withdraws 1")
    assert world.scheduler.view(65 * S, ahead=True).foretold == 0
    world.do(66, "b asks 2")
    world.scheduler.view(66 * S, ahead=True)
    world.do(67, "b dies")
    assert world.scheduler.view(68 * S, ahead=True).foretold == 0


def test_a_wait_that_nobody_notices_says_nothing() -> None:
    world = World("gpu 10 mode=always")
    world.do(0, "a joins; b joins; memory")
    for n in range(1, 6):
        world.do(n, f"a asks {n}")
        world.do(n + 0.5, f"a ends {n}")
    world.do(10, "a asks 6")
    world.do(10.2, "b asks 1")
    entry = world.scheduler.view(round(10.2 * S), ahead=True).queue[0]
    assert entry.expected_wait_ns == round(0.3 * S)
    world.do(10.5, "a ends 6")
    assert world.scheduler.view(11 * S, ahead=True).foretold == 0


# --- how good they are --------------------------------------------------------------------------


class Foretold(engine.Simulation):
    """Looks at the moment of each request."""

    def begin(self) -> None:
        self.promises: dict[tuple[str, int], tuple[int, int]] = {}
        self.kept: list[tuple[int, int]] = []
        self.cost_s = 0.0
        self.looks = 0
        super().begin()

    def _ask(self, proc: engine.Proc) -> None:
        super()._ask(proc)
        st = self.scheduler._st
        if proc.id in st.queue:
            began_s = time.perf_counter()
            expected_ns = waits(st, self.now_ns)[proc.id].expected_ns
            self.cost_s += time.perf_counter() - began_s
            self.looks += 1
            self.promises[proc.id, proc.burst] = (expected_ns, self.now_ns)

    def _granted(self, action: object) -> None:
        promise = self.promises.pop((action.session, action.burst), None)  # type: ignore[attr-defined]
        if promise is not None:
            self.kept.append((promise[0], self.now_ns - promise[1]))
        super()._granted(action)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "mix", "least"),
    [
        ("round-robin", "notebooks", 0.80),
        ("round-robin", "heavy", 0.72),
        ("interactive", "notebooks", 0.85),
        ("interactive", "heavy", 0.85),
        ("interactive", "6+1", 0.65),
    ],
)
def test_most_waits_are_foretold_when_they_begin(policy: str, mix: str, least: float) -> None:
    """To within two seconds or a quarter, where lengths of cells are drawn anew each time."""
    simulation = Foretold(generate(mix, hours=2, seed=11), Machine(), Setup(policy=policy), seed=11)
    simulation.run()
    long = [(said, took) for said, took in simulation.kept if took > S]
    assert len(long) > 30
    right = sum(abs(said - took) <= max(2 * S, took / 4) for said, took in long)
    assert right / len(long) >= least
