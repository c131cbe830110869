"""Tests of the forecast: its width, its steadiness, its reasons, and its record."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from simulation import Simulation, plan_of
from test_lookahead import B, S, state, swap_s, two
from world import World

from kiwi_core.sched.forecast import shown_forecast
from kiwi_core.sched.forecast.calibration import BOUND_FACTOR, COUNTED, FACTORS, Calibration
from kiwi_core.sched.forecast.futures import GRANTS, Futures, futures
from kiwi_core.sched.forecast.promise import ForecastBasis, Promise
from kiwi_core.sched.forecast.ranges import Estimate, likely, range_max_ns, tolerance_ns
from kiwi_core.sched.forecast.shown_forecast import KEPT_NS
from kiwi_core.sched.model.state import State
from kiwi_core.sched.policy import names
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.sched.view import GpuView, QueueView
from kiwi_core.states import Notice
from kiwi_core.units import SessionId


def seconds(*told: float) -> Estimate:
    low, expected, high = told if len(told) == 3 else told * 3
    return Estimate(round(low * S), round(expected * S), round(high * S))


# --- how exactly ----------------------------------------------------------------------------------


def test_the_same_future_each_time_is_one_figure() -> None:
    assert likely([12 * S] * 3) == seconds(12)
    assert likely([12 * S, 13 * S, 11 * S]) == seconds(12)
    assert likely([9 * S]) == seconds(9)


def test_futures_that_differ_are_a_range_that_is_right_for_all() -> None:
    futures_ns = [5 * S, 8 * S, 14 * S]
    wide = likely(futures_ns)
    assert wide.low_ns < wide.expected_ns < wide.high_ns
    assert all(map(wide.is_right, futures_ns))
    careful = likely(futures_ns, careful=True)
    assert careful.low_ns <= wide.low_ns
    assert careful.high_ns > wide.high_ns


def test_an_outlier_is_left_out() -> None:
    assert likely([20 * S, 21 * S, 22 * S, 600 * S]).high_ns < 30 * S
    assert likely([600 * S, 600 * S, S]) == seconds(600)


@pytest.mark.parametrize("seed", range(10))
def test_a_range_is_never_too_wide_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        futures_ns = [round(rng.lognormvariate(2, 1.5) * S) for _ in range(rng.randint(1, 27))]
        told = likely(futures_ns, careful=rng.random() < 0.5)
        further = told.times(rng.uniform(1, 9))
        for one in (told, further):
            assert 0 <= one.low_ns <= one.expected_ns <= one.high_ns
            assert one.high_ns <= range_max_ns(one.low_ns)
        right = sum(map(told.is_right, futures_ns))
        assert right >= max(sum(abs(ns - f) <= tolerance_ns(f) for f in futures_ns)
                            for ns in futures_ns) * 0.6  # fmt: skip


def test_right_is_within_two_seconds_or_a_quarter() -> None:
    told = seconds(10, 12, 20)
    assert [told.is_right(round(s * S)) for s in (7.9, 8.0, 26.6, 26.8)] == [
        False,
        True,
        True,
        False,
    ]


# --- on what it stands ----------------------------------------------------------------------------


def look(world: World, at_s: float) -> QueueView:
    """Return the entry of b."""
    world.now_ns = round(at_s * S)
    view = world.scheduler.view(world.now_ns, ahead=True)
    return next(entry for entry in view.queue if entry.session == B)


def wait_s(entry: QueueView) -> tuple[float, float, float]:
    assert entry.expected_low_ns is not None
    assert entry.expected_wait_ns is not None
    assert entry.expected_high_ns is not None
    waits = entry.expected_low_ns, entry.expected_wait_ns, entry.expected_high_ns
    return tuple(ns / S for ns in waits)  # type: ignore[return-value]


def test_a_holder_with_regular_bursts_gives_a_figure() -> None:
    world = two()
    low, expected, high = wait_s(look(world, 62))
    assert low == expected == high == pytest.approx(4 + swap_s(world), abs=0.1)


def test_what_may_still_be_is_not_ruled_out() -> None:
    """The high end falls no further than the turn may still last, if it was that high before."""
    standing = ForecastBasis(0, 0, (), 0)
    promise = Promise(("p", False), 0, 0, seconds(2, 9, 20), 1, 1, standing,
                              seconds(2, 9, 20), 0, *[seconds(2, 9, 20)] * 2, 0)  # fmt: skip
    promise.renew(seconds(1), 14 * S, standing._replace(now_ns=S, holders=frozenset({B})))
    assert promise.told(S) == seconds(1, 1, 14)


def test_a_figure_falls_at_once_only_where_people_see_why() -> None:
    """A figure that is far too long runs down faster than the clock. If the place, the holder or
    the settings have changed, the new figure is shown at once."""
    standing = ForecastBasis(0, 1, (), 0)
    for change in ({}, {"ahead": 0}, {"holders": frozenset({B})}, {"settings": ("x",)}):
        one = Promise(("p", False), 0, 0, seconds(60), 1, 1, standing,
                              seconds(60), 0, *[seconds(60)] * 2, 0)  # fmt: skip
        for n in range(1, 21):
            before_ns = one.told(n * S // 4).expected_ns
            one.renew(seconds(10).later(n * S // 4), 0, standing._replace(now_ns=n * S // 4))
            assert one.told(n * S // 4).expected_ns >= before_ns - 2 * S
        assert 20 * S < one.told(5 * S).expected_ns < 50 * S, "on its way down"
        one.renew(seconds(3), 0, standing._replace(now_ns=5 * S, **change))
        assert (one.told(5 * S) == seconds(3)) == bool(change)


def test_a_second_later_it_is_a_second_less() -> None:
    world = two()
    first, later = wait_s(look(world, 62)), wait_s(look(world, 63))
    assert first[1] - later[1] == pytest.approx(1)


def test_a_longer_burst_than_ever_lets_the_figure_stand_still_then_says_why() -> None:
    """The figure stands still for up to a second, since the burst may end at any moment. Then the
    end of the quantum is shown, with a reason, and from there on the figure only falls."""
    world = two()
    told = [look(world, 62 + n / 2) for n in range(40)]
    waits = [wait_s(entry)[1] for entry in told]
    rises = [n for n, (a, b) in enumerate(pairwise(waits)) if b > a + 1e-9]
    (rise,) = rises
    assert 66 <= 62 + (rise + 1) / 2 <= 69
    assert [entry.expected_why for entry in told] == [""] * (rise + 1) + ["longer than usual"] * (
        39 - rise
    )
    at_s = 62 + (rise + 1) / 2
    assert waits[rise + 1] == pytest.approx(91 - at_s + swap_s(world), abs=0.1)


def test_a_longer_quantum_is_told_with_the_reason() -> None:
    world = two("gpu 10 tq=12 ram=64")
    first = look(world, 70)
    assert first.expected_why == ""
    world.do(70.5, "tq 600")
    assert wait_s(look(world, 70.5))[2] <= wait_s(first)[2]
    later = look(world, 71.6)
    assert later.expected_why == "the settings were changed"
    assert wait_s(later)[0] > 500
    world.do(72, "tq 12")
    assert wait_s(look(world, 72))[2] < 5 + swap_s(world)


def test_a_stopped_burst_that_newcomers_overtake_is_told_an_upper_bound() -> None:
    """While it is first, the bound is the rest of the holder's turn and the switch. Once newcomers
    go first, it allows for them, and says why it is longer."""
    world = stopped()
    low_s, _, before_s = wait_s(look(world, 61))
    assert low_s == 0
    world.do(61.1, "c joins; c asks 1; d joins; d asks 1; e joins; e asks 1")
    look(world, 61.5)
    after = look(world, 63)
    assert before_s < 50
    assert wait_s(after)[2] > before_s
    assert after.expected_why == "others go first"


def test_a_bound_covers_almost_all_earlier_waits_of_its_kind() -> None:
    record = Calibration()
    assert record.bound([20 * S]).high_ns == round(21 * S * BOUND_FACTOR)
    for n in range(COUNTED):
        record.learn(promise(20), (20 if n % 20 else 62) * S)
    assert record.bound([10 * S, 20 * S]) == (10 * S, 20 * S, 63 * S)
    for _ in range(COUNTED):
        record.learn(promise(20), 1 * S)
    assert record.bound([20 * S]).high_ns == 21 * S, "never less than what is foreseen"


def stopped() -> World:
    """Return a world with the interactive policy in which b was stopped in mid-burst and waits."""
    world = World("gpu 10 tq=30 ram=64 policy=interactive")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "b asks 1; memory b=8")
    world.do(2, "a asks 1")
    world.do(60, "time; #1 out 8 1s; memory a=8")
    assert state(world).queue[B].mid_burst
    return world


def test_many_who_go_first_are_the_reason() -> None:
    world = stopped()
    before_s = wait_s(look(world, 61))[2]
    crowd = [f"c{n}" for n in range(40)]
    world.do(61.1, "; ".join(f"{id_} joins; {id_} asks 1" for id_ in crowd))
    for n in range(8):
        after = look(world, 63 + n)
    assert wait_s(after)[2] > before_s
    assert after.expected_why == "others go first"


def test_a_move_that_goes_wrong_is_the_reason() -> None:
    shown, before = seconds(10), ForecastBasis(0, 1, ("round-robin",), 0)
    promise = Promise(("p", False), 0, 0, shown, 1, 1, before, shown, 0, shown, shown, 0)
    for at_s in (1, 2):
        promise.renew(seconds(40), 0, before._replace(now_ns=at_s * S, troubles=1))
    assert promise.why == "a move of memory went wrong"


def test_what_contradicts_for_a_moment_only_is_not_told() -> None:
    shown = seconds(10)
    standing = ForecastBasis(0, 0, (), 0)
    promise = Promise(("p", False), 0, 0, shown, 1, 1, standing, shown, 0, shown, shown, 0)
    promise.renew(seconds(40), 0, standing._replace(now_ns=1 * S))
    promise.renew(seconds(9), 0, standing._replace(now_ns=1 * S))
    promise.renew(seconds(40), 0, standing._replace(now_ns=2 * S))
    assert promise.told(2 * S) == seconds(8)
    assert promise.why == ""
    promise.renew(seconds(40), 0, standing._replace(now_ns=3 * S))
    assert promise.told(3 * S) == seconds(40)
    assert promise.why


def test_a_blocked_waiter_gets_no_forecast() -> None:
    world = World("gpu 10")
    world.do(0, "a joins; b joins paged-out 9; memory outside=8; b asks 1")
    entry = look(world, 0)
    assert entry.blocked is not None
    told = entry.expected_low_ns, entry.expected_wait_ns, entry.expected_high_ns
    assert told == (None, None, None)


def test_a_session_that_gets_blocked_has_no_figure_not_even_a_cached_one() -> None:
    world = two()
    assert look(world, 62).expected_wait_ns is not None
    state(world).queue[B].blocked = Notice.BLOCKED_REFUSED
    assert look(world, 62.1).expected_wait_ns is None
    assert look(world, 63).expected_wait_ns is None
    state(world).queue[B].blocked = None
    assert look(world, 64).expected_wait_ns is not None


def test_nobody_can_tell_any_more_when_a_driver_call_hangs() -> None:
    world = two()
    look(world, 62)
    world.do(66, "a ends 6")
    world.do(200, "#1 overdue")
    assert look(world, 201).expected_wait_ns is None


def test_nobody_can_tell_when_no_turn_ends_by_itself() -> None:
    """A program without a gate that has never ended a burst is not stopped."""
    world = World("gpu 10 tq=10")
    world.do(0, "a joins; b joins; memory outside=0")
    world.do(1, "a asks 1")
    world.do(2, "memory a=8; a unguarded")
    world.do(3, "b asks 1")
    entry = look(world, 5)
    assert entry.expected_wait_ns is None
    assert entry.blocked is None


def test_the_tail_of_a_long_queue_is_told_longer_waits() -> None:
    world = two()
    for number in range(12):
        world.do(62 + number / 100, f"w{number} joins; w{number} asks 1")
    view = world.scheduler.view(63 * S, ahead=True)
    waits = [entry.expected_wait_ns for entry in view.queue]
    assert len(waits) == 13 > GRANTS
    assert None not in waits
    assert waits == sorted(waits)  # type: ignore[type-var]
    assert len(set(waits)) == 13
    state(world).queue[SessionId("w9")].blocked = Notice.BLOCKED_REFUSED
    for at_s in (63.3, 64.5):
        view = world.scheduler.view(round(at_s * S), ahead=True)
        told = [entry.expected_wait_ns for entry in view.queue if entry.session != "w9"]
        assert None not in told
        assert told == sorted(told)  # type: ignore[type-var]


def test_the_tail_waits_longer_than_the_longest_wait_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is first in the present order may wait longest: the order changes with time."""
    waits = {B: [500 * S], SessionId("w0"): [20 * S]}
    monkeypatch.setattr(shown_forecast, "futures", lambda *_: Futures(waits, {}, has_tail=True))
    world = two()
    for number in range(4):
        world.do(62 + number / 100, f"w{number} joins; w{number} asks 1")
    queue = world.scheduler.view(63 * S, ahead=True).queue
    told_ns = {entry.session: entry.expected_wait_ns or 0 for entry in queue}
    assert told_ns["w0"] < told_ns[B] < min(told_ns[f"w{n}"] for n in (1, 2, 3))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the times at which the forecast ran ahead."""
    found: list[int] = []

    def counted(st: State, now_ns: int) -> Futures:
        found.append(now_ns)
        return futures(st, now_ns)

    monkeypatch.setattr(shown_forecast, "futures", counted)
    return found


def test_forecasts_are_few_however_many_readers_ask(looks: list[int]) -> None:
    world = two()
    for n in range(200):
        at_s = 62 + n / 100
        if n % 10 == 0:
            world.do(at_s, f"n{n} joins")
        look(world, at_s)
    assert 6 <= len(looks) <= 9
    for n in range(len(looks) - 4):
        assert looks[n + 4] - looks[n] >= S


def test_a_change_that_people_see_makes_a_forecast_at_once(looks: list[int]) -> None:
    world = two()
    for n in range(100):
        world.do(62 + n / 100, f"n{n} joins; n{n} asks 1")
        look(world, 62 + n / 100)
        look(world, 62 + n / 100 + 0.005)
    assert len(looks) == 100


def test_a_figure_falls_together_with_what_explains_it(looks: list[int]) -> None:
    """This holds however many forecasts came just before: later, users would not see why the figure
    falls."""
    world = two()
    for n in range(8):
        world.do(62 + n / 10, f"n{n} joins; n{n} asks 1; n{n} withdraws 1")
        look(world, 62 + n / 10)
    world.do(62.79, "last joins; last asks 1")
    before = look(world, 62.79)
    world.do(62.8, "a ends 6")
    at_once, later = look(world, 62.8), look(world, 63.8)
    assert looks[-1] == round(63.8 * S)
    assert wait_s(before)[1] - wait_s(at_once)[1] > 3
    assert wait_s(at_once)[1] - wait_s(later)[1] < 1.5


def test_a_forecast_is_cached_for_a_moment_and_counts_down() -> None:
    world = two()
    first = look(world, 62)
    later = world.scheduler.view(62 * S + KEPT_NS // 2, ahead=True).queue[0]
    assert first.expected_wait_ns is not None
    assert later.expected_wait_ns == first.expected_wait_ns - KEPT_NS // 2


# --- what came ------------------------------------------------------------------------------------


def test_the_first_forecast_is_compared_with_the_wait() -> None:
    world = two()
    entry = look(world, 62)
    world.do(66, "a ends 6")
    world.do(69, "#1 out 8 3s")
    world.do(72, "#2 in 8 3s")
    view = world.scheduler.view(round(72.5 * S), ahead=True)
    ((first, took_ns),) = world.scheduler._forecast.kept
    assert (first.expected_ns, took_ns) == (entry.expected_wait_ns, 10 * S)
    assert (view.foretold, view.foretold_well) == (1, int(first.is_right(10 * S)))


def test_waits_that_were_given_up_or_died_do_not_count() -> None:
    world = two()
    look(world, 62)
    world.do(64, "b withdraws 1")
    assert world.scheduler.view(65 * S, ahead=True).foretold == 0
    world.do(66, "b asks 2")
    look(world, 66)
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
    assert wait_s(look(world, 10.2))[1] == pytest.approx(0.3)
    world.do(10.5, "a ends 6")
    assert world.scheduler.view(11 * S, ahead=True).foretold == 0


def promise(expected_s: float) -> Promise:
    first, ns = seconds(expected_s), round(expected_s * S)
    standing = ForecastBasis(0, 0, (), 0)
    return Promise(("p", False), 0, 0, first, ns, ns, standing, first, 0, first, first, 0)


def test_waits_that_take_twice_as_long_as_foreseen_are_foretold_so() -> None:
    record = Calibration()
    for n in range(FACTORS + 1):
        assert record.likely([20 * S] * 3, 0) == seconds(20) or n >= FACTORS
        record.learn(promise(20), 41 * S)
    assert record.likely([20 * S] * 3, 0) == seconds(40)


def test_a_wait_that_outlasts_the_short_ones_is_not_told_to_be_short() -> None:
    """Nine holders ended their turns early. The tenth computes on: the forecast is as short only
    until this wait has lasted as long as those."""
    record = Calibration()
    for _ in range(FACTORS):
        record.learn(promise(600), 2 * S)
    assert record.likely([600 * S], S) == seconds(30), "it may still be one of those"
    assert record.likely([598 * S], 2 * S) == seconds(598)


def test_waits_that_took_longer_than_foreseen_count_however_long_this_one_lasts() -> None:
    record = Calibration()
    for _ in range(FACTORS):
        record.learn(promise(20), 41 * S)
    assert record.likely([20 * S], 500 * S) == seconds(40)


def test_the_whole_turn_of_a_holder_who_computes_on_is_told() -> None:
    """Nine newcomers end their first turns soon after b came. The tenth computes on: within seconds
    b's forecast is the whole turn, with the reason, and never again less than its rest."""
    world = World("gpu 10 mode=always tq=600")
    world.do(0, "b joins; memory")
    for number in range(1, FACTORS + 1):
        at_s = number * 5
        world.do(at_s, f"h{number} joins; h{number} asks 1")
        world.do(at_s + 1, f"b asks {number}")
        look(world, at_s + 1)
        world.do(at_s + 3, f"h{number} ends 1")
        world.do(at_s + 4, f"b ends {number}")
    at_s += 5
    world.do(at_s, "a joins; a asks 1")
    world.do(at_s + 1, f"b asks {FACTORS + 1}")
    told = [look(world, at_s + 1 + n / 4) for n in range(100)]
    assert told[0].expected_wait_ns is not None
    assert told[0].expected_wait_ns < 60 * S
    whole = [wait_s(entry)[0] > 500 for entry in told]
    assert whole.index(True) < 60
    assert all(whole[whole.index(True) :])
    assert told[-1].expected_why == "longer than usual"


def test_ranges_stay_narrow_while_they_are_right_and_widen_otherwise() -> None:
    good, bad = Calibration(), Calibration()
    for n in range(COUNTED):
        good.learn(promise(20), 20 * S)
        bad.learn(promise(20), (20 if n % 2 else 30) * S)
    futures_ns = [20 * S, 24 * S, 28 * S]
    assert good.likely(futures_ns, 0) == seconds(24)
    wide = bad.likely(futures_ns, 0)
    assert wide.high_ns - wide.low_ns > 8 * S


def test_the_record_is_bounded_and_forgets() -> None:
    record = Calibration()
    for _ in range(COUNTED):
        record.learn(promise(20), 10_000 * S)
    assert record.likely([20 * S], 0).high_ns <= 21 * 20 * S, "no single factor is endless"
    for _ in range(COUNTED):
        record.learn(promise(20), 20 * S)
    assert record.likely([20 * S], 0) == seconds(20)


# --- along whole waits ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize("seed", range(3))
def test_figures_never_rise_along_a_wait_but_for_a_reason(seed: int, policy: str) -> None:
    """Checked in worlds with faults, changing settings, and sessions that come and die. The rest of
    a wait never gets longer, unless the reason is shown or there was no forecast in between; nor
    does it rise again within a second."""
    world = Simulation(seed, replace(plan_of(seed), policy=policy, tq_ns=6 * S))
    shown: dict[tuple[SessionId, int], QueueView] = {}
    risen: dict[tuple[SessionId, int], int] = {}
    looks = rises = 0
    for _ in range(250):
        world._step()
        view = world.scheduler.view(world.now_ns, ahead=True)
        before, shown = shown, {}
        assert not {entry.session for entry in view.queue} & set(view.holders)
        assert [entry.position for entry in view.queue] == [*range(1, len(view.queue) + 1)]
        for entry in view.queue:
            if entry.expected_wait_ns is None:
                assert entry.expected_low_ns is entry.expected_high_ns is None
                continue
            assert entry.expected_low_ns is not None
            assert entry.expected_high_ns is not None
            assert 0 <= entry.expected_low_ns <= entry.expected_wait_ns <= entry.expected_high_ns
            key = entry.session, state_of(world, entry.session)
            shown[key] = entry
            if (was := before.get(key)) is None:
                continue
            looks += 1
            figures = [
                (was.expected_low_ns, entry.expected_low_ns),
                (was.expected_wait_ns, entry.expected_wait_ns),
                (was.expected_high_ns, entry.expected_high_ns),
            ]
            slack_ns = KEPT_NS  # a cached forecast counts down this long before it stands still
            if any(now > then + slack_ns for then, now in figures):  # type: ignore[operator]
                assert entry.expected_why
                assert world.now_ns - risen.get(key, -S) >= S
                risen[key] = world.now_ns
                rises += 1
    assert rises <= max(1, looks // 10)


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize("seed", [10, 15, 21, 25])
def test_figures_never_fall_at_once_without_a_visible_cause(seed: int, policy: str) -> None:
    """Checked in the same worlds, where users look at any time: early, late, or twice."""
    world = Simulation(seed, replace(plan_of(seed), policy=policy, tq_ns=6 * S))
    rng = random.Random(seed)
    last: Seen | None = None
    for _ in range(250):
        world._step()
        if rng.random() < 0.3:
            continue
        seen = see(world)
        assert last is None or not (falls := falls_at_once(last, seen)), falls
        last = seen


class Seen(NamedTuple):
    """What users see at one look. A daemon that begins anew begins with new figures."""

    scheduler: Scheduler
    now_ns: int
    view: GpuView
    waits: dict[SessionId, int]
    """Which wait of each session this is."""

    @property
    def facts(self) -> tuple[object, ...]:
        view = self.view
        settings = view.policy, view.tq_ns, view.anti_thrash
        return id(self.scheduler), set(view.holders), settings


def see(world: Simulation) -> Seen:
    view = world.scheduler.view(world.now_ns, ahead=True)
    assert set(view.holders) == set(world.scheduler.holders)
    waits = {entry.session: state_of(world, entry.session) for entry in view.queue}
    return Seen(world.scheduler, world.now_ns, view, waits)


def falls_at_once(before: Seen, after: Seen) -> list[tuple[QueueView, QueueView]]:
    """Return the figures that fall faster than they may run down, although the place, the holders
    and the settings are the same."""
    was = {entry.session: entry for entry in before.view.queue}
    return [
        (was[now.session], now)
        for now in after.view.queue
        if before.facts == after.facts
        and before.waits.get(now.session) == after.waits[now.session]
        and was[now.session].position == now.position
        and falls_too_fast(was[now.session], now, after.now_ns - before.now_ns)
    ]


def falls_too_fast(was: QueueView, now: QueueView, passed_ns: int) -> bool:
    pairs = (
        (was.expected_wait_ns, now.expected_wait_ns),
        (was.expected_high_ns, now.expected_high_ns),
    )
    return any(
        then - next_ > (3 + then / S / 20) * passed_ns + 10  # (rounded)
        for then, next_ in pairs
        if then is not None and next_ is not None
    )


def state_of(world: Simulation, session: SessionId) -> int:
    return world.scheduler._st.sessions[session].queued_ns
