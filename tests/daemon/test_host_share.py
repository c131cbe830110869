"""Tests of how the host budget is divided among libraries that hold memory for speed."""

from __future__ import annotations

import random

import pytest

from kiwi_core.daemon.links.host_share import SPARED, STEP_BYTES, Holder, divide, who_gives_back
from kiwi_core.units import GIB


def holder(owned_gib: float, out_gib: float = 0.0, held_gib: float | None = None) -> Holder:
    held = out_gib if held_gib is None else held_gib
    return Holder(int(owned_gib * GIB), int(out_gib * GIB), int(held * GIB))


def test_where_there_is_enough_each_may_hold_what_it_owns() -> None:
    assert divide(64 * GIB, 0, [holder(20), holder(10, 10), holder(0)]) == [
        20 * GIB,
        10 * GIB,
        0,
    ]


def test_where_there_is_not_small_ones_get_all_and_large_ones_the_same() -> None:
    small, large, larger = divide(32 * GIB, 0, [holder(2), holder(30), holder(60)])
    assert small == 2 * GIB
    assert large == larger == 13 * GIB  # of the 28 GiB that are divided


def test_paged_out_memory_counts_first_and_stays_with_its_holder() -> None:
    out, other = divide(32 * GIB, 4 * GIB, [holder(20, 20), holder(20)])
    assert (out, other) == (20 * GIB, 4 * GIB)


def test_where_nothing_is_left_nobody_holds_anything_without_need() -> None:
    for budget_gib, others_gib in ((0, 0), (8, 20), (16, 0)):
        shares = divide(budget_gib * GIB, others_gib * GIB, [holder(30, 14), holder(5)])
        assert shares == [14 * GIB, 0]
    assert divide(0, 0, []) == []


@pytest.mark.parametrize("seed", range(20))
def test_together_they_stay_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    holders = []
    for _ in range(draw.randint(1, 40)):
        owned = draw.randrange(40 * GIB)
        out = draw.choice([0, owned, draw.randrange(owned + 1)])
        holders.append(Holder(owned, out, out + draw.randrange(GIB)))
    budget, others = draw.randrange(800 * GIB), draw.randrange(20 * GIB)
    shares = divide(budget, others, holders)
    must = sum(one.out_bytes for one in holders) + others
    may = budget - budget // SPARED
    assert sum(shares) + others <= max(must, may)
    for one, share in zip(holders, shares, strict=True):
        assert one.out_bytes <= share <= max(one.owned_bytes, one.out_bytes) + STEP_BYTES


def test_the_largest_holder_gives_back_first_and_no_more_than_needed() -> None:
    holders = [holder(9, 0, 3), holder(9, 8, 9), holder(9, 0, 9), holder(9, 9, 9)]
    assert who_gives_back(0, holders) == []
    assert who_gives_back(5 * GIB, holders) == [2]
    assert who_gives_back(10 * GIB, holders) == [2, 0]
    assert who_gives_back(100 * GIB, holders) == [2, 0, 1]
