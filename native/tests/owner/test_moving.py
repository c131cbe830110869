"""Tests of paging out and in: refusals change nothing, and no byte is ever lost."""

from __future__ import annotations

import pytest
from cuda_processes import Worker

import kiwi_emulator as emulator

MIB = 1 << 20
HELD = "held = [make(size, size) for size in (100, 70_000, MIB, 5 * MIB, 20 * MIB)]"


def test_without_room_the_way_in_is_refused_and_can_be_tried_again(program, world):
    p = program()
    p.do(HELD)
    assert p.get("out()") == "moved"
    with_the_rest = Worker(world.plain)
    try:
        with_the_rest.do("init(); taken = alloc(40 * MIB)")
        for _ in range(2):
            assert p.get("back()").startswith("refused no-room: ")
            assert emulator.books(world.state).process(p.pid).device_bytes.get(0, 0) == 0
        with_the_rest.do("free(taken)")
        assert p.get("back()") == "moved"
        p.do("same(*held); check()")
    finally:
        with_the_rest.close()


def test_a_broken_context_gives_its_memory_back_without_a_copy(program, world):
    """The program's own code broke the context. No call can read the bytes; others need the
    room."""
    p = program()
    p.do(HELD)
    p.do("bad = lambda: (launch('fill_u32', 8, 1, 1), sync())")
    assert p.fails("bad()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    p.do("fault('copy_out', 0, -1)")  # a copy would be refused, not lost
    said = p.get("out()")
    assert said.startswith("lost ")
    assert "CUDA error 700" in said
    assert "own GPU code" in said
    assert emulator.books(world.state).process(p.pid).device_bytes.get(0, 0) == 0
    assert p.get("arena()['used']") == 0, "nor does it keep system RAM"
    p.do("check()")
    assert p.fails("sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS", "the gate is open: it sees its error"


def test_only_the_broken_one_of_two_contexts_gives_its_memory_back(program, world):
    p = program()
    p.do(HELD)
    p.do("device = ck(driver.cuCtxGetDevice()); healthy = ck(driver.cuCtxGetCurrent())")
    p.do("other = ck(driver.cuCtxCreate(None, 0, device)); p = alloc(4 * MIB)")
    assert p.fails("launch('fill_u32', 8, 1, 1), sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    before = emulator.books(world.state).process(p.pid).device_bytes[0]
    assert p.get("out()").startswith("lost ")
    p.do("ck(driver.cuCtxSetCurrent(healthy)); same(*held); check()")
    assert emulator.books(world.state).process(p.pid).device_bytes[0] == before - 4 * MIB


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_way_out_that_fails_leaves_all_in_the_gpu(program, kind):
    p = program()
    p.do(HELD)
    for skip in (0, 1, 3, 6, 11):
        p.do(f"fault('{kind}', {skip})")
        assert p.get("out()").startswith("refused driver: ")
        assert p.get("books()['out']") == 0
        p.do("same(*held); check()")
    p.do("swap(); same(*held)")


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_way_out_that_fails_after_others_went_well(program, kind):
    p = program()
    p.do(HELD)
    p.do("prepare()")
    for skip in (0, 1, 3):
        p.do("swap()")
        p.do(f"write(held[3], {skip}); write(held[4], {skip}, 3 * MIB, 9 * MIB)")
        p.do(f"fault('{kind}', {skip})")
        assert p.get("out()").startswith("refused driver: ")
        p.do("same(*held); check(); swap(); same(*held)")


def test_a_way_out_of_a_full_gpu(program, world):
    """The GPU has no memory left for the copy."""
    emulator.set_quirk(world.state, "streams_cost")
    p = program()
    p.do(HELD)
    p.do(
        "streams = []\n"
        "def more(): streams.append(ck(driver.cuStreamCreate(1)))\n"
        "for take in (lambda: alloc(2 * MIB), more):\n"
        "    try:\n"
        "        for _ in range(1000): take()\n"
        "    except CudaError as error: last = str(error)\n"
    )
    assert p.get("last, len(streams) < 1000") == ["CUDA_ERROR_OUT_OF_MEMORY", True]
    p.do("swap(); same(*held)")


def test_host_memory_that_runs_out_on_the_way(program):
    p = program()
    p.do(HELD)
    p.do("fault('host')")
    assert p.get("out()").startswith("refused no-host-memory: ")
    p.do("same(*held); check(); swap(); same(*held)")


@pytest.mark.parametrize("kind", ["create", "map", "copy_in"])
def test_a_way_in_that_fails_can_be_tried_again(program, world, kind):
    p = program()
    p.do(HELD)
    assert p.get("out()") == "moved"
    reason = "no-room" if kind == "create" else "driver"
    for skip in (0, 1, 4, 9):
        p.do(f"fault('{kind}', {skip}, -1)")
        assert p.get("back()").startswith(f"refused {reason}: ")
        assert emulator.books(world.state).process(p.pid).device_bytes.get(0, 0) == 0
    p.do(f"fault('{kind}', 0, 0)")
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_a_way_out_that_fails_where_even_the_way_back_does_stays_out(program):
    """Memory that is out stays out, the rest stays in; no call passes before a page-in succeeds."""
    p = program()
    p.do(HELD)
    p.do("fault('copy_out', 5); fault('create', 0, -1)")
    assert p.get("out()").startswith("refused driver: ")
    books = p.get("books()")
    assert 0 < books["out"] < books["owned"]
    p.do("fault('create', 0, 0)")
    assert p.get("back()") == "moved"
    p.do("same(*held); check(); swap(); same(*held)")


def cut_short(p):
    """Make a page-out fail half-way, and the way back as well."""
    p.do("fault('copy_out', 5); fault('create', 0, -1)")
    assert p.get("out()").startswith("refused driver: ")
    p.do("fault('create', 0, 0); check()")
    books = p.get("books()")
    assert 0 < books["out"] < books["owned"]
    return books["out"]


def test_the_next_way_out_takes_what_one_cut_short_has_left(program, world):
    p = program()
    p.do(HELD)
    out = cut_short(p)
    p.do("fault('copy_out', 1)")
    assert p.get("out()").startswith("refused driver: ")
    assert p.get("books()['out']") >= out, "some was out before: nothing is brought in"
    assert p.get("out()") == "moved"
    assert emulator.books(world.state).process(p.pid).device_bytes.get(0, 0) == 0
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_host_memory_is_asked_for_what_is_not_out_yet(program):
    p = program()
    p.do(HELD)
    out = cut_short(p)
    p.do(f"machine_has({out} + 4 * MIB)")
    assert p.get("out()").startswith("refused no-host-memory: ")
    assert p.get("books()['out']") == out
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_frees_after_a_way_out_that_was_cut_short(program, world):
    p = program()
    p.do(HELD)
    cut_short(p)
    p.do("drop(held.pop(1)); drop(held.pop(2)); check()")
    assert p.get("out()") == "moved"
    p.do("drop(held.pop(0)); drop(held.pop()); check()")
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")
    used_bytes = emulator.books(world.state).process(p.pid).device_bytes.get(0, 0)
    assert p.get("books()['owned']") == used_bytes == 2 * MIB


def test_the_time_limit_of_the_way_out(program):
    p = program()
    p.do(HELD)
    p.do(
        "fault('stall', 0, -1); goes_on = threading.Timer(2.5, lambda: fault('stall', 0, 0))\n"
        "goes_on.start(); said = out(500_000_000)"
    )
    assert p.get("said").startswith("refused driver: the time limit")
    p.do("same(*held); check(); swap(); same(*held)")


def test_work_that_does_not_end_refuses_the_way_out_in_time(program):
    p = program()
    p.do(HELD)
    p.do("stuck = Stuck()")
    for _ in range(2):
        assert p.get("out(300_000_000)").startswith("refused lock-timeout: ")
    p.do("stuck.end(); same(*held); swap(); same(*held)")


def test_the_work_of_a_context_that_owns_nothing_is_waited_for_too(program):
    p = program()
    p.do("stuck = Stuck()")
    assert p.get("out(300_000_000)").startswith("refused lock-timeout: ")
    p.do("stuck.end(); swap()")


def test_allocating_and_freeing_while_another_thread_pages(program):
    p = program()
    p.do(HELD)
    p.do(
        "context = ck(driver.cuCtxGetCurrent())\n"
        "stop, problems, rounds = threading.Event(), [], [0, 0]\n"
        "def churn(which):\n"
        "    try:\n"
        "        ck(driver.cuCtxSetCurrent(context))\n"
        "        while not stop.is_set():\n"
        "            a = make(300 if which else 3 * MIB, rounds[which])\n"
        "            same(a); drop(a); rounds[which] += 1\n"
        "    except BaseException as e: problems.append(repr(e))\n"
        "threads = [threading.Thread(target=churn, args=(i,)) for i in (0, 1)]\n"
        "for t in threads: t.start()\n"
        "for _ in range(15):\n"
        "    for way in (out, back):\n"
        "        said = way()\n"
        "        assert said == 'moved', said\n"
        "stop.set()\n"
        "for t in threads: t.join()\n"
    )
    assert p.get("problems") == []
    assert min(p.get("rounds")) > 0
    p.do("same(*held); check()")


def test_a_program_may_end_while_its_memory_is_out(program, world):
    p = program()
    p.do(HELD)
    assert p.get("out()") == "moved"
    p.end_input()
    assert p.ended(30)


# ---- host memory ---------------------------------------------------------------------------


def test_too_little_host_memory_is_told_before_anything_moves(program):
    p = program()
    p.do(HELD)
    p.do("machine_has(20 * MIB)")
    assert p.get("out()").startswith("refused no-host-memory: ")
    assert p.get("books()['out']") == 0
    p.do("same(*held); machine_has(60 * MIB)")
    p.do("swap(); same(*held)")
    assert p.get("arena()['pinned'] + arena()['pageable']") <= 60 * MIB


def test_host_memory_is_pinned_before_it_is_needed_and_given_back_on_demand(program):
    p = program()
    p.do("prepare()")
    p.do(HELD)
    p.do("until(lambda: arena()['pinned'] >= books()['owned'], 'nothing was pinned')")
    assert p.get("arena()['used']") == 0
    p.do("swap(); same(*held)")
    assert p.get("arena()['pageable']") == 0  # nothing was added on the way
    p.do("allow(0)")
    p.do("until(lambda: arena()['pinned'] == 0, 'nothing was given back')")
    p.do("swap(); same(*held); check()")


def test_pageable_memory_is_used_where_nothing_can_be_pinned(program):
    p = program()
    p.do("fault('pin', 0, -1); prepare()")
    p.do(HELD)
    p.do("until(lambda: arena()['refused'], 'nothing was tried')")
    p.do("swap(); same(*held); check()")
    assert p.get("arena()['pinned']") == 0


def test_what_goes_out_before_it_is_pinned_is_pinned_once_it_is_back(program):
    p = program()
    p.do("fault('pin', 0, -1); prepare()")
    p.do(HELD)
    p.do("assert out() == 'moved'; fault('pin', 0, 0); prepare()")
    p.do("assert back() == 'moved'; same(*held)")
    p.do("until(lambda: arena()['pageable'] == 0, 'copies stay pageable')")
    p.do("swap(); same(*held); check()")


def test_a_measuring_program_can_wait_until_all_is_pinned(program):
    """The bench does so. Nothing is pinned before there is a daemon, or if pinning is refused."""
    p = program()
    p.do("from kiwi_core.bench.work.pinned import until_pinned")
    p.do(HELD)
    assert p.get("until_pinned(0.2)") == 0
    p.do("fault('pin', 0, -1); prepare(); until(lambda: arena()['refused'], 'nothing was tried')")
    assert p.get("until_pinned(60)") == 0
    p.do("fault('pin', 0, 0); prepare()")
    assert p.get("until_pinned(60) >= books()['owned']")


def test_a_measuring_program_waits_for_a_limit_that_is_raised_late(program):
    """A daemon raises the limit after it has heard of the memory. On a real GPU a bench that did
    not wait for that measured moves through ordinary memory."""
    p = program()
    p.do("import threading; from kiwi_core.bench.work.pinned import until_pinned")
    p.do("allow(8 * MIB); prepare()")
    p.do(HELD)
    p.do("until(lambda: arena()['pinned'] == 8 * MIB, 'the limit was not reached')")
    p.do("threading.Timer(0.3, allow).start()")
    assert p.get("until_pinned(60) >= books()['owned']")
