"""Tests of each fault that can be injected, and of the state after it."""

from __future__ import annotations

import time

import pytest
from cuda_processes import wait_until

import kiwi_emulator as emulator

MIB = 1 << 20


@pytest.fixture
def pair(machine):
    target = machine.worker()
    target.do("p = alloc(16 * MIB); expected = fill(p, 4, 16 * MIB)")
    return machine.worker("ck(driver.cuInit(0))"), target


def call(controller, target, what, args="None"):
    return controller.get(f"name_of(driver.cuCheckpointProcess{what}, {target.pid}, {args})")


def state(controller, target):
    return controller.get(f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))")


def intact(target):
    return target.get("digest(p, 16 * MIB) == expected")


def test_lock_timeout(machine, pair):
    controller, target = pair
    machine.faults.set("lock_timeout", pid=target.pid, count=2)
    for _ in range(2):
        start = time.monotonic()
        assert call(controller, target, "Lock", "lock_args(100)") == "CUDA_ERROR_NOT_READY"
        assert time.monotonic() - start >= 0.1
        assert state(controller, target) == 0
    assert call(controller, target, "Lock", "lock_args(60_000)") == "CUDA_SUCCESS"
    assert machine.faults.hits("lock_timeout") == 2
    assert call(controller, target, "Unlock") == "CUDA_SUCCESS"
    assert intact(target)


def test_checkpoint_fail_changes_nothing(machine, pair):
    controller, target = pair
    machine.faults.set("checkpoint_fail")
    assert call(controller, target, "Lock") == "CUDA_SUCCESS"
    assert call(controller, target, "Checkpoint") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert state(controller, target) == 1
    assert machine.device_bytes(target) == 16 * MIB
    assert call(controller, target, "Checkpoint") == "CUDA_SUCCESS"
    controller.do(f"resume({target.pid})")
    assert intact(target)


def test_restore_fail_is_for_ever(machine, pair):
    controller, target = pair
    controller.do(f"suspend({target.pid})")
    machine.faults.set("restore_fail")
    for what in ("Restore", "Restore", "Unlock", "Lock", "Checkpoint"):
        assert call(controller, target, what) == "CUDA_ERROR_OPERATING_SYSTEM"
    assert state(controller, target) == 3
    assert machine.used() == 0


def test_restore_oom_is_for_ever(machine, pair):
    controller, target = pair
    controller.do(f"suspend({target.pid})")
    machine.faults.set("restore_oom")
    assert call(controller, target, "Restore") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert call(controller, target, "Restore") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert state(controller, target) == 2


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "restore", "unlock"])
def test_hang_until_cleared(machine, pair, operation):
    controller, target = pair
    order = ["lock", "checkpoint", "restore", "unlock"]
    machine.faults.set("hang", operation=operation, pid=target.pid)
    for step in order[: order.index(operation)]:
        controller.do(f"checkpoint_of({target.pid}).{step}()")
    controller.send(f"checkpoint_of({target.pid}).{operation}()")
    wait_until(lambda: machine.faults.hanging() == 1, "it hangs")
    assert not controller.answered(0.2)
    machine.faults.clear("hang")
    controller.answer()
    for step in order[order.index(operation) + 1 :]:
        controller.do(f"checkpoint_of({target.pid}).{step}()")
    assert intact(target)


def test_hang_of_a_state_query_for_a_while(machine, pair):
    controller, target = pair
    machine.faults.set("hang", operation="get_state", duration_s=0.5)
    start = time.monotonic()
    assert state(controller, target) == 0
    assert time.monotonic() - start >= 0.5


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("nvml_memory", "nvml.memory(nvml.gpus()[0].uuid).total_bytes"),
        ("nvml_processes", "len(nvml.processes(nvml.gpus()[0].uuid))"),
    ],
)
def test_a_reading_of_nvml_hangs_until_cleared(machine, pair, operation, call):
    """An NVML reading hangs only if named: ``any`` means the operations on a process."""
    controller, target = pair
    controller.do("from kiwi_core.gpu import nvml")
    machine.faults.set("hang", count=-1)
    assert controller.get(call) > 0
    machine.faults.set("hang", operation=operation)
    controller.send(call)
    wait_until(lambda: machine.faults.hanging() == 1, "it hangs")
    assert not controller.answered(0.2)
    machine.faults.clear("hang")
    assert controller.answer() > 0
    assert intact(target)


def test_a_fault_for_one_process_leaves_others_alone(machine, pair):
    controller, target = pair
    other = machine.worker()
    machine.faults.set("checkpoint_fail", pid=other.pid, count=-1)
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    for _ in range(3):
        assert "OPERATING_SYSTEM" in controller.fails(f"suspend({other.pid})")
        controller.do(f"checkpoint_of({other.pid}).unlock()")
    machine.faults.clear()
    controller.do(f"suspend({other.pid}); resume({other.pid})")


def test_slow_copies_take_visible_time_and_can_be_sped_up_live(machine, pair):
    controller, target = pair
    emulator.set_copy_bandwidth(machine.state, 32 * MIB)
    start = time.monotonic()
    assert intact(target)
    assert time.monotonic() - start >= 0.5
    controller.do(f"checkpoint_of({target.pid}).lock()")
    start = time.monotonic()
    controller.do(f"checkpoint_of({target.pid}).checkpoint()")
    assert time.monotonic() - start >= 0.5
    emulator.set_copy_bandwidth(machine.state, 1 << 10)
    controller.send(f"checkpoint_of({target.pid}).restore()")
    assert not controller.answered(0.3)
    emulator.set_copy_bandwidth(machine.state, 0)
    controller.answer()
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert intact(target)


def test_killed_in_the_middle_of_a_slow_page_out_and_page_in(machine, pair):
    controller, target = pair
    emulator.set_copy_bandwidth(machine.state, 1 << 10)
    controller.do(f"checkpoint_of({target.pid}).lock()")
    controller.send(f"name_of(driver.cuCheckpointProcessCheckpoint, {target.pid}, None)")
    assert not controller.answered(0.2)
    assert machine.used() == 18 * MIB, "nothing is given up before all is copied"
    target.kill()
    assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"
    assert machine.used() == 0
    emulator.set_copy_bandwidth(machine.state, 0)
    second = machine.worker("init(); p = alloc(16 * MIB)")
    controller.do(f"suspend({second.pid})")
    emulator.set_copy_bandwidth(machine.state, 1 << 10)
    controller.send(f"name_of(driver.cuCheckpointProcessRestore, {second.pid}, None)")
    wait_until(lambda: machine.used() == 18 * MIB, "room is taken")
    second.kill()
    assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"
    assert machine.used() == 0


def test_faults_are_listed_and_limited(machine):
    machine.faults.set("hang", operation="restore", duration_s=1.5, pid=7, count=3)
    (fault,) = machine.faults.list()
    assert (fault.kind, fault.operation, fault.pid, fault.remaining) == ("hang", "restore", 7, 3)
    assert fault.duration_s == 1.5
    for _ in range(63):
        machine.faults.set("restore_oom")
    with pytest.raises(RuntimeError, match="clear some"):
        machine.faults.set("restore_oom")
    machine.faults.clear()
    assert machine.faults.list() == ()
