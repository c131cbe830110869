"""Tests of the checkpoint API as the daemon uses it, from another process and by pid."""

from __future__ import annotations

import pytest
from cuda_processes import wait_until
from cuda_setups import VMM

MIB = 1 << 20
GONE = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_INITIALIZED")
"""Answers of drivers about a process without CUDA, which differ between versions."""


@pytest.fixture
def controller(platform):
    return platform.worker(
        "ck(driver.cuInit(0)); import pynvml; pynvml.nvmlInit()\n"
        "handle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "def held(pid): return {p.pid: p.usedGpuMemory for p in "
        "pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}.get(pid, 0)\n"
        "def device_used(): return pynvml.nvmlDeviceGetMemoryInfo(handle).used"
    )


def call(controller, target, what):
    return controller.get(f"name_of(driver.cuCheckpointProcess{what}, {target.pid}, None)")


def state(controller, target):
    return controller.get(f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))")


def test_the_states_in_order(worker, controller):
    worker.do("p = alloc(64 * MIB)")
    expected = worker.get("fill(p, 7, 64 * MIB)")
    seen = [state(controller, worker)]
    for step in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert call(controller, worker, step) == "CUDA_SUCCESS"
        seen.append(state(controller, worker))
    assert seen == [0, 1, 2, 1, 0]
    assert worker.get("digest(p, 64 * MIB)") == expected


def test_illegal_transitions(worker, controller):
    illegal, fine = "CUDA_ERROR_ILLEGAL_STATE", "CUDA_SUCCESS"
    for wrong in ("Checkpoint", "Restore", "Unlock"):
        assert call(controller, worker, wrong) == illegal
    assert call(controller, worker, "Lock") == fine
    for wrong in ("Lock", "Restore"):
        assert call(controller, worker, wrong) == illegal
    assert call(controller, worker, "Checkpoint") == fine
    for wrong in ("Lock", "Checkpoint", "Unlock"):
        assert call(controller, worker, wrong) == illegal
    assert call(controller, worker, "Restore") == fine
    assert call(controller, worker, "Unlock") == fine
    assert state(controller, worker) == 0
    assert worker.get("used()") > 0


def test_a_checkpoint_gives_back_everything_the_process_holds(worker, controller):
    worker.do("p = alloc(128 * MIB)")
    assert controller.get(f"held({worker.pid})") >= 128 * MIB
    before = controller.get("device_used()")
    controller.do(f"suspend({worker.pid})")
    assert controller.get(f"held({worker.pid})") == 0
    wait_until(
        lambda: before - controller.get("device_used()") >= 128 * MIB, "the memory is free again"
    )
    controller.do(f"resume({worker.pid})")
    assert controller.get(f"held({worker.pid})") >= 128 * MIB


def test_same_addresses_same_bytes_for_every_kind_of_memory(worker, controller):
    worker.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0)); v = int(ck(driver.cuMemAddressReserve("
        "size, 0, 0, 0)))\nck(driver.cuMemMap(v, size, 0, h, 0))\n"
        "ck(driver.cuMemSetAccess(v, size, [desc], 1))\n"
        "s = ck(driver.cuStreamCreate(1)); a = int(ck(driver.cuMemAllocAsync(16 * MIB, s)))\n"
        "ck(driver.cuStreamSynchronize(s)); p = alloc(16 * MIB); small = alloc(100)\n"
        "blocks = ((v, size), (a, 16 * MIB), (p, 16 * MIB), (small, 100))\n"
        "expected = [fill(at, i, n) for i, (at, n) in enumerate(blocks)]"
    )
    for _ in range(2):
        controller.do(f"suspend({worker.pid}); resume({worker.pid})")
        assert worker.get("[digest(at, n) for at, n in blocks] == expected")
    worker.do("free(p); p2 = alloc(16 * MIB); ck(driver.cuMemsetD8(p2, 1, 16 * MIB)); sync()")


def test_streams_and_events_survive(worker, controller):
    worker.do(
        "s = ck(driver.cuStreamCreate(1)); e = ck(driver.cuEventCreate(0)); p = alloc(MIB)\n"
        "ck(driver.cuEventRecord(e, s)); ck(driver.cuStreamSynchronize(s))"
    )
    controller.do(f"suspend({worker.pid}); resume({worker.pid})")
    worker.do("ck(driver.cuEventQuery(e)); ck(driver.cuMemsetD8Async(p, 6, MIB, s))")
    worker.do("ck(driver.cuEventRecord(e, s)); ck(driver.cuEventSynchronize(e))")
    assert worker.get("read(p, 1)[0]") == 6


def test_submitted_work_is_done_before_the_lock_returns(worker, controller):
    worker.do(
        "s = ck(driver.cuStreamCreate(1)); n = 16 * MIB; p = alloc(4 * n)\n"
        "for i in range(40): ck(driver.cuMemsetD32Async(p, i, n, s))"
    )
    controller.do(f"suspend({worker.pid}); resume({worker.pid})")
    assert worker.get("name_of(driver.cuStreamQuery, s)") == "CUDA_SUCCESS"
    assert worker.get("read(p + 4 * n - 4, 4).hex()") == "27000000"


@pytest.mark.parametrize("step", ["lock", "suspend"])
def test_calls_block_until_the_process_is_let_go(worker, controller, step):
    worker.do("p = alloc(MIB); expected = fill(p, 1, MIB)")
    controller.do(
        f"checkpoint_of({worker.pid}).lock()" if step == "lock" else f"suspend({worker.pid})"
    )
    worker.send("digest(p, MIB) == expected")
    assert not worker.answered(0.5)
    controller.do(
        f"checkpoint_of({worker.pid}).unlock()" if step == "lock" else f"resume({worker.pid})"
    )
    assert worker.answer() is True


def test_pinned_host_memory_can_be_used_while_checkpointed(worker, controller):
    worker.do(
        "import ctypes; h = int(ck(driver.cuMemHostAlloc(MIB, 0))); p = alloc(MIB)\n"
        "ctypes.memset(h, 1, MIB)"
    )
    controller.do(f"suspend({worker.pid})")
    worker.do("ctypes.memset(h, 2, MIB)")
    controller.do(f"resume({worker.pid})")
    worker.do("ck(driver.cuMemcpyHtoD(p, h, MIB))")
    assert worker.get("set(read(p, MIB)) == {2}")


def test_suspended_in_the_middle_of_its_work(worker, controller):
    worker.do("loop = Loop(alloc(4 * MIB), MIB, built_in_kernel=False)")
    for _ in range(5):
        rounds = worker.get("loop.rounds")
        controller.do(f"suspend({worker.pid}); resume({worker.pid})")
        wait_until(lambda r=rounds: worker.get("loop.rounds") > r, "the loop goes on")
    assert worker.get("loop.stop()") >= 5


def test_two_processes_take_turns(platform, worker, controller):
    """This is the daemon's normal work."""
    second = platform.worker()
    for seed, process in enumerate((worker, second)):
        process.do(f"p = alloc(64 * MIB); expected = fill(p, {seed}, 64 * MIB)")
    controller.do(f"suspend({second.pid})")
    for _ in range(3):
        controller.do(f"suspend({worker.pid}); resume({second.pid})")
        assert second.get("digest(p, 64 * MIB) == expected")
        controller.do(f"suspend({second.pid}); resume({worker.pid})")
        assert worker.get("digest(p, 64 * MIB) == expected")
    controller.do(f"resume({second.pid})")
    assert second.get("digest(p, 64 * MIB) == expected")


def test_the_restore_thread_belongs_to_the_target(worker, controller):
    tid = controller.get(f"checkpoint_of({worker.pid}).restore_thread_id")
    assert worker.get(f"os.path.isdir('/proc/self/task/{tid}')")


def test_a_process_without_cuda_is_no_target(platform, controller):
    bystander = platform.worker(setup="")
    assert controller.get(f"name_of(driver.cuCheckpointProcessGetState, {bystander.pid})") in GONE


@pytest.mark.kills
def test_a_process_killed_while_checkpointed_leaves_nothing(worker, controller):
    worker.do("p = alloc(64 * MIB)")
    before = controller.get("device_used()")
    controller.do(f"suspend({worker.pid})")
    worker.kill()
    wait_until(lambda: before - controller.get("device_used()") >= 64 * MIB, "nothing is left")
    assert call(controller, worker, "Unlock") != "CUDA_SUCCESS"


def test_a_process_that_ends_normally_gives_its_memory_back(worker, controller):
    worker.do("p = alloc(128 * MIB)")
    before = controller.get("device_used()")
    worker.end_input()
    assert worker.ended(30.0)
    wait_until(lambda: before - controller.get("device_used()") >= 128 * MIB, "it is free again")
