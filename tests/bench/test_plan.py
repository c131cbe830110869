"""Tests that the bench uses at most its share of memory, and at most its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from untimed import UNTIMED

from kiwi_core.bench import plan
from kiwi_core.bench.plan import FreeMemory, TimeLimits
from kiwi_core.errors import CallerError
from kiwi_core.units import GIB, MIB

H100 = FreeMemory(80 * GIB, 79 * GIB, 120 * GIB)
SPEEDS = st.floats(min_value=1e6, max_value=1e12)
PATIENCE = TimeLimits()


@st.composite
def rooms(draw: st.DrawFn) -> FreeMemory:
    total = draw(st.integers(128 * MIB, 200 * GIB))
    free = draw(st.integers(plan.GPU_FREE_MIN_BYTES, total))
    return FreeMemory(total, free, draw(st.integers(plan.RAM_FREE_MIN_BYTES, 2000 * GIB)))


@UNTIMED
@given(rooms(), SPEEDS)
def test_copies_stay_within_the_shares(room: FreeMemory, speed: float) -> None:
    size = plan.copy_bytes(room, speed, PATIENCE)
    assert size % (2 * MIB) == 0
    assert 3 * size <= max(room.gpu_free_bytes * plan.GPU_SHARE, 6 * MIB)
    assert 3 * size <= max(room.ram_bytes * plan.RAM_SHARE, 6 * MIB)
    assert size <= max(2 * MIB, speed * PATIENCE.copy_s)


@UNTIMED
@given(rooms(), SPEEDS)
def test_paging_stays_within_shares_and_time(room: FreeMemory, speed: float) -> None:
    first = plan.first_paged_bytes(room)
    size = plan.paged_bytes(room, 1 / speed, PATIENCE)
    assert first <= size
    assert size <= max(room.gpu_free_bytes * plan.GPU_SHARE, 2 * MIB)
    assert size <= max(room.ram_bytes * plan.RAM_SHARE, 2 * MIB)
    assert size <= max(first, speed * PATIENCE.paging_s / 4)


@UNTIMED
@given(rooms(), SPEEDS, st.integers(0, 600 * MIB))
def test_two_programs_of_a_switch_never_fit_together_and_one_does(
    room: FreeMemory, speed: float, context: int
) -> None:
    planned = plan.switch(room, 1 / speed, PATIENCE, context)
    if isinstance(planned, str):
        return
    resident = planned.program_bytes + context
    space = planned.space_bytes(resident, room.margin_bytes)
    assert resident + room.margin_bytes <= space < 2 * resident
    assert space <= room.gpu_free_bytes * plan.SWITCH_GPU_SHARE
    assert 2 * resident <= room.ram_bytes * plan.RAM_SHARE  # both out at once


@pytest.mark.parametrize("backends", [1, 2])
@pytest.mark.parametrize("gb_per_s", [(2.3, 9.0), (3.0, 5.0), (4.0, 6.0), (50.0, 50.0)])
def test_a_large_gpu_on_a_slow_driver_still_gets_its_switch(
    gb_per_s: tuple[float, float], backends: int
) -> None:
    """80 GB: it uses some gigabytes and not a hundred that fill it twice, and keeps its time."""
    patience = PATIENCE.shared(backends)
    round_trip = sum(1 / (speed * 1e9) for speed in gb_per_s)
    planned = plan.switch(H100, round_trip, patience, 500 * MIB)
    assert not isinstance(planned, str)
    assert 2.5 * GIB < planned.program_bytes <= 8 * GIB
    assert 1 <= planned.runs <= 4
    takes_s = planned.program_bytes * round_trip * (planned.runs + 2.5)
    assert takes_s <= 1.2 * patience.switch_s
    assert 2.5 * GIB <= plan.paged_bytes(H100, round_trip, patience) <= 16 * GIB


def test_why_there_is_no_switch() -> None:
    slow = plan.switch(H100, 1 / 20e6, PATIENCE, 500 * MIB)
    assert isinstance(slow, str)
    assert "too slow" in slow
    for room in (FreeMemory(80 * GIB, 4 * GIB, 120 * GIB), FreeMemory(80 * GIB, 79 * GIB, 8 * GIB)):
        crowded = plan.switch(room, 1 / 2.4e9, PATIENCE, 500 * MIB)
        assert isinstance(crowded, str)
        assert "3.0 GiB each" in crowded


def test_a_fast_bus_gets_a_large_piece() -> None:
    assert plan.copy_bytes(H100, 55e9, PATIENCE) == GIB


@pytest.mark.parametrize(
    ("room", "code"),
    [
        (FreeMemory(GIB, 10 * MIB, GIB), "no-gpu-memory"),
        (FreeMemory(GIB, GIB, 10 * MIB), "no-host-memory"),
    ],
)
def test_too_little_is_told_beforehand(room: FreeMemory, code: str) -> None:
    with pytest.raises(CallerError) as told:
        plan.check(room)
    assert told.value.code == code
    assert told.value.remedy
