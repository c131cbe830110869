"""Tests of how the host budget is divided among libraries that hold memory for speed."""

from __future__ import annotations

import random

import pytest

from kiwi_core.daemon.links.host_share import SPARED, STEP_BYTES, RamUser, divide, who_gives_back
from kiwi_core.units import GIB


def ram_user(owned_gib: float, out_gib: float = 0.0, held_gib: float | None = None) -> RamUser:
    held = out_gib if held_gib is None else held_gib
    return RamUser(int(owned_gib * GIB), int(out_gib * GIB), int(held * GIB))


def test_where_there_is_enough_each_may_hold_what_it_owns() -> None:
    assert divide(64 * GIB, 0, [ram_user(20), ram_user(10, 10), ram_user(0)]) == [
        20 * GIB,
        10 * GIB,
        0,
    ]


def test_where_there_is_not_small_ones_get_all_and_large_ones_the_same() -> None:
    small, large, larger = divide(32 * GIB, 0, [ram_user(2), ram_user(30), ram_user(60)])
    assert small == 2 * GIB
    assert large == larger == 13 * GIB  # of the 28 GiB that are divided


def test_paged_out_memory_counts_first_and_stays_with_its_user() -> None:
    out, other = divide(32 * GIB, 4 * GIB, [ram_user(20, 20), ram_user(20)])
    assert (out, other) == (20 * GIB, 4 * GIB)


def test_where_nothing_is_left_nobody_holds_anything_without_need() -> None:
    for budget_gib, others_gib in ((0, 0), (8, 20), (16, 0)):
        shares = divide(budget_gib * GIB, others_gib * GIB, [ram_user(30, 14), ram_user(5)])
        assert shares == [14 * GIB, 0]
    assert divide(0, 0, []) == []


@pytest.mark.parametrize("seed", range(20))
def test_together_they_stay_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    users = []
    for _ in range(draw.randint(1, 40)):
        owned = draw.randrange(40 * GIB)
        out = draw.choice([0, owned, draw.randrange(owned + 1)])
        users.append(RamUser(owned, out, out + draw.randrange(GIB)))
    budget, others = draw.randrange(800 * GIB), draw.randrange(20 * GIB)
    shares = divide(budget, others, users)
    must = sum(one.out_bytes for one in users) + others
    may = budget - budget // SPARED
    assert sum(shares) + others <= max(must, may)
    for one, share in zip(users, shares, strict=True):
        assert one.out_bytes <= share <= max(one.owned_bytes, one.out_bytes) + STEP_BYTES


def test_the_largest_holder_gives_back_first_and_no_more_than_needed() -> None:
    users = [ram_user(9, 0, 3), ram_user(9, 8, 9), ram_user(9, 0, 9), ram_user(9, 9, 9)]
    assert who_gives_back(0, users) == []
    assert who_gives_back(5 * GIB, users) == [2]
    assert who_gives_back(10 * GIB, users) == [2, 0]
    assert who_gives_back(100 * GIB, users) == [2, 0, 1]
