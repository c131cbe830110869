"""Tests of the checkpoint API on another process: states, bytes, addresses, room, deaths."""

from __future__ import annotations

import time

import pytest
from cuda_processes import WorkerError, WorkerGoneError, wait_until

from kiwi_core.gpu.host import held_bytes

MIB = 1 << 20


@pytest.fixture
def controller(machine):
    return machine.worker("ck(driver.cuInit(0))")


def state(controller, target):
    return controller.get(f"checkpoint_of({target.pid}).state")


def test_the_whole_way_keeps_every_byte_at_the_same_address(machine, controller):
    target = machine.worker()
    address = target.get("(p := alloc(24 * MIB))")
    before = target.get("fill(p, 7, 24 * MIB)")
    assert state(controller, target) == "running"
    controller.do(f"checkpoint_of({target.pid}).lock()")
    assert state(controller, target) == "locked"
    assert machine.device_bytes(target) == 24 * MIB
    controller.do(f"checkpoint_of({target.pid}).checkpoint()")
    assert state(controller, target) == "checkpointed"
    assert machine.used() == 0, "the context goes too"
    assert machine.books(target).parked_bytes == {0: 24 * MIB}
    controller.do(f"checkpoint_of({target.pid}).restore()")
    assert state(controller, target) == "locked"
    assert machine.used() == 26 * MIB
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert state(controller, target) == "running"
    assert target.get("p") == address
    assert target.get("digest(p, 24 * MIB)") == before
    assert (machine.books(target).checkpoints, machine.books(target).restores) == (1, 1)


def test_a_lock_that_times_out_leaves_the_process_running(machine, controller):
    target = machine.worker()
    target.do("launch('spin_ns', 60_000_000_000)")
    start = time.monotonic()
    result = controller.get(
        f"name_of(driver.cuCheckpointProcessLock, {target.pid}, lock_args(200))"
    )
    assert result == "CUDA_ERROR_NOT_READY"
    assert time.monotonic() - start >= 0.2
    assert state(controller, target) == "running"
    assert target.get("used()") > 0, "calls pass again"


def test_through_cuda_core(machine, controller):
    target = machine.worker()
    controller.do("from cuda.core.checkpoint import Process as CoreProcess")
    controller.do(f"it = CoreProcess({target.pid}); it.lock(); it.checkpoint()")
    assert controller.get("it.state") == state(controller, target) == "checkpointed"
    controller.do("it.restore(); it.unlock()")
    assert controller.get("it.state") == state(controller, target) == "running"
    assert "CUDA_ERROR_ILLEGAL_STATE" in controller.fails("it.unlock()")


def test_a_thread_id_stands_for_its_process(machine, controller):
    target = machine.worker()
    tid = controller.get(f"checkpoint_of({target.pid}).restore_thread_id")
    assert tid != target.pid
    controller.do(f"suspend({tid})")
    assert state(controller, target) == "checkpointed"
    controller.do(f"resume({target.pid})")


def test_a_process_can_lock_itself_only_from_outside_the_gate(machine):
    target = machine.worker()
    target.do("suspend(os.getpid())")
    assert machine.used() == 0
    target.do("resume(os.getpid())")
    assert target.get("used()") == 2 * MIB


@pytest.mark.parametrize("stage", ["running", "locked", "checkpointed", "restored"])
def test_a_target_killed_at_any_stage_frees_everything(machine, controller, stage):
    target = machine.worker()
    target.do("p = alloc(32 * MIB)")
    steps = {"running": 0, "locked": 1, "checkpointed": 2, "restored": 3}[stage]
    for step in ("lock()", "checkpoint()", "restore()")[:steps]:
        controller.do(f"checkpoint_of({target.pid}).{step}")
    target.kill()
    assert machine.used() == 0
    unlock = f"name_of(driver.cuCheckpointProcessUnlock, {target.pid}, None)"
    assert controller.get(unlock) == machine.missing
    other = machine.worker()
    other.do("alloc(60 * MIB)")


@pytest.mark.parametrize("operation", ["Lock", "Checkpoint", "Restore", "Unlock"])
def test_a_target_killed_during_an_operation_gives_the_caller_an_error(
    machine, controller, operation
):
    target = machine.worker()
    target.do("p = alloc(16 * MIB)")
    order = ["Lock", "Checkpoint", "Restore", "Unlock"]
    for step in order[: order.index(operation)]:
        controller.do(f"ck(driver.cuCheckpointProcess{step}({target.pid}, None))")
    machine.faults.set("hang", operation=operation.lower())
    controller.send(f"name_of(driver.cuCheckpointProcess{operation}, {target.pid}, None)")
    wait_until(lambda: machine.faults.hanging() == 1, "the operation is under way")
    target.kill()
    assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"
    assert machine.used() == 0


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "restore", "unlock"])
def test_a_caller_killed_during_an_operation_leaves_a_target_that_another_finishes(
    machine, operation
):
    target, second = machine.worker(), machine.worker("ck(driver.cuInit(0))")
    first = machine.worker("ck(driver.cuInit(0))")
    target.do("p = alloc(16 * MIB)")
    expected = target.get("fill(p, 9, 16 * MIB)")
    order = ["lock", "checkpoint", "restore", "unlock"]
    for step in order[: order.index(operation)]:
        first.do(f"checkpoint_of({target.pid}).{step}()")
    machine.faults.set("hang", operation=operation)
    first.send(f"checkpoint_of({target.pid}).{operation}()")
    wait_until(lambda: machine.faults.hanging() == 1, "the operation is under way")
    first.kill()
    with pytest.raises(WorkerGoneError):
        first.answer()
    machine.faults.clear()
    reached = {
        "lock": "locked",
        "checkpoint": "checkpointed",
        "restore": "locked",
        "unlock": "running",
    }[operation]
    wait_until(lambda: state(second, target) == reached, "what was begun is finished")
    for step in order[order.index(operation) + 1 :]:
        second.do(f"checkpoint_of({target.pid}).{step}()")
    assert target.get("digest(p, 16 * MIB)") == expected


def test_a_normal_exit_while_locked_waits_at_the_gate_like_the_real_one(machine, controller):
    target = machine.worker()
    target.do("import atexit; p = alloc(MIB); atexit.register(lambda: free(p))")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    target.end_input()
    assert not target.ended(0.5)
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.ended(30.0)


def test_a_signal_ends_a_process_that_waits_at_the_gate(machine, controller):
    target = machine.worker()
    controller.do(f"suspend({target.pid})")
    target.send("alloc(64)")
    assert not target.answered(0.2)
    target.terminate()
    assert target.ended(30.0)


def test_what_was_never_written_takes_no_ram_and_is_zero_afterwards(boot):
    machine = boot("1x64GiB")
    controller, target = machine.worker("ck(driver.cuInit(0))"), machine.worker()
    size, written = 48 << 30, (0, (48 << 30) - 100, 5 * MIB - 50, 20 << 30)
    target.do(f"p, size = alloc({size}), {size}")
    for seed, offset in enumerate(written):
        target.do(f"d{seed} = fill(p + {offset}, {seed}, 100)")
    for _ in range(3):
        controller.do(f"suspend({target.pid})")
        assert machine.used() == 0
        assert held_bytes(target.pid) < 512 * MIB
        controller.do(f"resume({target.pid})")
        for seed, offset in enumerate(written):
            assert target.get(f"digest(p + {offset}, 100) == d{seed}")
        assert target.get("not any(read(p + 100, 5 * MIB - 150))")
    assert held_bytes(target.pid) < 512 * MIB


def test_two_gpus_one_process(boot):
    machine = boot("2x32MiB")
    controller, target = machine.worker("ck(driver.cuInit(0))"), machine.worker()
    target.do("p = alloc(8 * MIB); init(1); q = alloc(16 * MIB)")
    a, b = target.get("fill(p, 1, 8 * MIB)"), target.get("fill(q, 2, 16 * MIB)")
    assert [machine.used(0), machine.used(1)] == [10 * MIB, 18 * MIB]
    controller.do(f"suspend({target.pid})")
    assert [machine.used(0), machine.used(1)] == [0, 0]
    controller.do(f"resume({target.pid})")
    assert [target.get("digest(p, 8 * MIB)"), target.get("digest(q, 16 * MIB)")] == [a, b]


def test_newer_drivers_show_the_states_under_way(machine, controller):
    import kiwi_emulator as emulator

    target = machine.worker()
    target.do("p = alloc(32 * MIB)")
    raw = f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))"
    emulator.set_driver_version(machine.state, 13040)
    emulator.set_copy_bandwidth(machine.state, 1 << 10)
    second = machine.worker("ck(driver.cuInit(0))")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    controller.send(f"checkpoint_of({target.pid}).checkpoint()", "exec")
    wait_until(lambda: second.get(raw) == 4, "CHECKPOINTING is shown")
    emulator.set_copy_bandwidth(machine.state, 0)
    controller.answer()
    emulator.set_copy_bandwidth(machine.state, 1 << 10)
    controller.send(f"checkpoint_of({target.pid}).restore()", "exec")
    wait_until(lambda: second.get(raw) == 5, "RESTORING is shown")
    emulator.set_copy_bandwidth(machine.state, 0)
    controller.answer()
    controller.do(f"checkpoint_of({target.pid}).unlock()")


def test_moving_to_another_gpu_is_refused_not_faked(boot):
    machine = boot("2x32MiB")
    controller, target = machine.worker("ck(driver.cuInit(0))"), machine.worker()
    controller.do(f"suspend({target.pid})")
    with pytest.raises(WorkerError, match="not supported"):
        controller.do(
            "from cuda.core import Device\n"
            "from cuda.core.checkpoint import Process as CoreProcess\n"
            "a, b = Device(0).uuid, Device(1).uuid\n"
            f"CoreProcess({target.pid}).restore({{a: b, b: a}})"
        )
    controller.do(f"resume({target.pid})")


@pytest.mark.parametrize("way", ["running", "locked", "checkpointed"])
def test_another_program_in_the_same_process_begins_anew(machine, controller, way):
    """The driver drops the state of the old program (exec closes the driver's files)."""
    target = machine.worker("init(); p = alloc(24 * MIB)")
    process = f"checkpoint_of({target.pid})"
    if way != "running":
        controller.do(f"{process}.lock()")
    if way == "checkpointed":
        controller.do(f"{process}.checkpoint()")
    target.do("become_anew()")
    # Memory that is out says nothing about the old program, which may still exist. An unlock before
    # the new program starts would succeed.
    asked = f"name_of(driver.cuCheckpointProcessGetState, {target.pid})"
    wait_until(
        lambda: controller.get(asked) == "CUDA_ERROR_NOT_INITIALIZED",
        "the old program is gone",
    )
    assert not machine.used()
    target.do("init(); p = alloc(8 * MIB); before = fill(p, 1, 8 * MIB)")
    assert state(controller, target) == "running"
    assert machine.device_bytes(target) == 8 * MIB
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    assert target.get("digest(p, 8 * MIB) == before")
