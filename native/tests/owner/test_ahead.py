"""Tests of copies that are made ahead of a page-out, while the gate is armed.

A page-out in which each copy would fail shows that none is made.
"""

from __future__ import annotations

import random

import pytest

import kiwi_emulator as emulator

MIB = 1 << 20
HELD = "held = [make(20 * MIB, 1), make(5 * MIB, 2), make(100, 3)]"
PINNED = "prepare(); until(lambda: arena()['pinned'] >= books()['owned'], 'nothing was pinned')"
NO_COPIES, COPIES = "fault('copy_out', 0, -1)", "fault('copy_out', 0, 0)"


@pytest.fixture
def ready(program):
    p = program()
    p.do(HELD)
    p.do(PINNED)
    return p


def test_a_page_out_after_them_copies_nothing(ready):
    ready.do("arm()")
    assert ready.get("ahead()")
    assert ready.get("books()['resident']") == 28 * MIB, "it stays in the GPU"
    ready.do(f"{NO_COPIES}; assert out() == 'moved'; {COPIES}")
    ready.do("assert back() == 'moved'; disarm(); same(*held); check()")
    assert ready.get("arena()['used']") == 0


def test_what_comes_back_behind_an_armed_gate_goes_out_again_without_a_copy(ready):
    """As after a hint: its notebook may be wanted, and nothing has changed it yet."""
    ready.do("arm(); assert out() == 'moved'; assert back() == 'moved'")
    ready.do(f"{NO_COPIES}; assert out() == 'moved'; {COPIES}")
    ready.do("assert back() == 'moved'; disarm(); same(*held); check()")


def test_what_was_written_since_is_copied_again(ready):
    for seed in range(4, 9):
        ready.do("arm()")
        assert ready.get("ahead()")
        ready.do(f"disarm(); write(held[0], {seed}); arm()")
        ready.do(f"{NO_COPIES}; assert out().startswith('refused driver'); {COPIES}")
        ready.do("assert out() == 'moved'; assert back() == 'moved'")
        ready.do("disarm(); same(*held); check()")
    assert ready.get("arena()['used']") == 0


def test_a_call_that_waits_at_the_gate_comes_after_them(ready):
    ready.do("arm(); import threading; ctx = ck(driver.cuCtxGetCurrent())")
    ready.do(
        "def late():\n"
        "    ck(driver.cuCtxSetCurrent(ctx))\n"
        "    ck(driver.cuMemsetD8(held[0].address, 7, held[0].size))"
    )
    ready.do("waiting = threading.Thread(target=late); waiting.start()")
    assert ready.get("ahead()")
    ready.do("disarm(); waiting.join(); arm(); assert out() == 'moved'; assert back() == 'moved'")
    ready.do("disarm(); held[0].digest = None; now_7 = bytearray(held[0].size)")
    ready.do("ck(driver.cuMemcpyDtoH(now_7, held[0].address, held[0].size))")
    assert ready.get("set(now_7) == {7}")


def test_frees_and_allocations_meanwhile(ready):
    ready.do("arm()")
    assert ready.get("ahead()")
    ready.do("drop(held.pop(1)); disarm(); held.append(make(5 * MIB, 9)); arm()")
    ready.do("assert out() == 'moved'; assert back() == 'moved'; disarm(); same(*held); check()")
    assert ready.get("arena()['used']") == 0


@pytest.mark.parametrize("why", ["disarm()", "fault('stall', 0, -1)", "no_context()"])
def test_when_nothing_is_copied(ready, why):
    """The gate is open, or the GPU is not idle, or there is nothing."""
    if why == "no_context()":
        ready.do("[drop(one) for one in held]; held = []; arm()")
        assert ready.get("ahead()")
    else:
        ready.do("arm()")
        ready.do(why)
        assert not ready.get("ahead()")
        ready.do("fault('stall', 0, 0)")
    assert ready.get("arena()['used']") == 0 or why == "fault('stall', 0, -1)"
    ready.do("disarm(); same(*held); check()")


def test_a_function_that_nobody_knows_ends_them(ready):
    """It passes an armed gate, and may write."""
    ready.do("arm()")
    assert ready.get("ahead()")
    ready.do("library.kiwi_preload_test_leaky()")
    assert not ready.get("ahead()")
    ready.do(f"{NO_COPIES}; assert out().startswith('refused driver'); {COPIES}")
    ready.do("assert out() == 'moved'; assert back() == 'moved'; disarm(); same(*held); check()")


def test_they_use_only_memory_that_is_pinned_anyway(program):
    p = program()
    p.do(HELD)
    p.do("arm()")
    assert not p.get("ahead()")
    assert p.get("arena()") == {"pinned": 0, "pageable": 0, "used": 0, "refused": 0}
    p.do("disarm(); same(*held)")


def test_a_limit_takes_their_memory_back(ready):
    ready.do("arm()")
    assert ready.get("ahead()")
    ready.do("forget(); allow(0)")
    ready.do("until(lambda: arena()['pinned'] == 0, 'nothing was given back')")
    ready.do("assert out() == 'moved'; assert back() == 'moved'; disarm(); same(*held); check()")


def test_an_error_of_a_copy_spoils_nothing(ready):
    ready.do("arm()")
    for skip in range(3):
        ready.do(f"fault('copy_out', {skip}, 1)")
        assert not ready.get("ahead()")
    assert ready.get("ahead()")
    ready.do("assert out() == 'moved'; assert back() == 'moved'; disarm(); same(*held); check()")


def test_what_the_program_maps_itself_is_copied_ahead_too(program):
    p = program()
    p.do("from vmm_calls import *; s = Segment(); a = s.grow(0, 3, 1); b = xla(4 * MIB, 2)")
    p.do(PINNED)
    p.do("arm()")
    assert p.get("ahead()")
    p.do(f"{NO_COPIES}; assert out() == 'moved'; {COPIES}; assert back() == 'moved'")
    p.do("disarm(); same(a, b); write(b, 7); arm()")
    p.do(f"{NO_COPIES}; assert out().startswith('refused driver'); {COPIES}")
    p.do("assert out() == 'moved'; assert back() == 'moved'; disarm(); same(a, b); check()")
    p.do("xla_free(b); s.end()")
    assert p.get("arena()['used']") == 0


def test_a_free_waits_until_it_is_known_whether_its_context_stays(ready, world):
    """While somebody releases the context: its memory may just go with it."""
    ready.do("import threading; device = ck(driver.cuDeviceGet(0))")
    ready.do("ck(driver.cuDevicePrimaryCtxRetain(device))")
    ready.do(
        "def start(what): one = threading.Thread(target=what); one.start(); return one\n"
        "def leave(): ck(driver.cuDevicePrimaryCtxRelease(device))\n"
        "def stuck(one): one.join(0.3); return one.is_alive()"
    )
    emulator.set_copy_bandwidth(world.state, 1 << 10)  # the copies hold the context
    ready.do("arm(); copies = start(ahead); until(lambda: arena()['used'], 'nothing is copied')")
    ready.do("leaves = start(leave); assert stuck(leaves)")
    ready.do("gone = held.pop(1); frees = start(lambda: drop(gone)); assert stuck(frees)")
    emulator.set_copy_bandwidth(world.state, 0)
    ready.do("[one.join() for one in (copies, leaves, frees)]; disarm(); same(*held); check()")


@pytest.mark.parametrize("seed", range(3))
def test_random_stories(program, seed):
    p = program()
    p.do("from vmm_calls import *; prepare(); held = []")
    draw = random.Random(seed)
    for number in range(60):
        p.do("disarm()")
        for step in range(draw.randrange(3)):
            what, stamp = draw.random(), 10 * number + step
            if what < 0.4 and p.get("books()['owned']") < 40 * MIB:
                make, sizes = draw.choice(
                    [("make", (100, 70_000, MIB, 5 * MIB)), ("xla", (2 * MIB, 6 * MIB))]
                )
                p.do(f"held.append({make}({draw.choice(sizes)}, {stamp}))")
            elif what < 0.75 and p.get("len(held)"):
                p.do(f"write(held[{draw.randrange(1000)} % len(held)], {stamp})")
            elif p.get("len(held)"):
                p.do(f"gone = held.pop({draw.randrange(1000)} % len(held))")
                p.do("(xla_free if hasattr(gone, 'handle') else drop)(gone)")
        p.do("arm()")
        p.do("ahead();" * draw.randrange(3) + "pass")
        if draw.random() < 0.6:
            p.do("assert out() == 'moved'")
            p.do("disarm()" if draw.random() < 0.3 else "pass")  # the lease comes first
            p.do("assert back() == 'moved'")
        p.do("disarm(); same(*held); check()")
