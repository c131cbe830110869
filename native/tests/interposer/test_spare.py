"""Tests of the GPU memory that a program cannot get, because the driver needs it for a page-out.

An H200 refused to checkpoint a process that had filled the GPU to its last block.
"""

from __future__ import annotations

import pytest
from preload_world import World

GATE_ONLY = {"KIWI_PRELOAD_OWN": "0"}
SPARE = "4 * MIB"
"""One part in 64 of the emulated GPU of 256 MiB."""

BY_ALLOC = "while name_of(driver.cuMemAlloc, 2 * MIB) == 'CUDA_SUCCESS': pass"
BY_PITCH = "while name_of(driver.cuMemAllocPitch, 2 * MIB, 1, 4) == 'CUDA_SUCCESS': pass"
BY_CREATE = (
    "prop = driver.CUmemAllocationProp()\n"
    "prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
    "prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE\n"
    "while name_of(driver.cuMemCreate, 2 * MIB, prop, 0) == 'CUDA_SUCCESS': pass"
)
FREE = "ck(driver.cuMemGetInfo())[0]"


@pytest.mark.parametrize("fill", [BY_ALLOC, BY_PITCH, BY_CREATE])
def test_a_program_that_fills_the_gpu_leaves_the_spare(world, fill):
    worker = world.worker(**GATE_ONLY)
    worker.do(fill)
    assert worker.get(f"{SPARE} <= {FREE} < {SPARE} + 2 * MIB")
    worker.do("free(alloc(4096))")  # out of a block that the driver has already


def test_freed_memory_can_be_had_again(world):
    worker = world.worker(**GATE_ONLY)
    worker.do("first = alloc(16 * MIB)")
    worker.do(BY_ALLOC)
    worker.do("free(first); again = alloc(16 * MIB)")
    assert worker.get("name_of(driver.cuMemAlloc, 2 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_full_gpu_keeps_no_memory_of_another_from_a_program(tmp_path, library):
    world = World(tmp_path, library, "2x256MiB")
    try:
        worker = world.worker(**GATE_ONLY)
        worker.do(BY_ALLOC)
        worker.do(BY_CREATE.partition("while")[0])
        worker.do("prop.location.id = 1; handle = ck(driver.cuMemCreate(2 * MIB, prop, 0))")
        worker.do("prop.location.id = 0")
        assert worker.get("name_of(driver.cuMemCreate, 2 * MIB, prop, 0)") == (
            "CUDA_ERROR_OUT_OF_MEMORY"
        )
    finally:
        world.close()


@pytest.mark.parametrize("setting", [{"KIWI_DISABLE": "1"}, {}])
def test_memory_that_the_library_moves_needs_no_spare(world, setting):
    worker = world.worker(**setting)
    worker.do(BY_ALLOC)
    assert worker.get(f"{FREE} < 2 * MIB")
