"""Tests of the driver's answers about devices, memory, streams, events, contexts, virtual
memory."""

from __future__ import annotations

from cuda_setups import VMM

MIB = 1 << 20


def test_nvml_and_the_driver_mean_the_same_gpu(worker):
    worker.do(
        "import pynvml; pynvml.nvmlInit(); dev = ck(driver.cuDeviceGet(0))\n"
        "uuid = ck(driver.cuDeviceGetUuid(dev)).bytes\n"
        "text = 'GPU-' + '-'.join(uuid.hex()[a:b] for a, b in "
        "((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))\n"
        "h = pynvml.nvmlDeviceGetHandleByUUID(text)"
    )
    assert worker.get("pynvml.nvmlDeviceGetName(h)") == worker.get(
        "ck(driver.cuDeviceGetName(96, dev)).split(b'\\0')[0].decode()"
    )
    total = worker.get("ck(driver.cuDeviceTotalMem(dev))")
    reported = worker.get("pynvml.nvmlDeviceGetMemoryInfo(h).total")
    assert abs(total - reported) < 0.05 * reported
    assert worker.get("ck(driver.cuMemGetInfo())[1]") == total


def test_bytes_come_back(worker):
    worker.do("p = alloc(8 * MIB + 13)")
    expected = worker.get("fill(p, 1, 8 * MIB + 13)")
    assert worker.get("digest(p, 8 * MIB + 13)") == expected
    worker.do("q = alloc(8 * MIB + 13); ck(driver.cuMemcpyDtoD(q, p, 8 * MIB + 13)); free(p)")
    assert worker.get("digest(q, 8 * MIB + 13)") == expected


def test_fills(worker):
    worker.do("p = alloc(4096); ck(driver.cuMemsetD8(p, 0xAB, 4096))")
    worker.do("ck(driver.cuMemsetD32(p + 4, 0x01020304, 2)); ck(driver.cuMemsetD16(p + 16, 5, 1))")
    worker.do("ck(driver.cuMemsetD2D8(p + 64, 8, 9, 2, 2))")
    expected = b"\xab" * 4 + bytes.fromhex("0403020104030201") + b"\xab" * 4 + b"\x05\x00\xab"
    assert worker.get("read(p, 19).hex()") == expected.hex()
    assert (
        worker.get("read(p + 64, 11).hex()") == (b"\x09\x09" + b"\xab" * 6 + b"\x09\x09\xab").hex()
    )


def test_free_memory_falls_and_rises(worker):
    before = worker.get("used()")
    worker.do("p = alloc(128 * MIB)")
    assert abs(worker.get("used()") - before - 128 * MIB) <= 4 * MIB
    worker.do("free(p)")
    assert abs(worker.get("used()") - before) <= 4 * MIB


def test_another_process_sees_it(platform, worker):
    other = platform.worker()
    before = other.get("used()")
    worker.do("p = alloc(128 * MIB)")
    assert abs(other.get("used()") - before - 128 * MIB) <= 4 * MIB


WRONG_USE = {
    "driver.cuMemAlloc, 0": "CUDA_ERROR_INVALID_VALUE",
    "driver.cuMemAlloc, 1 << 46": "CUDA_ERROR_OUT_OF_MEMORY",
    "driver.cuMemFree, 0": "CUDA_SUCCESS",
    "driver.cuMemFree, p + 64": "CUDA_ERROR_INVALID_VALUE",
    "driver.cuMemcpyHtoD, p, bytes(64 * MIB), 64 * MIB": "CUDA_ERROR_INVALID_VALUE",
    "driver.cuMemsetD32, p + 1, 0, 1": "CUDA_ERROR_INVALID_VALUE",
    "driver.cuDeviceGet, 1000": "CUDA_ERROR_INVALID_DEVICE",
    "driver.cuModuleLoadData, b'this is not code'": "CUDA_ERROR_INVALID_IMAGE",
    "driver.cuInit, 1": "CUDA_ERROR_INVALID_VALUE",
}


def test_wrong_use(worker):
    worker.do("p = alloc(4 * MIB)")
    assert {call: worker.get(f"name_of({call})") for call in WRONG_USE} == WRONG_USE


def test_without_init_or_context(platform):
    worker = platform.worker(setup="")
    assert worker.get("name_of(driver.cuDeviceGetCount)") == "CUDA_ERROR_NOT_INITIALIZED"
    worker.do("ck(driver.cuInit(0))")
    assert worker.get("name_of(driver.cuMemAlloc, 8)") == "CUDA_ERROR_INVALID_CONTEXT"


def test_current_contexts_are_a_stack(worker):
    worker.do("c = ck(driver.cuCtxGetCurrent()); ck(driver.cuCtxPushCurrent(c))")
    assert worker.get("int(ck(driver.cuCtxPopCurrent())) == int(c)")
    worker.do("ck(driver.cuCtxPopCurrent())")
    assert worker.get("int(ck(driver.cuCtxGetCurrent()))") == 0
    assert worker.get("name_of(driver.cuCtxPopCurrent)") == "CUDA_ERROR_INVALID_CONTEXT"
    assert worker.get("name_of(driver.cuMemAlloc, 8)") == "CUDA_ERROR_INVALID_CONTEXT"


def test_a_primary_context_is_counted(worker):
    worker.do("dev = ck(driver.cuDeviceGet(0)); again = ck(driver.cuDevicePrimaryCtxRetain(dev))")
    worker.do("ck(driver.cuDevicePrimaryCtxRelease(dev))")
    assert worker.get("list(ck(driver.cuDevicePrimaryCtxGetState(dev)))[1]") == 1
    worker.do("ck(driver.cuDevicePrimaryCtxRelease(dev))")
    assert worker.get("list(ck(driver.cuDevicePrimaryCtxGetState(dev)))[1]") == 0


def test_streams_keep_order_and_events_join_them(worker):
    worker.do(
        "a, b = ck(driver.cuStreamCreate(1)), ck(driver.cuStreamCreate(1)); n = 8 * MIB\n"
        "p = alloc(4 * n); e = ck(driver.cuEventCreate(0)); f = ck(driver.cuEventCreate(0))\n"
        "ck(driver.cuEventRecord(e, a))\n"
        "for i in range(20): ck(driver.cuMemsetD32Async(p, i, n, a))\n"
        "ck(driver.cuEventRecord(f, a)); ck(driver.cuStreamWaitEvent(b, f, 0))\n"
        "ck(driver.cuMemsetD32Async(p, 77, n // 2, b)); ck(driver.cuStreamSynchronize(b))"
    )
    assert worker.get("read(p, 4).hex()") == "4d000000"
    assert worker.get("read(p + 3 * n, 4).hex()") == "13000000"
    assert worker.get("name_of(driver.cuEventQuery, f)") == "CUDA_SUCCESS"
    assert worker.get("ck(driver.cuEventElapsedTime(e, f))") >= 0
    assert worker.get("name_of(driver.cuStreamQuery, a)") == "CUDA_SUCCESS"
    worker.do("ck(driver.cuStreamDestroy(a)); ck(driver.cuEventDestroy(e))")


def test_elapsed_time_needs_recorded_events(worker):
    worker.do("e, f = ck(driver.cuEventCreate(0)), ck(driver.cuEventCreate(0))")
    assert worker.get("name_of(driver.cuEventElapsedTime, e, f)") == "CUDA_ERROR_INVALID_HANDLE"
    assert worker.get("name_of(driver.cuEventQuery, e)") == "CUDA_SUCCESS"
    assert worker.get("name_of(driver.cuEventSynchronize, e)") == "CUDA_SUCCESS"


def test_pinned_memory_and_asynchronous_copies(worker):
    worker.do(
        "import ctypes; h = int(ck(driver.cuMemHostAlloc(4 * MIB, 0))); p = alloc(4 * MIB)\n"
        "s = ck(driver.cuStreamCreate(1)); ctypes.memset(h, 7, 4 * MIB)\n"
        "ck(driver.cuMemcpyHtoDAsync(p, h, 4 * MIB, s)); ck(driver.cuStreamSynchronize(s))"
    )
    assert worker.get("set(read(p, 4 * MIB)) == {7}")
    worker.do("ck(driver.cuMemsetD8Async(p, 9, 4 * MIB, s))")
    worker.do("ck(driver.cuMemcpyDtoHAsync(h, p, 4 * MIB, s)); ck(driver.cuStreamSynchronize(s))")
    assert worker.get("set(ctypes.string_at(h, 4 * MIB)) == {9}")
    worker.do("ck(driver.cuMemFreeHost(h))")


def test_host_memory_is_registered_once(worker):
    worker.do(
        "import mmap, ctypes; m = mmap.mmap(-1, MIB)\n"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "ck(driver.cuMemHostRegister(a, MIB, 0))"
    )
    again = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert worker.get("name_of(driver.cuMemHostRegister, a, MIB, 0)") == again
    worker.do("ck(driver.cuMemHostUnregister(a))")
    never = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
    assert worker.get("name_of(driver.cuMemHostUnregister, a)") == never


def test_pointer_attributes(worker):
    worker.do(
        "p = alloc(MIB); h = int(ck(driver.cuMemHostAlloc(4096, 0)))\n"
        "def ask(x, what): return ck(driver.cuPointerGetAttribute("
        "getattr(driver.CUpointer_attribute, 'CU_POINTER_ATTRIBUTE_' + what), x))"
    )
    assert worker.get("int(ask(p + 9, 'MEMORY_TYPE'))") == 2
    assert worker.get("int(ask(h, 'MEMORY_TYPE'))") == 1
    assert worker.get("ask(p, 'DEVICE_ORDINAL')") == 0
    assert worker.get("int(ask(p + 9, 'RANGE_START_ADDR')) == p")
    assert worker.get("int(ask(p + 9, 'RANGE_SIZE'))") == MIB
    assert worker.fails("ask(id(p), 'MEMORY_TYPE')") == "CUDA_ERROR_INVALID_VALUE"
    assert worker.get("[int(x) for x in ck(driver.cuMemGetAddressRange(p + 9))][0] == p")
    assert worker.get("[int(x) for x in ck(driver.cuMemGetAddressRange(h + 9))] == [h, 4096]")


def test_stream_ordered_memory(worker):
    worker.do(
        "s = ck(driver.cuStreamCreate(1)); p = ck(driver.cuMemAllocAsync(32 * MIB, s))\n"
        "ck(driver.cuMemsetD8Async(p, 3, 32 * MIB, s)); ck(driver.cuStreamSynchronize(s))"
    )
    assert worker.get("read(int(p) + 31 * MIB, 1)[0]") == 3
    worker.do("ck(driver.cuMemFreeAsync(p, s)); ck(driver.cuStreamSynchronize(s))")


def test_cuda_core_buffers_streams_and_events(worker):
    worker.do(
        "from cuda.core import Device; d = Device(0); d.set_current(); s = d.create_stream()\n"
        "a, b = d.allocate(MIB, stream=s), d.allocate(MIB, stream=s)\n"
        "ck(driver.cuMemsetD8Async(int(a.handle), 5, MIB, s.handle)); a.copy_to(b, stream=s)\n"
        "e = s.record(); e.sync(); s.sync()"
    )
    assert worker.get("set(read(int(b.handle), MIB)) == {5}")
    worker.do("a.close(s); b.close(s); s.sync()")


def test_virtual_memory_one_handle_at_two_addresses(worker):
    worker.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "at = int(ck(driver.cuMemAddressReserve(2 * size, 0, 0, 0)))\n"
        "for i in (0, 1): ck(driver.cuMemMap(at + i * size, size, 0, h, 0))\n"
        "ck(driver.cuMemSetAccess(at, 2 * size, [desc], 1))"
    )
    assert worker.get("g") % (64 << 10) == 0
    expected = worker.get("fill(at, 5, size)")
    assert worker.get("digest(at + size, size)") == expected
    worker.do("ck(driver.cuMemUnmap(at, 2 * size)); ck(driver.cuMemRelease(h))")
    worker.do("ck(driver.cuMemAddressFree(at, 2 * size))")


def test_virtual_memory_lives_until_unmapped_and_released(worker):
    worker.do(VMM + "size = 64 * MIB; before = used(); h = ck(driver.cuMemCreate(size, prop, 0))")
    held = worker.get("used() - before")
    assert abs(held - 64 * MIB) <= 4 * MIB
    worker.do(
        "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [desc], 1))\n"
        "ck(driver.cuMemRelease(h))"
    )
    expected = worker.get("fill(at, 6, size)")
    assert worker.get("digest(at, size)") == expected
    assert abs(worker.get("used() - before") - 64 * MIB) <= 4 * MIB
    worker.do("ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemAddressFree(at, size))")
    assert worker.get("used() - before") <= 4 * MIB


def test_new_memory_at_an_old_address_serves_a_graph_of_before(worker):
    worker.do(
        VMM + "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "def put():\n"
        "    h = ck(driver.cuMemCreate(size, prop, 0)); ck(driver.cuMemMap(at, size, 0, h, 0))\n"
        "    ck(driver.cuMemSetAccess(at, size, [desc], 1)); ck(driver.cuMemRelease(h))\n"
        "put(); s = ck(driver.cuStreamCreate(1))\n"
        "mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED\n"
        "ck(driver.cuStreamBeginCapture(s, mode))\n"
        "ck(driver.cuMemsetD32Async(at, 7, size // 4, s)); g = ck(driver.cuStreamEndCapture(s))\n"
        "run = ck(driver.cuGraphInstantiate(g, 0)); ck(driver.cuGraphLaunch(run, s)); sync()"
    )
    assert worker.get("read(at + size - 4, 4).hex()") == "07000000"
    worker.do("ck(driver.cuMemUnmap(at, size)); put(); ck(driver.cuMemsetD32(at, 1, size // 4))")
    worker.do("ck(driver.cuGraphLaunch(run, s)); sync()")
    assert worker.get("read(at + size - 4, 4).hex()") == "07000000"
    worker.do("ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemAddressFree(at, size))")


def test_a_descriptor_stands_for_virtual_memory(worker):
    worker.do(
        VMM + "FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\n"
        "prop.requestedHandleTypes = FD; h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "fd = int(ck(driver.cuMemExportToShareableHandle(h, FD, 0)))\n"
        "again = ck(driver.cuMemImportFromShareableHandle(fd, FD)); os.close(fd)\n"
        "at = int(ck(driver.cuMemAddressReserve(2 * size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0))\n"
        "ck(driver.cuMemMap(at + size, size, 0, again, 0))\n"
        "ck(driver.cuMemSetAccess(at, 2 * size, [desc], 1))"
    )
    expected = worker.get("fill(at, 5, size)")
    assert worker.get("digest(at + size, size)") == expected
    worker.do("ck(driver.cuMemUnmap(at, 2 * size)); ck(driver.cuMemRelease(h))")
    worker.do("ck(driver.cuMemRelease(again)); ck(driver.cuMemAddressFree(at, 2 * size))")


def test_a_handle_of_mapped_memory_is_the_one_that_was_mapped(worker):
    worker.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0)); p = alloc(size)\n"
        "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0)); again = ck(driver.cuMemRetainAllocationHandle(at))"
    )
    assert worker.get("int(again) == int(h)")
    plain = worker.get("name_of(driver.cuMemRetainAllocationHandle, p)")
    assert plain == "CUDA_ERROR_INVALID_VALUE", "memory of cuMemAlloc has no handle"
    worker.do("ck(driver.cuMemRelease(again)); ck(driver.cuMemRelease(h))")
    worker.do("ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemAddressFree(at, size))")


def test_wrong_use_of_virtual_memory(worker):
    worker.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "at = int(ck(driver.cuMemAddressReserve(4 * size, 0, 0, 0)))"
    )
    for call, answer in (
        ("driver.cuMemCreate, g + 1, prop, 0", "CUDA_ERROR_INVALID_VALUE"),
        ("driver.cuMemAddressReserve, g + 1, 0, 0, 0", "CUDA_ERROR_INVALID_VALUE"),
        ("driver.cuMemMap, at + 4096, g, 0, h, 0", "CUDA_ERROR_NOT_SUPPORTED"),
        ("driver.cuMemMap, at, 2 * size, 0, h, 0", "CUDA_ERROR_NOT_SUPPORTED"),
    ):
        assert worker.get(f"name_of({call})") == answer, call


GREEN = (
    "SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM\n"
    "def make_green(dev):\n"
    "    resource = ck(driver.cuDeviceGetDevResource(dev, SM))\n"
    "    resources = ck(driver.cuDevResourceGenerateDesc([resource], 1))\n"
    "    return ck(driver.cuGreenCtxCreate(resources, dev, 1))\n"
)


def test_memory_outlives_the_green_context_under_which_it_was_allocated(worker):
    worker.do(GREEN + "dev = ck(driver.cuDeviceGet(0)); green = make_green(dev)")
    worker.do("ck(driver.cuCtxPushCurrent(ck(driver.cuCtxFromGreenCtx(green))))")
    worker.do("p = alloc(4 * MIB); ck(driver.cuMemsetD32(p, 7, MIB))")
    worker.do("ck(driver.cuCtxPopCurrent()); ck(driver.cuGreenCtxDestroy(green))")
    assert worker.get("read(p, 4).hex()") == "07000000"


def test_streams_end_with_their_green_context(worker):
    worker.do(GREEN + "dev = ck(driver.cuDeviceGet(0)); green = make_green(dev)")
    worker.do("s = ck(driver.cuGreenCtxStreamCreate(green, 1, 0))")
    assert worker.get("name_of(driver.cuStreamQuery, s)") == "CUDA_SUCCESS"
    worker.do("ck(driver.cuGreenCtxDestroy(green))")
    assert worker.get("name_of(driver.cuStreamQuery, s)") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    assert worker.get("name_of(driver.cuStreamDestroy, s)") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"


def test_a_green_context_holds_the_primary_one(worker):
    worker.do(GREEN + "dev = ck(driver.cuDeviceGet(0)); green = make_green(dev)")
    worker.do("ck(driver.cuDevicePrimaryCtxRelease(dev))")
    assert worker.get("list(ck(driver.cuDevicePrimaryCtxGetState(dev)))[1]") == 1
    worker.do("ck(driver.cuGreenCtxDestroy(green))")
    assert worker.get("list(ck(driver.cuDevicePrimaryCtxGetState(dev)))[1]") == 0
