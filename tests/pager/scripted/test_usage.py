"""Tests of how the pager reads which sessions worked, and what they have."""

from __future__ import annotations

import time

import pytest
from scripted_machine import LOOP, TARGET, Machine

from kiwi_core.gpu.nvml import UtilisationSample
from kiwi_core.pager.footprints import Footprints
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.pager.usage import UsageMeter
from kiwi_core.units import SessionId


class Samples:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.meter = UsageMeter(machine, Footprints())

    def add(self, pid: int, percent: int, time_us: int) -> None:
        assert self.machine.now_samples is not None
        self.machine.now_samples += (UtilisationSample(pid, percent, time_us),)
        self.meter.forget()

    def busy(self, session: str, *pids: int) -> bool | None:
        return self.meter.busy(SessionId(session), pids, LOOP.run(self.meter.read()))


@pytest.fixture
def samples(machine: Machine) -> Samples:
    return Samples(machine)


def test_busy_is_since_the_sessions_own_last_look(samples: Samples) -> None:
    samples.add(1, 50, 10_000_000)
    samples.add(2, 0, 10_000_000)
    assert samples.busy("a", 1) is True
    assert samples.busy("b", 2) is False
    assert samples.busy("a", 1) is False, "nothing new"
    assert samples.busy("c", 1) is True, "a session that looks for the first time"
    samples.add(1, 1, 11_000_000)
    samples.add(2, 0, 11_500_000)
    assert samples.busy("b", 1, 2) is True
    assert samples.busy("a", 1) is True, "another one's look takes nothing away"


def test_old_work_is_not_news_to_a_new_session(samples: Samples) -> None:
    samples.add(1, 50, 10_000_000)
    samples.add(1, 0, 12_000_000)
    assert samples.busy("a", 1) is False


def test_nobody_knows_who_worked(samples: Samples) -> None:
    samples.machine.now_samples = None
    assert samples.busy("a", 1) is None


def test_one_reading_serves_many_looks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    readings = []

    async def read() -> dict[int, int]:
        readings.append(1)
        return {}

    monkeypatch.setattr(machine, "bytes_by_pid", read)
    meter = UsageMeter(machine, Footprints())
    for _ in range(100):
        LOOP.run(meter.read())
    assert len(readings) == 1
    clock[0] += 10**9
    LOOP.run(meter.read())
    assert len(readings) == 2
    meter.forget()
    LOOP.run(meter.read())
    assert len(readings) == 3


def test_a_process_that_ends_while_it_is_looked_at_does_not_count_as_one_without_memory(
    machine: Machine, pager: SessionPager
) -> None:
    """Its GPU memory is still in use then. Reported as 0 bytes of a living session, it would count
    as held by a program outside Kiwi, and the next session would start beside it."""
    machine.faults["state", 1] = [machine.dies(1, 0)]
    assert not pager.observe(TARGET).alive
