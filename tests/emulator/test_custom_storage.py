"""Custom storage: the caller of the checkpoint API copies the target's memory itself."""

from __future__ import annotations

import pytest
from cuda_processes import WorkerGoneError, wait_until
from cuda_setups import CUSTOM

from kiwi_core import emulator

MIB = 1 << 20
RUNNING, LOCKED, CHECKPOINTED, CHECKPOINTING, RESTORING = 0, 1, 2, 4, 5
ILLEGAL = "CUDA_ERROR_ILLEGAL_STATE"


@pytest.fixture
def machine(machine):
    emulator.set_driver_version(machine.state, 13040)
    return machine


@pytest.fixture
def caller(machine):
    return machine.worker("init()\n" + CUSTOM)


def state(asker, target):
    return asker.get(f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))")


def plain(asker, target, what):
    return asker.get(f"name_of(driver.cuCheckpointProcess{what}, {target.pid}, None)")


def test_the_caller_copies_out_and_in(machine, caller):
    target = machine.worker()
    target.do("p = alloc(8 * MIB); q = alloc(3 * 4096)")
    expected = target.get("fill(p, 7, 8 * MIB), fill(q, 8, 3 * 4096)")
    caller.do(f"checkpoint_of({target.pid}).lock(1000)")
    caller.do(f"info = custom('Checkpoint', {target.pid})")
    assert state(caller, target) == CHECKPOINTING
    assert caller.get("[g.size for g in gpus(info)]") == [8 * MIB + 3 * 4096]
    assert machine.device_bytes(target) == 8 * MIB + 3 * 4096, "until it is complete"
    caller.do("images = copy_out(info); where = gpus(info)[0].devPtr; complete(info.handle)")
    assert state(caller, target) == CHECKPOINTED
    assert machine.used() == 2 * MIB, "only the caller's context"
    assert caller.get("name_of(driver.cuMemcpyDtoH, bytearray(1), where, 1)") != "CUDA_SUCCESS"
    caller.do(f"info = custom('Restore', {target.pid})")
    assert state(caller, target) == RESTORING
    caller.do("copy_in(info, images); complete(info.handle)")
    assert state(caller, target) == LOCKED
    caller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("[digest(p, 8 * MIB), digest(q, 3 * 4096)]") == expected
    assert machine.books(target).checkpoints == machine.books(target).restores == 1


def test_the_driver_keeps_no_copy_of_its_own(machine, caller):
    target = machine.worker()
    target.do("p = alloc(MIB); fill(p, 1, MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); images = take_out({target.pid})")
    caller.do(f"images[0][:] = bytes([9]) * len(images[0]); bring_in({target.pid}, images)")
    caller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("[*set(read(p, MIB))]") == [9]


def test_each_gpu_with_data_has_its_piece_and_its_stream(boot):
    machine = boot("2x32MiB")
    emulator.set_driver_version(machine.state, 13040)
    caller = machine.worker("init(1); init(0)\n" + CUSTOM)
    target = machine.worker()
    target.do("p = alloc(8 * MIB); init(1); q = alloc(16 * MIB)")
    expected = target.get("fill(p, 1, 8 * MIB), fill(q, 2, 16 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    streams = "int(ck(driver.cuStreamGetDevice(driver.CUstream(g.stream))))"
    assert caller.get(f"[[{streams}, g.size] for g in gpus(info)]") == [[0, 8 * MIB], [1, 16 * MIB]]
    caller.do("images = copy_out(info); complete(info.handle)")
    assert [machine.used(0), machine.used(1)] == [2 * MIB, 2 * MIB]
    caller.do(f"bring_in({target.pid}, images); checkpoint_of({target.pid}).unlock()")
    assert target.get("[digest(p, 8 * MIB), digest(q, 16 * MIB)]") == expected


def test_a_process_without_data_has_no_piece_and_is_completed_all_the_same(machine, caller):
    target = machine.worker()
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    assert caller.get("info.deviceCount") == 0
    caller.do("complete(info.handle)")
    assert state(caller, target) == CHECKPOINTED
    caller.do(f"bring_in({target.pid}, []); checkpoint_of({target.pid}).unlock()")
    assert target.get("used()") > 0


def test_complete_waits_for_what_is_queued_on_the_streams(machine, caller):
    target = machine.worker()
    target.do("p = alloc(8 * MIB)")
    expected = target.get("fill(p, 4, 8 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    emulator.set_copy_bandwidth(machine.state, 16 * MIB)
    caller.do(
        "host = int(ck(driver.cuMemHostAlloc(8 * MIB, 0))); g = gpus(info)[0]\n"
        "stream = driver.CUstream(g.stream)\n"
        "ck(driver.cuMemcpyDtoHAsync(host, g.devPtr, g.size, stream))\n"
        "queued = name_of(driver.cuStreamQuery, stream)\n"
        "complete(info.handle); image = ctypes.string_at(host, 8 * MIB)"
    )
    assert caller.get("queued") == "CUDA_ERROR_NOT_READY"
    assert caller.get("hashlib.sha256(image).hexdigest()") == expected


def test_nothing_else_is_legal_until_it_is_complete(machine, caller):
    target = machine.worker()
    target.do("p = alloc(MIB)")
    assert caller.fails(f"custom('Checkpoint', {target.pid})") == ILLEGAL
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    for what in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert plain(caller, target, what) == ILLEGAL
    caller.do("images = copy_out(info); handle = info.handle; complete(handle)")
    assert caller.fails("complete(handle)") == "CUDA_ERROR_INVALID_VALUE"
    caller.do(f"info = custom('Restore', {target.pid})")
    for what in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert plain(caller, target, what) == ILLEGAL
    caller.do("copy_in(info, images); complete(info.handle)")
    assert plain(caller, target, "Unlock") == "CUDA_SUCCESS"


def test_what_was_taken_out_by_one_way_does_not_come_back_by_the_other(machine, caller):
    target = machine.worker()
    target.do("p = alloc(MIB)")
    expected = target.get("fill(p, 3, MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); images = take_out({target.pid})")
    assert plain(caller, target, "Restore") == ILLEGAL
    caller.do(f"bring_in({target.pid}, images); checkpoint_of({target.pid}).checkpoint()")
    assert caller.fails(f"custom('Restore', {target.pid})") == ILLEGAL
    assert plain(caller, target, "Restore") == "CUDA_SUCCESS"
    assert plain(caller, target, "Unlock") == "CUDA_SUCCESS"
    assert target.get("digest(p, MIB)") == expected


def test_the_caller_needs_cuda_and_a_primary_context(machine):
    target = machine.worker()
    caller = machine.worker(CUSTOM)
    begin = f"custom('Checkpoint', {target.pid})"
    assert plain(caller, target, "Lock") == "CUDA_SUCCESS"
    assert caller.fails(begin) == "CUDA_ERROR_NOT_INITIALIZED"
    caller.do("ck(driver.cuInit(0))")
    assert caller.fails(begin) == "CUDA_ERROR_INVALID_CONTEXT"
    assert state(caller, target) == LOCKED
    caller.do(f"init(); images = take_out({target.pid}); ck(driver.cuDevicePrimaryCtxReset(0))")
    assert caller.fails(f"custom('Restore', {target.pid})") == "CUDA_ERROR_INVALID_CONTEXT"
    assert state(caller, target) == CHECKPOINTED
    caller.do(f"init(); bring_in({target.pid}, images); checkpoint_of({target.pid}).unlock()")


def test_a_process_cannot_be_its_own_caller(machine):
    target = machine.worker("init()\n" + CUSTOM)
    assert target.fails("custom('Checkpoint', os.getpid())") == "CUDA_ERROR_NOT_SUPPORTED"


def test_older_drivers_do_not_know_the_argument(boot):
    machine = boot("1x64MiB")
    caller, target = machine.worker("init()\n" + CUSTOM), machine.worker()
    caller.do(f"checkpoint_of({target.pid}).lock()")
    assert caller.fails(f"custom('Checkpoint', {target.pid})") == "CUDA_ERROR_INVALID_VALUE"
    assert state(caller, target) == LOCKED
    assert "cuCheckpointOperationComplete" in caller.fails("complete(0)")
    caller.do(f"checkpoint_of({target.pid}).unlock()")


def test_what_is_mapped_is_not_the_callers_to_give_away(machine, caller):
    target = machine.worker()
    target.do("p = alloc(4 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    caller.do("g = gpus(info)[0]")
    invalid = "CUDA_ERROR_INVALID_VALUE"
    assert caller.get("name_of(driver.cuMemFree, g.devPtr)") == invalid
    assert caller.get("name_of(driver.cuMemUnmap, g.devPtr, g.size)") == invalid
    assert caller.get("name_of(driver.cuMemRetainAllocationHandle, g.devPtr)") == invalid
    caller.do(f"images = copy_out(info); complete(info.handle); bring_in({target.pid}, images)")
    caller.do(f"checkpoint_of({target.pid}).unlock()")


def test_a_checkpoint_that_fails_leaves_the_process_locked(machine, caller):
    target = machine.worker()
    machine.faults.set("checkpoint_fail", count=1)
    caller.do(f"checkpoint_of({target.pid}).lock()")
    assert caller.fails(f"custom('Checkpoint', {target.pid})") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert state(caller, target) == LOCKED
    caller.do(f"checkpoint_of({target.pid}).unlock()")


def test_a_restore_without_room_fails_for_ever(machine, caller):
    target, neighbour = machine.worker(), machine.worker()
    target.do("p = alloc(32 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); images = take_out({target.pid})")
    neighbour.do("q = alloc(40 * MIB)")
    assert caller.fails(f"custom('Restore', {target.pid})") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert state(caller, target) == CHECKPOINTED
    neighbour.do("free(q)")
    assert caller.fails(f"custom('Restore', {target.pid})") == "CUDA_ERROR_OPERATING_SYSTEM"


@pytest.mark.parametrize("stage", ["Checkpoint", "Restore"])
def test_a_caller_killed_before_completing_leaves_the_target_where_it_is(machine, caller, stage):
    """The README's assumption: there is no documented way out, so there is none."""
    target, second = machine.worker(), machine.worker("init()\n" + CUSTOM)
    target.do("p = alloc(16 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock()")
    if stage == "Restore":
        caller.do(f"images = take_out({target.pid})")
    caller.do(f"info = custom({stage!r}, {target.pid})")
    target.send("used()")
    caller.kill()
    under_way = CHECKPOINTING if stage == "Checkpoint" else RESTORING
    assert state(second, target) == under_way
    for what in ("Lock", "Checkpoint", "Restore", "Unlock"):
        assert plain(second, target, what) == ILLEGAL
    assert second.fails(f"custom('Restore', {target.pid})") == ILLEGAL
    assert machine.device_bytes(target) == 16 * MIB
    assert not target.answered(0.2)
    target.kill()
    assert machine.used() == 2 * MIB, "only the second one's context"


@pytest.mark.parametrize("stage", ["Checkpoint", "Restore"])
def test_a_target_killed_before_completion_is_an_error_and_frees_everything(machine, caller, stage):
    target = machine.worker()
    target.do("p = alloc(16 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock()")
    if stage == "Restore":
        caller.do(f"images = take_out({target.pid})")
    caller.do(f"info = custom({stage!r}, {target.pid}); copy_out(info)")
    target.kill()
    assert caller.fails("complete(info.handle)") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert machine.used() == 2 * MIB, "only the caller's context"


def test_a_caller_killed_while_it_completes_leaves_what_was_begun_finished(machine, caller):
    target, second = machine.worker(), machine.worker("init()\n" + CUSTOM)
    target.do("p = alloc(16 * MIB)")
    caller.do(f"checkpoint_of({target.pid}).lock(); info = custom('Checkpoint', {target.pid})")
    machine.faults.set("hang", operation="complete")
    caller.send("complete(info.handle)")
    wait_until(lambda: machine.faults.hanging() == 1, "the completion is under way")
    caller.kill()
    with pytest.raises(WorkerGoneError):
        caller.answer()
    machine.faults.clear()
    wait_until(lambda: state(second, target) == CHECKPOINTED, "it is finished")
