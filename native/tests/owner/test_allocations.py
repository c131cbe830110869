"""Tests that owned memory behaves like the driver's own, and comes back from RAM unchanged."""

from __future__ import annotations

from itertools import pairwise

import pytest

import kiwi_emulator as emulator

MIB = 1 << 20
SIZES = (1, 255, 512, 513, 4096, 100_000, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 7 * MIB)


def device_bytes(world, worker):
    """Return the bytes that the process holds on the GPU, without its context."""
    process = emulator.books(world.state).process(worker.pid)
    return process.device_bytes.get(0, 0)


def test_any_size_is_served_at_an_aligned_address_of_its_own(program):
    p = program()
    p.do(f"held = [make(size, size) for size in {SIZES}]")
    p.do("for a in held: ranges(a)")
    spans = sorted(tuple(s) for s in p.get("[(a.address, a.address + a.size) for a in held]"))
    assert all(start % 512 == 0 for start, _ in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    before = p.get("[a.address for a in held]")
    p.do("swap(); same(*held)")
    p.do("for a in held: ranges(a)")
    assert p.get("[a.address for a in held]") == before


def test_what_lies_outside_the_bytes_asked_for_is_not_an_allocation(program):
    p = program()
    p.do("small, large = make(100, 1), make(3 * MIB, 2)")
    for end in ("small.address + 100", "large.address + 3 * MIB"):
        assert p.fails(f"ck(driver.cuMemGetAddressRange({end}))") == "CUDA_ERROR_NOT_FOUND"
    assert p.fails("ck(driver.cuMemFree(small.address + 1))") == "CUDA_ERROR_INVALID_VALUE"
    p.do("drop(small); drop(large)")
    for gone in ("small", "large"):
        assert p.fails(f"drop({gone})") == "CUDA_ERROR_INVALID_VALUE"
    p.do("check()")


def test_attributes_are_those_of_the_allocation(program):
    p = program()
    p.do("a, b = make(100, 1), make(100, 2)")
    p.do("A = driver.CUpointer_attribute")
    plural = (
        "[int(x) for x in ck(driver.cuPointerGetAttributes(3,"
        " [A.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,"
        " A.CU_POINTER_ATTRIBUTE_RANGE_SIZE, A.CU_POINTER_ATTRIBUTE_BUFFER_ID], {}))]"
    )
    first, second = (p.get(plural.format(f"{name}.address + 7")) for name in "ab")
    assert first[:2] == [p.get("a.address"), 100]
    assert second[:2] == [p.get("b.address"), 100]
    assert first[2] != second[2]
    context = "int(ck(driver.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_CONTEXT, a.address)))"
    assert p.get(context) == p.get("int(ck(driver.cuCtxGetCurrent()))")


def test_pitched_memory(program):
    p = program()
    address, pitch = p.get("[int(x) for x in ck(driver.cuMemAllocPitch(1000, 30, 4))]")
    assert (address % 512, pitch) == (0, 1024)
    assert p.get(f"ck(driver.cuMemGetAddressRange({address}))[1]") == 1024 * 30


def test_all_that_is_freed_goes_back_to_the_gpu(program, world):
    p = program()
    p.do(f"held = [make(size, size) for size in {SIZES}]")
    assert device_bytes(world, p) == p.get("books()['owned']")
    stream_bytes = 3 * (64 << 10)  # the library's stream, and its first copy each way
    assert p.get("used()") == device_bytes(world, p) + 2 * MIB + stream_bytes  # with the context
    p.do("for a in held: drop(a)")
    assert device_bytes(world, p) == 0
    assert p.get("books()['overhead']") == 0


def test_small_allocations_share_memory_and_the_books_tell_what_it_costs(program):
    p = program()
    p.do("held = [int(ck(driver.cuMemAlloc(100))) for _ in range(5000)]")
    books = p.get("books()")
    assert books["owned"] == 4 * MIB  # slots of 512 bytes
    assert books["overhead"] == 4 * MIB - 5000 * 100
    p.do("check()")


def test_paged_out_memory_is_not_in_the_gpu(program, world):
    p = program()
    p.do(f"held = [make(size, size) for size in {SIZES}]")
    owned = p.get("books()['owned']")
    assert p.get("out()") == "moved"
    assert device_bytes(world, p) == 0
    assert (p.get("books()['out']"), p.get("books()['resident']")) == (owned, 0)
    assert p.get("back()") == "moved"
    assert device_bytes(world, p) == owned
    p.do("same(*held)")


def test_freeing_works_while_memory_is_out(program, world):
    p = program()
    p.do("small, other = make(100, 1), make(100, 2)")
    p.do("large, stays = make(9 * MIB, 3), make(5 * MIB, 4)")
    assert p.get("out()") == "moved"
    p.do("drop(small); drop(large)")
    assert p.get("books()['out']") == 8 * MIB
    assert p.get("arena()['used']") == 8 * MIB
    assert p.get("back()") == "moved"
    assert device_bytes(world, p) == 8 * MIB
    p.do("same(other, stays); drop(other); drop(stays); check()")
    assert device_bytes(world, p) == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_keep_every_byte(program, seed):
    p = program()
    if seed:
        p.do("prepare()")
    assert p.get(f"stress({seed}, 120)", within_s=100) > 3
    assert p.get("arena()['used']") == 0


def test_an_allocation_that_the_gpu_cannot_hold_fails_and_leaves_nothing(program, world):
    p = program()
    p.do("held = make(40 * MIB, 1)")
    for size in ("30 * MIB", "1 << 40"):
        assert p.fails(f"make({size}, 2)") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert device_bytes(world, p) == 40 * MIB
    p.do("drop(held); make(60 * MIB, 3)")


def test_what_the_driver_does_not_back_is_passed_on_and_counted(program):
    p = program()
    p.do("fault('map'); a = make(3 * MIB, 1)")
    assert p.get("books()['unowned_plain']") == 3 * MIB
    assert p.get("books()['owned']") == 0
    p.do("same(a); drop(a)")
    assert p.get("books()['unowned_plain']") == 0


# ---- contexts and processes ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["Release", "Reset"])
@pytest.mark.parametrize("where", ["in", "out"])
def test_a_context_that_ends_takes_its_memory_with_it(program, world, end, where):
    p = program()
    p.do("held = [make(size, size) for size in (100, 5 * MIB)]")
    if where == "out":
        assert p.get("out()") == "moved"
    p.do(f"ck(driver.cuDevicePrimaryCtx{end}(0))")
    assert p.get("books()['owned']") == 0
    assert device_bytes(world, p) == 0
    assert p.get("arena()['used']") == 0
    if where == "out":
        assert p.get("back()") == "moved"
    p.do("init(); a = make(3 * MIB, 7); swap(); same(a); check()")


def test_memory_of_several_contexts_moves_together(program, world):
    p = program()
    p.do("a = make(3 * MIB, 1); other = ck(driver.cuCtxCreate(None, 0, 0))")
    p.do("b = make(100, 2); c = make(4 * MIB, 3)")
    p.do("swap(); same(b, c)")
    p.do("ck(driver.cuCtxDestroy(other)); same(a); check()")
    assert p.get("books()['owned']") == 4 * MIB
    assert device_bytes(world, p) == 4 * MIB


GREEN = (
    "dev = ck(driver.cuDeviceGet(0))\n"
    "resource = ck(driver.cuDeviceGetDevResource(dev, driver.CUdevResourceType(1)))\n"
    "resources = ck(driver.cuDevResourceGenerateDesc([resource], 1))\n"
    "green = ck(driver.cuGreenCtxCreate(resources, dev, 1))\n"
    "ck(driver.cuCtxPushCurrent(ck(driver.cuCtxFromGreenCtx(green))))\n"
)


def test_memory_of_a_green_context_moves_when_that_is_destroyed(program, world):
    p = program()
    p.do(GREEN + "a = make(3 * MIB, 1); b = make(100, 2); swap(); same(a, b)")
    p.do("ck(driver.cuCtxPopCurrent()); ck(driver.cuGreenCtxDestroy(green))")
    p.do("swap(); same(a, b); swap(); drop(a); same(b); check()")
    assert device_bytes(world, p) == 2 * MIB


@pytest.mark.parametrize("where", ["in the GPU", "in host memory"])
def test_the_last_green_context_takes_the_memory_with_it(program, world, where):
    p = program()
    p.do(GREEN + "ck(driver.cuCtxPopCurrent()); ck(driver.cuDevicePrimaryCtxRelease(dev))")
    p.do("a = make(3 * MIB, 1); b = make(100, 2)")
    if where == "in host memory":
        p.do("out()")
    p.do("ck(driver.cuGreenCtxDestroy(green))")
    assert p.get("books()['owned']") == 0
    assert device_bytes(world, p) == 0


def test_a_forked_child_touches_nothing(program, world):
    p = program()
    p.do("prepare(); a = make(3 * MIB, 1); b = make(10, 2)")
    p.do(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    said = {name_of(driver.cuMemAlloc, 5), name_of(driver.cuMemFree, a.address)}\n"
        "    os._exit(0 if said == {'CUDA_ERROR_NOT_INITIALIZED'} else 1)"
    )
    assert p.get("os.waitpid(child, 0)[1]") == 0
    p.do("same(a, b); swap(); same(a, b); check()")
