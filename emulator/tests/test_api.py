"""Tests of the unmodified bindings on the emulated driver: every call that a program may make."""

from __future__ import annotations

import struct

import pytest

import kiwi_emulator as emulator

MIB = 1 << 20


@pytest.fixture
def worker(machine):
    return machine.worker()


def u32(data):
    return [x for (x,) in struct.iter_unpack("<I", data)]


def hexed(worker, expression):
    return bytes.fromhex(worker.get(f"({expression}).hex()"))


def test_it_says_that_it_is_emulated(worker, machine):
    worker.do("dev = ck(driver.cuDeviceGet(0))")
    assert "Emulated" in worker.get("ck(driver.cuDeviceGetName(64, dev)).decode()")
    version = worker.get("ck(driver.cuDriverGetVersion())")
    assert version in {profile.cuda_version for profile in emulator.DRIVERS.values()}
    assert worker.get("ck(driver.cuDeviceTotalMem(dev))") == 64 * MIB
    worker.do(
        "import ctypes\n"
        "version = ctypes.CDLL('libcuda.so.1').kiwi_emulator_version\n"
        "version.restype = ctypes.c_char_p"
    )
    assert worker.get("version().decode()").startswith("kiwi emulated")


def test_a_call_that_is_not_emulated_refuses(worker):
    assert worker.get("name_of(driver.cuDeviceGraphMemTrim, 0)") == "CUDA_ERROR_NOT_SUPPORTED"


def test_wrong_use_that_the_conformance_suite_leaves_out(worker):
    for call in (
        "driver.cuMemFree, 12345",
        "driver.cuMemcpyDtoH, bytearray(8), alloc(4096) + (1 << 30), 8",
        "driver.cuStreamCreate, 99",
        "driver.cuCheckpointProcessGetState, -1",
    ):
        assert worker.get(f"name_of({call})") == "CUDA_ERROR_INVALID_VALUE", call


def test_freed_memory_cannot_be_used(worker):
    worker.do("p = alloc(MIB); free(p)")
    assert worker.fails("read(p, 8)") == "CUDA_ERROR_INVALID_VALUE"
    assert worker.fails("free(p)") == "CUDA_ERROR_INVALID_VALUE"


def test_addresses_are_used_again(worker):
    worker.do("first = alloc(60 * MIB); free(first)")
    worker.do("for _ in range(2000): p = alloc(60 * MIB); free(p)")
    assert worker.get("p == first")


def test_kernels(worker):
    worker.do("n = 1000; p = alloc(4 * n); out = alloc(8)")
    worker.do("launch('fill_u32', p, n, 5); launch('add_u32', p, n, 2**32 - 3)")
    assert u32(hexed(worker, "read(p, 4 * n)")) == [2] * 1000
    worker.do("launch('xorshift_u32', p, n, 99); launch('checksum_u64', p, n, out)")
    values = u32(hexed(worker, "read(p, 4 * n)"))
    expected = []
    for i in range(1000):
        x = 99 ^ (i * 2654435761 & 0xFFFFFFFF)
        x ^= x << 13 & 0xFFFFFFFF
        x ^= x >> 17
        x ^= x << 5 & 0xFFFFFFFF
        expected.append(x)
    assert values == expected
    total = sum(x * (i + 1) for i, x in enumerate(values)) % 2**64
    assert worker.get("int.from_bytes(read(out, 8), 'little')") == total


def test_a_kernel_that_leaves_its_memory_breaks_the_context(worker):
    worker.do("p = alloc(4096); launch('fill_u32', p, 100000, 1)")
    assert worker.fails("sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert worker.fails("alloc(8)") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    worker.do("ck(driver.cuDevicePrimaryCtxReset(0)); init(); alloc(8)")


def test_launches_are_asynchronous_and_streams_keep_order(worker):
    worker.do(
        "s = ck(driver.cuStreamCreate(1)); p = alloc(4096); stuck = Stuck(s)\n"
        "launch('spin_ns', 500_000_000, stream=s); launch('fill_u32', p, 1024, 8, stream=s)"
    )
    assert worker.get("name_of(driver.cuStreamQuery, s)") == "CUDA_ERROR_NOT_READY"
    worker.do("t = time.monotonic(); stuck.end()")
    assert worker.get("time.monotonic() - t") >= 0.5
    assert worker.get("name_of(driver.cuStreamQuery, s)") == "CUDA_SUCCESS"
    assert worker.get("read(p, 1)[0]") == 8


@pytest.mark.parametrize(("flags", "waits"), [(0, True), (1, False)])
def test_the_default_stream_waits_for_blocking_streams_only(worker, flags, waits):
    work = "launch('spin_ns', 1_000_000_000, stream=s)" if waits else "stuck = Stuck(s)"
    worker.do(
        f"s = ck(driver.cuStreamCreate({flags})); p = alloc(4096); sync()\n"
        f"{work}\n"
        "ck(driver.cuMemcpyHtoD(p, b'x', 1)); seen = name_of(driver.cuStreamQuery, s)"
    )
    assert worker.get("seen") == ("CUDA_SUCCESS" if waits else "CUDA_ERROR_NOT_READY")
    worker.do("sync()" if waits else "stuck.end()")


def test_events_order_streams_and_measure(worker):
    worker.do(
        "a, b = ck(driver.cuStreamCreate(1)), ck(driver.cuStreamCreate(1)); p = alloc(4096)\n"
        "start, end = ck(driver.cuEventCreate(0)), ck(driver.cuEventCreate(0))\n"
        "stuck = Stuck(a)\n"
        "ck(driver.cuEventRecord(start, a)); launch('spin_ns', 200_000_000, stream=a)\n"
        "launch('fill_u32', p, 1024, 1, stream=a); ck(driver.cuEventRecord(end, a))\n"
        "ck(driver.cuStreamWaitEvent(b, end, 0)); launch('add_u32', p, 1024, 1, stream=b)"
    )
    assert worker.get("name_of(driver.cuEventQuery, end)") == "CUDA_ERROR_NOT_READY"
    worker.do("t = time.monotonic(); stuck.end(); ck(driver.cuStreamSynchronize(b))")
    took_ms = 1000 * worker.get("time.monotonic() - t")
    assert worker.get("read(p, 1)[0]") == 2
    assert 200 <= worker.get("ck(driver.cuEventElapsedTime(start, end))") <= took_ms
    never = "driver.cuEventElapsedTime, start, ck(driver.cuEventCreate(0))"
    assert worker.get(f"name_of({never})") == "CUDA_ERROR_INVALID_HANDLE"


def test_copies_from_pinned_memory_are_asynchronous(worker):
    worker.do(
        "h = int(ck(driver.cuMemHostAlloc(MIB, 0))); p = alloc(MIB)\n"
        "s = ck(driver.cuStreamCreate(1)); stuck = Stuck(s)\n"
        "ck(driver.cuMemcpyHtoDAsync(p, h, MIB, s))\n"
        "seen = name_of(driver.cuStreamQuery, s); stuck.end()"
    )
    assert worker.get("seen") == "CUDA_ERROR_NOT_READY"


def test_stream_ordered_allocation(worker, machine):
    worker.do("s = ck(driver.cuStreamCreate(1)); p = ck(driver.cuMemAllocAsync(60 * MIB, s))")
    assert machine.device_bytes(worker) == 60 * MIB
    worker.do("launch('spin_ns', 200_000_000, stream=s); ck(driver.cuMemFreeAsync(p, s))")
    worker.do("q = ck(driver.cuMemAllocAsync(60 * MIB, s))  # room comes when the first is freed")
    worker.do("ck(driver.cuMemFreeAsync(q, s)); ck(driver.cuStreamSynchronize(s))")
    assert machine.device_bytes(worker) == 0


def test_cuda_core_objects(worker, machine):
    worker.do(
        "from cuda.core import Device, LaunchConfig, ObjectCode, launch as core_launch\n"
        "import ctypes\n"
        "d = Device(0); d.set_current(); s = d.create_stream()\n"
        "a, b = d.allocate(MIB, stream=s), d.allocate(MIB, stream=s)\n"
        "k = ObjectCode.from_cubin(b'kiwi-emulated-module\\0').get_kernel('fill_u32')\n"
        "args = (ctypes.c_uint64(int(a.handle)), ctypes.c_uint64(1024), ctypes.c_uint32(3))\n"
        "core_launch(s, LaunchConfig(grid=1, block=1), k, *args)\n"
        "a.copy_to(b, stream=s); e = s.record(); e.sync(); s.sync()"
    )
    assert worker.get("read(int(b.handle), 4)[0]") == 3
    assert worker.get("tuple(d.compute_capability)") == [9, 0]
    worker.do("a.close(s); b.close(s); s.sync()")
    assert machine.device_bytes(worker) == 0


def test_contexts_are_a_stack_and_own_their_memory(worker, machine):
    worker.do("one = ck(driver.cuCtxCreate(None, 0, 0)); p = alloc(8 * MIB)")
    assert machine.books(worker).context_bytes == {0: 4 * MIB}
    worker.do("two = ck(driver.cuCtxCreate(None, 0, 0))")
    assert worker.get("int(ck(driver.cuCtxGetCurrent())) == int(two)")
    worker.do("ck(driver.cuCtxPopCurrent())")
    assert worker.get("int(ck(driver.cuCtxGetCurrent())) == int(one)")
    worker.do("ck(driver.cuCtxDestroy(one)); ck(driver.cuCtxDestroy(two))")
    assert machine.device_bytes(worker) == 0
    assert machine.books(worker).context_bytes == {0: 2 * MIB}
    assert worker.get("name_of(driver.cuCtxSetCurrent, one)") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"


def test_releasing_the_primary_context_gives_everything_back(worker, machine):
    worker.do("p = alloc(8 * MIB); ck(driver.cuDevicePrimaryCtxRelease(0))")
    assert machine.used() == 0
    assert worker.fails("alloc(8)") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    worker.do("init(); alloc(8 * MIB)")


def test_host_functions_run_in_order_and_may_not_call_cuda(worker):
    worker.do(
        "import ctypes; seen = []\n"
        "@ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "def note(data): seen.append(name_of(driver.cuMemGetInfo))\n"
        "launch('spin_ns', 50_000_000)\n"
        "fn = driver.CUhostFn(_ptr=ctypes.addressof(note))\n"
        "ck(driver.cuLaunchHostFunc(0, fn, 0)); sync()"
    )
    assert worker.get("seen") == ["CUDA_ERROR_NOT_PERMITTED"]


def test_visible_devices(boot):
    machine = boot("3x32MiB")
    import kiwi_emulator as emulator

    third = emulator.books(machine.state).gpus[2].uuid
    worker = machine.worker(CUDA_VISIBLE_DEVICES=f"{third},0,9")
    assert worker.get("ck(driver.cuDeviceGetCount())") == 2
    worker.do("alloc(16 * MIB)")
    assert machine.used(2) == 18 * MIB
    hidden = machine.worker(setup="", CUDA_VISIBLE_DEVICES="")
    assert hidden.get("name_of(driver.cuInit, 0)") == "CUDA_ERROR_NO_DEVICE"
