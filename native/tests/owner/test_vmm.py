"""Tests of memory that programs take by ``cuMemCreate``: it is owned, and moves like memory of
``cuMemAlloc``."""

from __future__ import annotations

from pathlib import Path

import pytest
from preload_world import World

import kiwi_emulator as emulator

MIB = 1 << 20
SUPPORT = Path(__file__).parents[2] / "support"


def on_gpu(world, p):
    return emulator.books(world.state).process(p.pid).device_bytes.get(0, 0)


@pytest.fixture
def program(program):
    def start(**environment):
        p = program(**environment)
        p.do("from vmm_calls import *")
        return p

    return start


def test_as_jax_calls(program, world):
    p = program()
    p.do("held = [xla(2 * MIB, 1), xla(6 * MIB, 2)]; plain = make(3 * MIB, 3)")
    assert p.get("books()['owned']") == 12 * MIB
    assert p.get("sum(books()['unowned_' + kind] for kind in KINDS)") == 0
    for _ in range(3):
        assert p.get("out()") == "moved"
        assert on_gpu(world, p) == 0
        assert p.get("back()") == "moved"
        p.do("same(*held, plain); check()")
    p.do("xla_free(held.pop(0)); swap(); same(*held, plain)")
    assert p.get("books()['owned']") == 10 * MIB
    p.do("xla_free(held.pop(0)); drop(plain); check()")
    assert p.get("books()['owned']") == 0
    assert on_gpu(world, p) == 0


def test_as_expandable_segments_call(program, world):
    p = program()
    p.do("s = Segment(); a = s.grow(0, 3, 1); swap(); same(a)")
    p.do("b = s.grow(3, 6, 2); swap(); same(a, b)")
    p.do("s.shrink(1); swap(); c = s.grow(1, 2, 5); swap(); same(b, c)")
    p.do("s.end(); check()")
    assert p.get("books()['owned']") == 0
    assert on_gpu(world, p) == 0


def test_as_a_program_that_sleeps_calls(program):
    """vLLM and torch_memory_saver release everything and come back at the same address."""
    p = program()
    p.do("a = xla(4 * MIB, 1); at = a.address; unmap(at, a.size); release(a.handle); swap()")
    p.do("h = create(a.size); map_at(at, a.size, h); access(at, a.size)")
    p.do("write(a, 2); swap(); same(a); check()")


def test_one_handle_at_two_addresses(program):
    """As GMLake stitches blocks, and XLA maps the buffers of a command buffer again."""
    p = program()
    p.do("a = xla(4 * MIB, 1); two = reserve(4 * MIB); map_at(two, a.size, a.handle)")
    p.do("access(two, a.size); b = Allocation(two, a.size, a.digest); same(b); swap(); same(a, b)")
    p.do("write(b, 9); a.digest = b.digest; same(a); swap(); same(a, b)")
    p.do("unmap(a.address, a.size); swap(); same(b); unmap(b.address, b.size); swap()")
    p.do("map_at(a.address, a.size, a.handle); access(a.address, a.size); same(a); check()")


def test_a_graph_goes_on_with_what_came_back(program):
    p = program()
    p.do(
        "a = xla(4 * MIB, 1); s = ck(driver.cuStreamCreate(1))\n"
        "mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL\n"
        "ck(driver.cuStreamBeginCapture(s, mode))\n"
        "ck(driver.cuMemsetD8Async(a.address + MIB, 7, MIB, s))\n"
        "graph = ck(driver.cuStreamEndCapture(s)); run = ck(driver.cuGraphInstantiate(graph, 0))\n"
        "swap(); ck(driver.cuGraphLaunch(run, s)); sync()"
    )
    assert p.get("read(a.address + MIB, MIB) == bytes([7]) * MIB")
    p.do("a.digest = now(a); swap(); same(a)")


def test_released_while_mapped_and_unmapped_while_held(program, world):
    p = program()
    p.do("a = xla(4 * MIB, 1); release(a.handle); swap(); same(a)")
    p.do("b = xla(6 * MIB, 2); unmap(b.address, b.size); swap(); swap()")
    p.do("map_at(b.address, b.size, b.handle); access(b.address, b.size); same(a, b)")
    p.do("unmap(a.address, a.size); check()")
    assert p.get("books()['owned']") == 6 * MIB
    assert on_gpu(world, p) == 6 * MIB


def test_frees_while_the_memory_is_out(program, world):
    p = program()
    p.do("a, b, c = xla(4 * MIB, 1), xla(2 * MIB, 2), xla(2 * MIB, 3)")
    assert p.get("out()") == "moved"
    held = "ck(driver.cuMemAddressFree(a.address, a.size))"
    assert p.fails(held) == "CUDA_ERROR_INVALID_VALUE", "though the driver sees no mapping"
    assert p.fails("unmap(a.address, MIB)") == "CUDA_ERROR_INVALID_VALUE", "not the whole mapping"
    p.do("unmap(a.address, a.size); release(b.handle)")
    p.do("ck(driver.cuMemAddressFree(a.address, a.size))")
    assert (
        p.get("int(ck(driver.cuMemGetAllocationPropertiesFromHandle(a.handle)).location.id)") == 0
    )
    p.do("release(a.handle)")
    assert p.get("books()['out']") == 4 * MIB
    assert p.get("back()") == "moved"
    p.do("same(b, c); check()")
    assert on_gpu(world, p) == 4 * MIB


def test_access_comes_back_as_it_was(program):
    p = program()
    p.do("a = xla(4 * MIB, 1); access(a.address, a.size, READ); swap(); same(a)")
    assert p.get("may(a.address)") == 1
    p.do("access(a.address, a.size, NONE); swap()")
    assert p.get("may(a.address)") == 0
    p.do("access(a.address, a.size); same(a); swap(); same(a)")
    assert p.get("may(a.address)") == 3


def test_handles_are_names(program):
    p = program()
    p.do("a = xla(4 * MIB, 1); swap()")
    assert p.get("int(ck(driver.cuMemRetainAllocationHandle(a.address + 5))) == a.handle")
    assert (
        p.get("int(ck(driver.cuMemGetAllocationPropertiesFromHandle(a.handle)).location.id)") == 0
    )
    p.do("release(a.handle); release(a.handle)")
    assert p.fails("release(a.handle)") == "CUDA_ERROR_INVALID_VALUE"
    assert p.fails("release(a.handle + 1)") == "CUDA_ERROR_INVALID_VALUE"
    p.do("swap(); same(a)")
    plain = "ck(driver.cuMemRetainAllocationHandle(make(3 * MIB, 1).address))"
    assert p.fails(plain) == "CUDA_ERROR_INVALID_VALUE"


def test_a_thousand_names(tmp_path, library):
    world = World(tmp_path, library, "1x3GiB")
    try:
        p = world.worker(
            "init(); from owner_calls import *; from vmm_calls import *", PYTHONPATH=str(SUPPORT)
        )
        p.do("held = [create(2 * MIB) for _ in range(1000)]")
        assert p.get("len(set(held))") == 1000
        assert p.get("books()['owned']") == 2000 * MIB
        p.do("for h in held[::2]: release(h)")
        p.do("kinds = [ck(driver.cuMemGetAllocationPropertiesFromHandle(h)) for h in held[1::2]]")
        p.do("for h in held[1::2]: release(h)\ncheck()")
        assert p.get("books()['owned']") == 0
    finally:
        world.close()


# ---- what stays


def stays(world, p, size):
    """Check that exactly so many bytes stay, and are counted."""
    assert p.get("books()['unowned_ipc']") >= size
    p.do("check()")
    assert p.get("out()") == "moved"
    assert on_gpu(world, p) == size


def test_what_is_exported_stays_where_it_is(program, world):
    """The importer reads and writes while the program is paged out."""
    p, other = program(), program(KIWI_DISABLE="1")
    p.do("a, b = xla(4 * MIB, 1), xla(2 * MIB, 2); fd = export(a.handle)")
    descriptor = p.get("fd")
    other.do(f"seen = import_from({p.pid}, {descriptor}, 4 * MIB)")
    stays(world, p, 4 * MIB)
    assert other.get("now(seen)") == p.get("a.digest")
    other.do("write(seen, 7)")
    p.do("back(); same(b)")
    assert p.get("now(a)") == other.get("seen.digest")
    p.do("unmap(a.address, a.size); release(a.handle); check()")
    assert on_gpu(world, p) == 2 * MIB


def test_a_refused_export_changes_nothing(program):
    p = program()
    p.do("a = xla(4 * MIB, 1)")
    call = (
        "ck(driver.cuMemExportToShareableHandle(a.handle, driver.CUmemAllocationHandleType(8), 0))"
    )
    assert p.fails(call) == "CUDA_ERROR_NOT_SUPPORTED"
    assert p.get("books()['owned']") == 4 * MIB
    p.do("swap(); same(a)")


@pytest.mark.parametrize("how", ["sync_memops(a.address + MIB)", "dma_buf(a.address, a.size)"])
@pytest.mark.parametrize("kind", ["xla", "make"])
def test_what_a_device_may_read_by_itself_stays(program, world, how, kind):
    p = program()
    p.do(f"a, b, c = {kind}(4 * MIB, 1), {kind}(2 * MIB, 2), make(3 * MIB, 3)")
    p.do("sync_memops(b.address, 0)")
    p.do(how)
    stays(world, p, 4 * MIB)
    p.do("back(); same(a, b, c); drop(c); check()")
    p.do("unmap(a.address, a.size); release(a.handle)" if kind == "xla" else "drop(a)")
    p.do("check()")
    assert on_gpu(world, p) == 2 * MIB


def test_what_is_small_stays_with_its_neighbours(program, world):
    p = program()
    p.do("held = [make(70_000, i) for i in range(3)]; sync_memops(held[1].address)")
    stays(world, p, 2 * MIB)
    p.do("back(); same(*held)\nfor a in held: drop(a)\ncheck()")
    assert p.get("books()['unowned_ipc']") == 0
    assert on_gpu(world, p) == 0


@pytest.mark.parametrize(
    "bind",
    [
        "driver.cuMulticastBindMem(group, 0, a.handle, 0, a.size, 0)",
        "driver.cuMulticastBindAddr(group, 0, a.address, a.size, 0)",
    ],
)
def test_what_is_bound_to_a_multicast_object_stays(program, world, bind):
    p = program()
    p.do(f"a, b = xla(4 * MIB, 1), xla(2 * MIB, 2); group = team(4 * MIB); ck({bind})")
    stays(world, p, 4 * MIB)
    p.do("back(); same(a, b); ck(driver.cuMulticastUnbind(group, 0, 0, a.size)); release(group)")


def test_the_newer_forms_of_binding_get_the_drivers_handle(program, world):
    p = program()
    p.do(NEWER_FORMS)
    p.do("a, b = xla(4 * MIB, 1), xla(2 * MIB, 2); group = team(6 * MIB)")
    assert p.get("bind_mem(group, 0, 0, a.handle, 0, a.size, 0)") == 0
    assert p.get("bind_address(group, 0, a.size, b.address, b.size, 0)") == 0
    assert p.get("bind_mem(group, 0, 0, a.handle + 9, 0, a.size, 0)") == 1
    stays(world, p, 6 * MIB)


NEWER_FORMS = """
import ctypes
word, cuda = ctypes.c_uint64, ctypes.CDLL("libcuda.so.1")
def newer(name, version, *arguments):
    at, found = ctypes.c_void_p(), ctypes.c_int()
    get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, word,
                           ctypes.c_void_p)(("cuGetProcAddress_v2", cuda))
    assert get(name, ctypes.addressof(at), version, 0, ctypes.addressof(found)) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(at.value)
bind_mem = newer(b"cuMulticastBindMem", 13010, word, ctypes.c_int, word, word, word, word, word)
bind_address = newer(b"cuMulticastBindAddr", 13010, word, ctypes.c_int, word, word, word, word)
"""


def test_entries_of_sparse_arrays_get_the_drivers_handle(program):
    """The emulated driver has no such arrays, but it knows its handles."""
    p = program()
    p.do("a = xla(4 * MIB, 1)")
    assert p.get("map_into_array(a.handle)") == "CUDA_ERROR_NOT_SUPPORTED"
    assert p.get("map_into_array(a.handle + 9)") == "CUDA_ERROR_INVALID_VALUE"
    assert p.get("books()['owned']") == 4 * MIB, "the driver has refused it"


@pytest.mark.parametrize("where", ["HOST", "HOST_NUMA"])
def test_host_memory_is_the_drivers(program, where):
    p = program()
    p.do(
        "wanted = driver.CUmemAllocationProp(); wanted.type = prop().type\n"
        f"wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_{where}\n"
        "h = int(ck(driver.cuMemCreate(4 * MIB, wanted, 0))); at = reserve(4 * MIB)\n"
        "map_at(at, 4 * MIB, h); access(at, 4 * MIB); a = write(Allocation(at, 4 * MIB, ''), 1)"
    )
    assert p.get("books()['owned'], books()['unowned_vmm']") == [0, 0]
    p.do("swap(); same(a); unmap(at, 4 * MIB); release(h)")


def test_memory_of_another_gpu_is_the_drivers(tmp_path, library):
    world = World(tmp_path, library, "2x64MiB")
    try:
        p = world.worker(
            "init(); from owner_calls import *; from vmm_calls import *", PYTHONPATH=str(SUPPORT)
        )
        p.do("a = xla(2 * MIB, 1); h = int(ck(driver.cuMemCreate(4 * MIB, prop(1), 0)))")
        assert p.get("books()['owned'], books()['unowned_vmm']") == [2 * MIB, 4 * MIB]
        p.do("swap(); same(a); release(h)")
        assert p.get("books()['unowned_vmm']") == 0
    finally:
        world.close()


# ---- what goes wrong

TWICE = (
    "held = [xla(2 * MIB, 1), xla(6 * MIB, 2), make(5 * MIB, 3)]; s = Segment(2 * MIB)\n"
    "held.append(s.grow(0, 3, 4)); two = reserve(6 * MIB)\n"
    "map_at(two, 6 * MIB, held[1].handle); access(two, 6 * MIB)\n"
    "held.append(Allocation(two, 6 * MIB, held[1].digest))\n"
    "lone = create(2 * MIB)\n"
)


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_way_out_that_fails_leaves_all_in_the_gpu(program, kind):
    p = program()
    p.do(TWICE)
    for skip in range(8):
        p.do(f"fault('{kind}', {skip})")
        said = p.get("out()")
        assert said.startswith("refused driver: "), (skip, said)
        assert p.get("books()['out']") == 0
        p.do("same(*held); check()")
    p.do(f"fault('{kind}', 0, 0); swap(); same(*held)")


@pytest.mark.parametrize("kind", ["create", "map", "access", "copy_in"])
def test_a_way_in_that_fails_can_be_tried_again(program, world, kind):
    p = program()
    p.do(TWICE)
    assert p.get("out()") == "moved"
    for skip in range(6):
        p.do(f"fault('{kind}', {skip}, -1)")
        assert p.get("back()").startswith("refused "), skip
        assert on_gpu(world, p) == 0
    p.do(f"fault('{kind}', 0, 0)")
    assert p.get("back()") == "moved"
    p.do("same(*held); check(); swap(); same(*held)")


def test_a_way_out_that_fails_where_a_mapping_does_not_come_back(program):
    """The object is then in part at its addresses; a page-in or a page-out completes it."""
    for way in ("back()", "out()"):
        p = program()
        p.do("a = xla(4 * MIB, 1); two = reserve(4 * MIB); map_at(two, a.size, a.handle)")
        p.do("access(two, a.size); b = Allocation(two, a.size, a.digest)")
        p.do("fault('unmap', 1); fault('map', 0, -1)")
        assert p.get("out()").startswith("refused driver: ")
        p.do("check(); fault('map', 0, 0)")
        assert p.get(way) == "moved"
        p.do("check()")
        if way == "out()":
            p.do("back()")
        p.do("same(a, b); check(); swap(); same(a, b)")


def test_without_addresses_for_a_copy_the_object_is_left_to_the_driver(program, world):
    """Nothing of the program is mapped for the whole of it. A move is refused, but not for ever."""
    p = program()
    p.do("a = xla(4 * MIB, 1); b = xla(2 * MIB, 2); unmap(b.address, b.size)")
    p.do("fault('reserve', 0, -1)")
    for _ in range(3):
        assert p.get("out()").startswith("refused driver: ")
        p.do("same(a); check()")
    assert p.get("books()['unowned_vmm']") == 2 * MIB
    assert p.get("out()") == "moved"
    assert on_gpu(world, p) == 2 * MIB
    p.do("back(); map_at(b.address, b.size, b.handle); access(b.address, b.size); same(a, b)")


def test_without_addresses_for_a_copy_the_way_in_can_be_tried_again(program, world):
    p = program()
    p.do("b = xla(2 * MIB, 2); unmap(b.address, b.size)")
    assert p.get("out()") == "moved"
    p.do("fault('reserve', 0, -1)")
    for _ in range(5):
        assert p.get("back()").startswith("refused driver: "), "more room would not help"
        assert on_gpu(world, p) == 0
    p.do("fault('reserve', 0, 0)")
    assert p.get("back()") == "moved"
    p.do("map_at(b.address, b.size, b.handle); access(b.address, b.size); same(b); check()")


def test_without_room_the_way_in_is_refused(program, world):
    p = program()
    p.do(TWICE)
    assert p.get("out()") == "moved"
    other = program(KIWI_DISABLE="1")
    other.do("taken = alloc(54 * MIB)")
    assert p.get("back()").startswith("refused no-room: ")
    other.do("free(taken)")
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_objects_outlive_their_contexts(program, world):
    """They belong to no context, and move although the program has none."""
    p = program()
    p.do("first = ck(driver.cuCtxGetCurrent()); made = ck(driver.cuCtxCreate(None, 0, 0))")
    p.do("a = xla(4 * MIB, 1); ck(driver.cuCtxDestroy(made))")
    p.do("ck(driver.cuCtxSetCurrent(first)); swap(); same(a)")
    p.do("ck(driver.cuDevicePrimaryCtxRelease(0))")
    for _ in range(2):
        assert p.get("out()") == "moved"
        assert on_gpu(world, p) == 0
        assert p.get("back()") == "moved"
    assert p.get("ck(driver.cuDevicePrimaryCtxGetState(0))[1]") == 0, "the lent context is gone"
    p.do("check(); init(); same(a); swap(); same(a)")


def test_an_object_moves_though_no_context_can_be_made(program, world):
    p = program()
    p.do("a = xla(4 * MIB, 1); ck(driver.cuDevicePrimaryCtxRelease(0))")
    other = program(KIWI_DISABLE="1")
    other.do("taken = alloc(ck(driver.cuMemGetInfo())[0])")
    assert p.get("out()").startswith("refused driver: ")
    other.do("free(taken)")
    assert p.get("out()") == "moved"
    other.do("taken = alloc(ck(driver.cuMemGetInfo())[0])")
    assert p.get("back()").startswith("refused no-room: ")
    other.do("free(taken)")
    assert p.get("back()") == "moved"
    p.do("check(); init(); same(a)")


def test_a_broken_context_takes_only_what_no_other_can_read(program, world):
    p = program()
    p.do("a = xla(4 * MIB, 1); healthy = ck(driver.cuCtxGetCurrent())")
    p.do("other = ck(driver.cuCtxCreate(None, 0, 0)); p = alloc(4 * MIB)")
    assert p.fails("launch('fill_u32', 8, 1, 1), sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert p.get("out()").startswith("lost ")
    p.do("ck(driver.cuCtxSetCurrent(healthy)); same(a); check()")
    assert p.fails("launch('fill_u32', 8, 1, 1), sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert p.get("out()").startswith("lost ")
    assert on_gpu(world, p) == 0
    p.do("check(); unmap(a.address, a.size); release(a.handle); check()")
    assert p.get("books()['owned']") == p.get("books()['out']")
