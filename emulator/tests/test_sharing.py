"""Tests of memory that leaves a process: descriptors, multicast objects; and of memory in the
host."""

from __future__ import annotations

import pytest
from cuda_setups import VMM

MIB = 1 << 20
SHARED = VMM + (
    "FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\n"
    "def put(h, size):\n"
    "    at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
    "    ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [desc], 1))\n"
    "    return at\n"
    "def import_from(pid, fd):\n"
    "    mine = os.open(f'/proc/{pid}/fd/{fd}', os.O_RDWR)\n"
    "    h = ck(driver.cuMemImportFromShareableHandle(mine, FD)); os.close(mine); return h\n"
    "prop.requestedHandleTypes = FD; size = 4 * MIB\n"
)
EXPORT = (
    "h = ck(driver.cuMemCreate(size, prop, 0)); at = put(h, size); d = fill(at, 5, size)\n"
    "fd = int(ck(driver.cuMemExportToShareableHandle(h, FD, 0)))"
)


@pytest.fixture
def two(machine):
    workers = machine.worker(), machine.worker()
    for worker in workers:
        worker.do(SHARED)
    return workers


def test_a_descriptor_stands_for_the_memory(two, machine):
    one, other = two
    one.do(EXPORT)
    assert one.get("digest(at, size) == d"), "it is where it was"
    other.do(f"h = import_from({one.pid}, {one.get('fd')}); at = put(h, size)")
    assert other.get("digest(at, size)") == one.get("d")
    assert other.get("fill(at, 6, size)") == one.get("digest(at, size)")
    assert machine.device_bytes(one) == 4 * MIB
    assert machine.device_bytes(other) == 0, "it is on the exporter's books"


def test_memory_lives_as_long_as_anybody_has_it(two):
    one, other = two
    one.do(EXPORT)
    other.do(f"h = import_from({one.pid}, {one.get('fd')}); ck(driver.cuMemRelease(h))")
    other.do(f"h = import_from({one.pid}, {one.get('fd')}); at = put(h, size)")
    one.do("ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemRelease(h)); os.close(fd)")
    assert other.get("digest(at, size)") == one.get("d")
    other.do("ck(driver.cuMemRelease(h))")
    assert other.get("digest(at, size)") == one.get("d")


def test_what_is_no_descriptor_of_memory_is_refused(two):
    one, _ = two
    one.do("pipe, _ = os.pipe(); h = ck(driver.cuMemCreate(size, prop, 0))")
    for call in (
        "driver.cuMemImportFromShareableHandle, pipe, FD",
        "driver.cuMemImportFromShareableHandle, 999, FD",
        "driver.cuMemExportToShareableHandle, 5, FD, 0",
    ):
        assert one.get(f"name_of({call})") == "CUDA_ERROR_INVALID_VALUE"
    one.do("prop.requestedHandleTypes = type(FD)(0); h = ck(driver.cuMemCreate(size, prop, 0))")
    refused = "name_of(driver.cuMemExportToShareableHandle, h, FD, 0)"
    assert one.get(refused) == "CUDA_ERROR_INVALID_VALUE", "nobody asked for a descriptor"


@pytest.mark.parametrize("who", [0, 1])
def test_a_checkpoint_of_a_process_with_shared_memory_is_refused(two, who):
    """It would break what the other process sees."""
    one, other = two
    one.do(EXPORT)
    other.do(f"h = import_from({one.pid}, {one.get('fd')}); at = put(h, size)")
    target = two[who]
    caller = two[1 - who]
    caller.do("args = driver.CUcheckpointLockArgs(); args.timeoutMs = 5000")
    caller.do(f"ck(driver.cuCheckpointProcessLock({target.pid}, args))")
    refused = f"name_of(driver.cuCheckpointProcessCheckpoint, {target.pid}, None)"
    assert caller.get(refused) == "CUDA_ERROR_NOT_SUPPORTED"
    caller.do(f"ck(driver.cuCheckpointProcessUnlock({target.pid}, None))")
    assert target.get("digest(at, size)") == one.get("d")


@pytest.mark.parametrize(
    ("where", "node", "answer"),
    [
        ("HOST", 7, "CUDA_SUCCESS"),
        ("HOST_NUMA", 0, "CUDA_SUCCESS"),
        ("HOST_NUMA", 1, "CUDA_ERROR_INVALID_VALUE"),
        ("HOST_NUMA_CURRENT", 0, "CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_memory_in_the_host(two, machine, where, node, answer):
    one, _ = two
    one.do(
        f"prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_{where}\n"
        f"prop.location.id = {node}; prop.requestedHandleTypes = type(FD)(0)"
    )
    assert one.get("name_of(driver.cuMemCreate, size, prop, 0)") == answer
    assert machine.device_bytes(one) == 0
    if answer == "CUDA_SUCCESS":
        one.do("at = put(ck(driver.cuMemCreate(size, prop, 0)), size); d = fill(at, 5, size)")
        assert one.get("digest(at, size) == d")


TEAM = (
    "wanted = driver.CUmulticastObjectProp(); wanted.numDevices = 1; wanted.size = 2 * size\n"
    "team = int(ck(driver.cuMulticastCreate(wanted))); h = ck(driver.cuMemCreate(size, prop, 0))"
)


def test_memory_bound_to_a_multicast_object_stays_until_it_is_unbound(two, machine):
    one, _ = two
    one.do(TEAM)
    bind = "name_of(driver.cuMulticastBindMem, team, {}, {}, 0, size, 0)"
    assert one.get(bind.format(0, "h")) == "CUDA_ERROR_INVALID_VALUE", "its device is not added yet"
    one.do("ck(driver.cuMulticastAddDevice(team, 0))")
    assert one.get("name_of(driver.cuMulticastAddDevice, team, 0)") == "CUDA_ERROR_INVALID_VALUE"
    assert one.get(bind.format(0, "team")) == "CUDA_ERROR_INVALID_VALUE", "no memory"
    assert one.get(bind.format(0, "h")) == "CUDA_SUCCESS"
    assert one.get(bind.format(0, "h")) == "CUDA_ERROR_INVALID_VALUE", "the place is taken"
    one.do("ck(driver.cuMemRelease(h))")
    assert machine.device_bytes(one) == 4 * MIB
    one.do("ck(driver.cuMulticastUnbind(team, 0, 0, size))")
    assert machine.device_bytes(one) == 0
    one.do("h = ck(driver.cuMemCreate(size, prop, 0)); at = put(h, size)")
    one.do("ck(driver.cuMulticastBindAddr(team, size, at, size, 0))")
    one.do("ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemRelease(h))")
    assert machine.device_bytes(one) == 4 * MIB
    one.do("ck(driver.cuMemRelease(team))")
    assert machine.device_bytes(one) == 0


def test_a_range_that_a_device_may_read_has_a_descriptor(two):
    one, _ = two
    one.do("dma = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD")
    one.do("at = alloc(4 * MIB); taken = alloc(4096)")
    one.do("os.close(int(ck(driver.cuMemGetHandleForAddressRange(at + MIB, MIB, dma, 0))))")
    for part in ("at + 100, MIB", "at, 4 * MIB + 4096", "0, MIB"):
        call = f"name_of(driver.cuMemGetHandleForAddressRange, {part}, dma, 0)"
        assert one.get(call) == "CUDA_ERROR_INVALID_VALUE"
