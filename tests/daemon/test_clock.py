"""Tests of the daemon's clock, which leaves out the time in which the daemon did not run."""

from __future__ import annotations

import asyncio

import virtual_time

from kiwi_core.clock import BEAT_S, PAUSE_NS, RunningClock
from kiwi_core.units import NS_PER_S, seconds_to_ns

BEAT_NS = seconds_to_ns(BEAT_S)


class Monotonic:
    """A clock that goes on in pauses; the test moves it."""

    def __init__(self) -> None:
        self.ns = 1_000 * NS_PER_S

    def read_ns(self) -> int:
        return self.ns


def test_a_pause_is_left_out_once_but_for_one_beat() -> None:
    time = Monotonic()
    clock = RunningClock(time.read_ns)
    clock.begin()
    began_ns = clock.now_ns()
    time.ns += BEAT_NS
    assert clock.now_ns() - began_ns == BEAT_NS
    time.ns += 60 * NS_PER_S
    assert clock.now_ns() - began_ns == 2 * BEAT_NS
    assert clock.now_ns() - began_ns == 2 * BEAT_NS
    assert clock.paused_ns == 60 * NS_PER_S - BEAT_NS
    time.ns += BEAT_NS
    assert clock.now_ns() - began_ns == 3 * BEAT_NS


def test_a_late_beat_of_a_busy_machine_counts() -> None:
    time = Monotonic()
    clock = RunningClock(time.read_ns)
    clock.begin()
    began_ns = clock.now_ns()
    time.ns += PAUSE_NS
    assert clock.now_ns() - began_ns == PAUSE_NS


def test_without_a_beat_it_is_the_monotonic_clock() -> None:
    time = Monotonic()
    clock = RunningClock(time.read_ns)
    assert clock.now_ns() == time.ns
    time.ns += 3_600 * NS_PER_S
    assert clock.now_ns() == time.ns
    clock.begin()
    clock.end()
    time.ns += 3_600 * NS_PER_S
    assert clock.now_ns() == time.ns


def test_time_outs_and_timers_of_its_loop_leave_out_the_pause() -> None:
    """The loop of a daemon goes by the clock: what had three seconds left before a pause of a
    minute has them after it."""

    async def paused() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        monotonic = loop.time
        clock = RunningClock(lambda: seconds_to_ns(monotonic()))
        loop.time = clock.now_s  # type: ignore[method-assign]
        beat = asyncio.ensure_future(clock.beat())
        await asyncio.sleep(0)
        began_s, began_ns = monotonic(), clock.now_ns()
        sleeper = asyncio.ensure_future(asyncio.sleep(3 * BEAT_S))
        await asyncio.sleep(BEAT_S / 2)
        virtual_time.advance(60)
        await sleeper
        beat.cancel()
        return clock.now_ns() - began_ns, monotonic() - began_s

    lasted_ns, in_all_s = virtual_time.run(paused())
    assert abs(lasted_ns - 3 * BEAT_NS) < NS_PER_S // 1_000
    assert in_all_s > 60
