"""Page-outs of a part: whole chunks, and never a lost byte."""

from __future__ import annotations

import pytest

from kiwi_core import emulator

MIB = 1 << 20
HELD = "held = [make(size, size) for size in (100, 70_000, MIB, 5 * MIB, 20 * MIB)]"
OWNED = (2 + 2 + 2 + 6 + 20) * MIB
CHUNK = 2 * MIB


def used(p, world):
    return emulator.books(world.state).process(p.pid).device_bytes.get(0, 0)


def part_out(p, size):
    """At least so much goes out, and less than a chunk more; returns what is out then."""
    before = p.get("books()['out']")
    assert p.get(f"out(least={size})") == "moved"
    now = p.get("books()")
    assert min(size, OWNED - before) <= now["out"] - before < size + CHUNK
    assert now["out"] + now["resident"] == OWNED
    p.do("check()")
    return now["out"]


def test_a_part_goes_out_and_all_comes_back(program, world):
    p = program()
    p.do(HELD)
    before = used(p, world)
    out = part_out(p, 7 * MIB)
    assert used(p, world) == before - out
    assert p.get("back()") == "moved"
    p.do("same(*held); check(); swap(); same(*held)")


def test_part_after_part_until_all_is_out(program, world):
    p = program()
    p.do(HELD)
    seen = [part_out(p, 5 * MIB) for _ in range(6)]
    assert seen == [min(6 * MIB * n, OWNED) for n in range(1, 7)]
    assert p.get("out()") == "moved", "and once more, with nothing left"
    assert used(p, world) == 0
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_part_that_fails_on_its_way_out_comes_back(program, kind):
    p = program()
    p.do(HELD)
    for skip in (0, 1, 3):
        p.do(f"fault('{kind}', {skip})")
        assert p.get(f"out(least={16 * MIB})").startswith("refused driver: ")
        assert p.get("books()['out']") == 0
        p.do("same(*held); check()")
    part_out(p, 9 * MIB)
    p.do(f"fault('{kind}', 2)")
    assert p.get(f"out(least={16 * MIB})").startswith("refused driver: ")
    assert p.get("books()['out']") >= 9 * MIB, "a part was out before: nothing is brought in"
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_host_memory_is_asked_for_the_part_only(program):
    p = program()
    p.do(HELD)
    p.do("library.kiwi_preload_test_arena(0, ctypes.c_uint64(14 * MIB))")
    part_out(p, 10 * MIB)
    assert p.get(f"out(least={10 * MIB})").startswith("refused no-host-memory: ")
    assert p.get("books()['out']") == 10 * MIB
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_frees_while_a_part_is_out(program, world):
    p = program()
    p.do(HELD)
    part_out(p, 9 * MIB)
    p.do("drop(held.pop(1)); drop(held.pop(2)); check()")
    assert p.get("out()") == "moved"
    p.do("drop(held.pop(0)); drop(held.pop()); check()")
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")
    assert p.get("books()['owned']") == used(p, world) == 2 * MIB
