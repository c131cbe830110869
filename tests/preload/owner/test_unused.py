"""What a program says it holds and does not use is neither copied nor hashed; all else is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from preload_world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
LEAF = 2 * MIB
HELD = "a = make(24 * MIB, 1); small = make(100, 2)"
FREE = "(a.address + MIB, 9 * MIB)"
"""Four whole leaves, at 2, 4, 6 and 8 MiB: the rest of one chunk and the first of the next."""
USED = ((0, 2), (10, 14))
"""The rest of ``a``: offset and size in MiB."""


@pytest.fixture
def world(tmp_path: Path, library: Path) -> Iterator[World]:
    """A GPU so large that chunks have four leaves."""
    world = World(tmp_path, library, "1x2GiB")
    yield world
    world.close()


@pytest.fixture
def p(program):
    p = program(KIWI_VERIFY="1")
    p.do(
        "def part(a, offset, size):\n"
        "    data = bytearray(size * MIB)\n"
        "    ck(driver.cuMemcpyDtoH(data, a.address + offset * MIB, size * MIB))\n"
        "    return hashlib.sha256(data).hexdigest()\n"
        "def blank(a, offset, size):\n"
        "    return part(a, offset, size) == hashlib.sha256(bytes(size * MIB)).hexdigest()\n"
        "import hashlib\n" + HELD
    )
    return p


@pytest.fixture
def hashing(p):
    """The same, after all was out and in once: there are copies, and digests of them."""
    p.do("prepare(); until_hashing(); swap(); same(a, small)")
    assert p.get("books()['kept']") == p.get("books()['owned']")
    return p


def moved_by(p, code):
    before = p.get("moved()")
    p.do(code)
    after = p.get("moved()")
    assert after["differed"] == 0
    return {name: after[name] - before[name] for name in before}


def remember_used(p):
    p.do(f"used = {{at: part(a, *at) for at in {USED}}}")


def used_is_right(p):
    p.do("assert used == {at: part(a, *at) for at in used}; same(small); check()")


def test_free_leaves_are_not_copied_either_way(p):
    remember_used(p)
    p.do(f"assert unused({FREE})")
    got = moved_by(p, "swap()")
    owned = p.get("books()['owned']")
    assert got["unused"] == 4 * LEAF
    assert (got["copied"], got["skipped"]) == (owned - 4 * LEAF, 4 * LEAF)
    used_is_right(p)
    assert p.get("blank(a, 2, 8)")  # what the driver gives is fresh memory


def test_the_log_says_how_much(program, tmp_path):
    p = program(KIWI_PRELOAD_LOG=str(tmp_path / "log"))
    p.do(f"{HELD}; swap(); assert unused({FREE}); swap()")
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "not copied" in line]
    assert len(said) == 1
    assert "8 MiB were free" in said[0]


def test_without_the_hint_the_same_memory_is_copied(p):
    got = moved_by(p, "swap(); same(a, small)")
    assert (got["copied"], got["unused"]) == (p.get("books()['owned']"), 0)


def test_it_stays_true_until_the_program_calls(p):
    remember_used(p)
    p.do(f"assert unused({FREE})")
    got = moved_by(p, "swap(); swap(); swap()")
    assert got["unused"] == 3 * 4 * LEAF
    used_is_right(p)  # these are calls
    assert moved_by(p, "swap()")["unused"] == 0
    used_is_right(p)


PASS_THE_GATE = (
    "ck(driver.cuMemsetD8(small.address, 0, 1))",
    "ck(driver.cuEventRecord(event, 0))",
    "more.append(ck(driver.cuMemAlloc(100)))",
    "more.append(ck(driver.cuStreamCreate(0)))",
    "more.append(ck(driver.cuMemAllocHost(100)))",
    "ck(driver.cuMemGetAddressRange(a.address))",
    "ck(driver.cuPointerGetAttributes(1, [kind], a.address))",
)
PASS_BY = (
    "ck(driver.cuCtxSynchronize())",
    "ck(driver.cuMemGetInfo())",
    "ck(driver.cuEventQuery(event))",
    "ck(driver.cuCtxGetCurrent())",
    "drop(other)",
    "drop(small)",
)


def test_a_call_that_passes_the_gate_ends_it(p):
    """Submit, allocate and inspect: each may be the first use of what was free."""
    p.do(
        "event = ck(driver.cuEventCreate(0)); more = []\n"
        "kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE"
    )
    for call in PASS_THE_GATE:
        p.do(f"assert unused({FREE}); {call}")
        assert moved_by(p, "swap(); same(a)")["unused"] == 0, call


def test_waits_questions_and_frees_of_others_do_not(p):
    p.do("event = ck(driver.cuEventCreate(0)); other = make(3 * MIB, 5)")
    p.do(f"assert unused({FREE})")
    for call in PASS_BY:
        p.do(call)
        assert moved_by(p, "swap()")["unused"] == 4 * LEAF, call


def test_what_was_said_too_late_counts_for_nothing(p):
    p.do(f"since = passed(); same(small); assert not unused({FREE}, since=since)")
    p.do(f"assert not unused({FREE}, since=passed() + 1); assert not unused({FREE}, since=0)")
    assert moved_by(p, "swap(); same(a, small)")["unused"] == 0


def test_nothing_is_to_be_said_while_the_gate_is_shut(p):
    p.do("since = passed(); assert out() == 'moved' and passed() == 0")
    p.do(f"assert not unused({FREE}, since=since); assert back() == 'moved'")
    p.do("library.kiwi_preload_test_arm(1); assert passed() == 0; library.kiwi_preload_test_arm(0)")
    p.do("assert passed() > 0; same(a, small); check()")


def test_a_free_of_the_range_ends_it(p):
    """Its addresses may be another allocation's soon."""
    p.do("b = make(12 * MIB, 3)")
    p.do(f"assert unused({FREE}, (b.address, b.size)); drop(b)")
    assert moved_by(p, "swap(); same(a, small)")["unused"] == 0


def test_the_end_of_a_context_ends_it(p):
    p.do("assert unused((a.address, a.size)); ck(driver.cuDevicePrimaryCtxReset(0))")
    p.do("init(); a = make(24 * MIB, 4); small = make(9, 9)")
    assert moved_by(p, "swap(); same(a, small)")["unused"] == 0


def test_ranges_in_any_order_that_touch_overlap_or_are_nonsense(p):
    remember_used(p)
    p.do(
        "m = a.address + MIB\n"
        "assert unused((m + 7 * MIB, 2 * MIB), (m, 3 * MIB), (m + 3 * MIB - 1, MIB), (m, 0),\n"
        "    (m + 4 * MIB - 1, 3 * MIB + 1), (4096, 5 * LEAF), (2**64 - 5, 5), (2**64 - 5, 6),\n"
        "    (small.address, 100))"
    )
    assert moved_by(p, "swap()")["unused"] == 4 * LEAF
    used_is_right(p)


def test_less_than_a_leaf_is_copied(p):
    p.do("assert unused((a.address + 1, 2 * LEAF - 2), (a.address + 3 * LEAF, LEAF - 1))")
    assert moved_by(p, "swap(); same(a, small)")["unused"] == 0


def test_the_last_word_counts(p):
    p.do(f"assert unused({FREE}); assert unused((a.address, LEAF))")
    assert moved_by(p, "swap()")["unused"] == LEAF


def test_all_of_an_allocation(p):
    p.do("assert unused((a.address, a.size)); assert out() == 'moved'")
    assert p.get("moved()['unused']") == 24 * MIB
    p.do("assert back() == 'moved'; assert blank(a, 0, 24); same(small); check()")


# ---- copies that are kept -------------------------------------------------------------------


def test_a_copy_that_is_kept_is_right_afterwards(hashing):
    p = hashing
    owned = p.get("books()['owned']")
    remember_used(p)
    p.do(f"assert unused({FREE})")
    got = moved_by(p, "swap()")
    assert (got["copied"], got["unused"]) == (0, 4 * LEAF)
    assert got["verified"] == (owned - 4 * LEAF) // LEAF
    used_is_right(p)
    # nobody said anything now: what no copy was made of is copied, and only that
    p.do("write(a, 7, 3 * MIB, 1)")
    got = moved_by(p, "swap(); same(a, small)")
    assert (got["copied"], got["unused"]) == (4 * LEAF, 0)
    assert moved_by(p, "swap(); same(a, small)")["copied"] == 0


def test_a_new_copy_of_a_chunk_that_is_partly_free_is_right_afterwards(p):
    p.do("prepare(); until_hashing()")
    remember_used(p)
    p.do(f"assert unused({FREE}); swap()")
    used_is_right(p)
    assert p.get("books()['kept']") == p.get("books()['owned']")
    assert moved_by(p, "swap()")["copied"] == 4 * LEAF
    used_is_right(p)


def test_what_is_free_as_a_whole_keeps_no_copy(hashing):
    p = hashing
    owned = p.get("books()['owned']")
    p.do("assert unused((a.address, a.size)); swap()")
    assert p.get("books()['kept']") == owned - 24 * MIB
    assert p.get("arena()['used']") == owned - 24 * MIB
    p.do("write(a, 8); swap(); same(a, small)")


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_way_out_that_is_broken_off(hashing, kind):
    p = hashing
    remember_used(p)
    for skip in (0, 1, 2):
        p.do(f"write(small, {skip}); assert unused({FREE}); fault('{kind}', {skip}); said = out()")
        if p.get("said") == "moved":  # there was less to do than the fault waited for
            p.do(f"fault('{kind}', 0, 0); assert back() == 'moved'")
        used_is_right(p)
    p.do("write(a, 9); swap(); same(a, small)")


def test_a_way_in_that_fails_is_tried_again(p):
    remember_used(p)
    p.do(f"assert unused({FREE}); assert out() == 'moved'")
    p.do("fault('copy_in', 1); assert back().startswith('refused'); assert back() == 'moved'")
    used_is_right(p)
    assert p.get("blank(a, 2, 8)")


# ---- cleaning -------------------------------------------------------------------------------


def test_cleaning_leaves_it_out_and_does_not_take_it_for_clean(p):
    owned = p.get("books()['owned']")
    p.do(f"prepare(); until_hashing(); assert unused({FREE})")
    assert moved_by(p, "clean()")["copied"] == owned - 4 * LEAF
    assert moved_by(p, "clean()")["copied"] == 0
    p.do("write(a, 7, 3 * MIB, 1)")
    got = moved_by(p, "swap(); same(a, small)")
    assert (got["copied"], got["unused"]) == (4 * LEAF, 0)


def test_cleaned_and_still_free_nothing_is_copied(p):
    remember_used(p)
    p.do(f"prepare(); until_hashing(); assert unused({FREE}); clean()")
    got = moved_by(p, "swap()")
    assert (got["copied"], got["unused"]) == (0, 4 * LEAF)
    used_is_right(p)


# ---- processes ------------------------------------------------------------------------------


def test_a_child_has_nothing_to_say(p):
    p.do(f"import os; assert unused({FREE}); pid = os.fork()\nif not pid: os._exit(passed() != 0)")
    assert p.get("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
    assert moved_by(p, "swap()")["unused"] == 4 * LEAF


@pytest.mark.parametrize("switch", [{"KIWI_PRELOAD_OWN": "0"}, {"KIWI_DISABLE": "1"}])
def test_where_nothing_is_owned_there_is_nothing_to_say(program, switch):
    p = program(**switch)
    p.do("a = make(4 * MIB, 1)")
    assert p.get("passed()") == 0
    assert not p.get("unused((a.address, a.size), since=1)")
