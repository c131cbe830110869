"""Tests of a driver's behaviour towards programs that it holds, as far as a real GPU can decide.

The emulated driver answers as its profile says. On a real GPU a test passes on each answer that was
seen elsewhere or does less harm, and fails on any other. ``tools/gpu/quirks.py`` has more
cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cuda_processes import PATIENCE_S, WorkerGoneError, wait_until

import kiwi_emulator as emulator

MIB = 1 << 20
QUIET_S = 1.0
"""Time after which a call that has not answered counts as waiting."""

PROFILES = [
    *(pytest.param(("emulated", name), id=f"emulated-{name}") for name in ("580", "595", "610")),
    pytest.param(("emulated", "595-open"), id="emulated-595-open"),
    pytest.param(("emulated", "worst"), id="emulated-worst"),
    pytest.param(("gpu", ""), id="gpu", marks=pytest.mark.gpu),
]
SETUP = (
    "s = ck(driver.cuStreamCreate(1)); e = ck(driver.cuEventCreate(0)); p = alloc(16 * MIB)\n"
    "expected = fill(p, 7, 16 * MIB); ck(driver.cuEventRecord(e, s)); sync()"
)
SYNCS = {
    "cuCtxSynchronize": "name_of(driver.cuCtxSynchronize)",
    "cuStreamSynchronize": "name_of(driver.cuStreamSynchronize, s)",
    "cuEventSynchronize": "name_of(driver.cuEventSynchronize, e)",
    "cuEventQuery": "name_of(driver.cuEventQuery, e)",
    "cuStreamQuery": "name_of(driver.cuStreamQuery, s)",
}
OK, ILLEGAL, MISSING = "CUDA_SUCCESS", "CUDA_ERROR_ILLEGAL_STATE", "CUDA_ERROR_OPERATING_SYSTEM"


@pytest.fixture(params=PROFILES)
def machine(request, running, tmp_path):
    """Make a platform; its ``real`` says whether it is a real GPU."""
    kind, driver = request.param
    with running(kind, tmp_path, driver or None) as platform:
        platform.real = kind == "gpu"
        yield platform


@pytest.fixture
def target(machine):
    target = machine.worker()
    target.do(SETUP)
    return target


@pytest.fixture
def controller(machine):
    return machine.worker(
        "ck(driver.cuInit(0)); import pynvml; pynvml.nvmlInit()\n"
        "handle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "def device_used(): return pynvml.nvmlDeviceGetMemoryInfo(handle).used\n"
        "def row(pid): return {p.pid: p.usedGpuMemory for p in "
        "pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}.get(pid, 0)"
    )


def call(controller, pid, what, args=", None"):
    return controller.get(f"name_of(driver.cuCheckpointProcess{what}, {pid}{args})")


def how_it_goes(target, code, *, may_wait=True):
    """Return the result of a call while the process is held: its answer, "waits" or "dies". One
    that may not wait gets as long as a busy machine takes."""
    target.send(code)
    if not target.answered(QUIET_S if may_wait else PATIENCE_S):
        return "waits"
    try:
        return target.answer()
    except WorkerGoneError:
        return "dies" if target.ended(30.0) else "closes its output"


@pytest.mark.kills
@pytest.mark.parametrize("name", SYNCS)
def test_synchronising_while_held(machine, controller, target, name):
    assert call(controller, target.pid, "Lock") == OK
    locked = how_it_goes(target, SYNCS[name], may_wait=machine.real)
    assert locked in ((OK, "waits") if machine.real else (OK,))
    if locked == "waits":
        controller.do(f"checkpoint_of({target.pid}).unlock()")
        assert target.answer() == OK
        assert call(controller, target.pid, "Lock") == OK
    assert call(controller, target.pid, "Checkpoint") == OK
    out = how_it_goes(target, SYNCS[name], may_wait=machine.real)
    assert out in (("dies", "waits", OK) if machine.real else ("dies",))
    if out == "dies":
        assert target.returncode == -signal.SIGSEGV
        return
    controller.do(f"resume({target.pid})")
    assert out == OK or target.answer() == OK
    assert target.get("digest(p, 16 * MIB) == expected")


@pytest.mark.parametrize("code", ["read(p, 4) != b''", "alloc(64) != 0", "launch_nothing()"])
def test_other_calls_wait_while_it_is_out(controller, target, code):
    target.do("def launch_nothing(): ck(driver.cuMemsetD8Async(p, 0, 1, s)); sync(); return True")
    controller.do(f"suspend({target.pid})")
    assert how_it_goes(target, code) == "waits"
    controller.do(f"resume({target.pid})")
    assert target.answer() is True


@pytest.mark.parametrize("state", ["locked", "checkpointed"])
def test_nvml_while_held(machine, controller, target, state):
    """Nobody has reported what a real driver does. A program on an H200 stood still, most likely in
    such a call, so the emulated driver makes it wait."""
    target.do("import pynvml; pynvml.nvmlInit()")
    locked = state == "locked"
    hold = f"checkpoint_of({target.pid}).lock()" if locked else f"suspend({target.pid})"
    let_go = f"checkpoint_of({target.pid}).unlock()" if locked else f"resume({target.pid})"
    controller.do(hold)
    held = how_it_goes(target, "pynvml.nvmlDeviceGetCount() > 0")
    assert held in (("waits", True) if machine.real else ("waits",))
    assert controller.get("device_used()") >= 0, "another process is answered"
    controller.do(let_go)
    assert held != "waits" or target.answer()
    assert target.get("digest(p, 16 * MIB) == expected")


def test_memory_info_while_held(machine, controller, target):
    """An H200 with driver 580.159 answers an error while the program is out. A driver that makes
    the program wait instead does less harm."""
    expected = target.get("ck(driver.cuMemGetInfo())[1]")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    locked = how_it_goes(target, "ck(driver.cuMemGetInfo())[1]", may_wait=machine.real)
    if locked == "waits" and machine.real:
        controller.do(f"checkpoint_of({target.pid}).unlock()")
        assert target.answer() == expected
        controller.do(f"checkpoint_of({target.pid}).lock()")
    else:
        assert locked == expected
    controller.do(f"checkpoint_of({target.pid}).checkpoint()")
    out = how_it_goes(target, "name_of(driver.cuMemGetInfo)", may_wait=machine.real)
    assert out == MISSING or (machine.real and out in ("waits", OK))
    controller.do(f"resume({target.pid})")
    assert out != "waits" or target.answer() == OK
    assert target.get("ck(driver.cuMemGetInfo())[1]") == expected
    assert target.get("digest(p, 16 * MIB) == expected")


QUESTIONS = {
    "cuDeviceGetAttribute": "name_of(driver.cuDeviceGetAttribute, driver.CUdevice_attribute(1), 0)",
    "cuCtxGetCurrent": "name_of(driver.cuCtxGetCurrent)",
    "cuDevicePrimaryCtxRetain": "name_of(driver.cuDevicePrimaryCtxRetain, 0)",
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_while_held(controller, target, name):
    """An H200 with driver 580.159 answers them at once, whether the program is in or out."""
    controller.do(f"checkpoint_of({target.pid}).lock()")
    assert how_it_goes(target, QUESTIONS[name], may_wait=False) == OK
    controller.do(f"checkpoint_of({target.pid}).checkpoint()")
    assert how_it_goes(target, QUESTIONS[name], may_wait=False) == OK
    controller.do(f"resume({target.pid})")
    assert target.get("digest(p, 16 * MIB) == expected")


def test_a_thread_that_is_inside_a_wait_returns_and_then_it_is_locked(controller, target):
    target.do("big = alloc(64 * MIB)")
    target.send(
        "[ck(driver.cuMemsetD8Async(big, i % 256, 64 * MIB, s)) for i in range(200)]; sync()",
        "exec",
    )
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    target.answer()
    assert target.get("digest(p, 16 * MIB) == expected")


def test_which_processes_are_no_target(machine, controller):
    bystander, ended = machine.worker(setup=""), machine.worker(setup="")
    ended.kill()  # it never used the GPU
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    pids = (ended.pid, zombie.pid, bystander.pid)
    found = [call(controller, pid, "GetState", "") for pid in pids]
    zombie.wait()
    assert found == [MISSING, "CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_NOT_INITIALIZED"]


@pytest.mark.parametrize(("held", "what"), [("", "GetState"), ("", "Lock"), ("out", "Restore")])
def test_a_stopped_target_answers_nothing_until_it_goes_on(controller, target, held, what):
    args = {"GetState": "", "Lock": ", lock_args(500)", "Restore": ", None"}[what]
    if held:
        controller.do(f"suspend({target.pid})")
    os.kill(target.pid, signal.SIGSTOP)
    try:
        controller.send(f"name_of(driver.cuCheckpointProcess{what}, {target.pid}{args})")
        assert not controller.answered(2 * QUIET_S)
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert controller.answer() == OK
    if what != "GetState":
        controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("digest(p, 16 * MIB) == expected")


def test_no_less_comes_back_than_nvml_said(machine, controller, target):
    said, before = controller.get(f"row({target.pid})"), controller.get("device_used()")
    assert said >= 16 * MIB
    controller.do(f"suspend({target.pid})")
    assert controller.get(f"row({target.pid})") == 0
    wait_until(lambda: before - controller.get("device_used()") >= said, "all is free again")
    freed = before - controller.get("device_used()")
    controller.do(f"resume({target.pid})")
    assert freed - said == 6 * MIB or (machine.real and freed - said < 32 * MIB)


def test_contexts_and_streams_cost_memory(machine, controller, target):
    """A context costs memory on every GPU. The driver may serve a stream from memory that it
    already has, and a stream returns none before the context ends."""
    before = controller.get("device_used()")
    second = machine.worker()
    wait_until(lambda: controller.get("device_used()") - before >= MIB, "its context costs")
    with_context = controller.get("device_used()")
    second.do("streams = [ck(driver.cuStreamCreate(1)) for _ in range(64)]; sync()")
    assert controller.get("device_used()") >= with_context + (0 if machine.real else 64 * 65536)
    assert second.leave()
    kept = (with_context - before) // 2 if machine.real else 0  # an H200 keeps a part for itself
    wait_until(lambda: controller.get("device_used()") <= before + kept, "all is free again")


UNMAP_UNDER_WORK = """
props = driver.CUmemAllocationProp()
props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
size = 64 * MIB
at = ck(driver.cuMemAddressReserve(size, 0, 0, 0))
ck(driver.cuMemMap(at, size, 0, ck(driver.cuMemCreate(size, props, 0)), 0))
access = driver.CUmemAccessDesc()
access.location = props.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ck(driver.cuMemSetAccess(at, size, [access], 1))
for i in range(300): ck(driver.cuMemsetD8Async(at, i % 256, size, s))
ck(driver.cuMemUnmap(at, size))
"""


def test_unmapping_is_not_a_way_to_wait(machine, target):
    """Work that uses the memory may still run when the call returns: it then fails, or was done. A
    program that unmaps memory must synchronise first."""
    target.do(UNMAP_UNDER_WORK)
    answers = (OK, "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")
    assert target.get("name_of(driver.cuCtxSynchronize)") in answers


@pytest.mark.parametrize(("move", "after"), [("Checkpoint", 2), ("Restore", 1)])
def test_a_controller_that_is_killed_in_mid_move(machine, controller, target, move, after):
    """The operation is completed, and its result stays until another caller continues: after a
    restore the target is locked. (The controller has no context: killing it harms no GPU.)"""
    target.do("big = alloc(256 * MIB)")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    if move == "Restore":
        controller.do(f"checkpoint_of({target.pid}).checkpoint()")
    doomed = machine.worker("ck(driver.cuInit(0))")
    with slow(machine, move):
        doomed.send(f"name_of(driver.cuCheckpointProcess{move}, {target.pid}, None)")
        wait_begun(machine)
        doomed.kill()
    question = f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))"
    wait_until(lambda: controller.get(question) == after, "it is completed")
    if move == "Checkpoint":
        controller.do(f"checkpoint_of({target.pid}).restore()")
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("digest(p, 16 * MIB) == expected")


def test_another_program_in_a_process_that_is_out_begins_anew(controller, target):
    controller.do(f"suspend({target.pid})")
    empty = controller.get("device_used()")
    target.do("become_anew()")
    gone = "CUDA_ERROR_NOT_INITIALIZED"
    wait_until(lambda: call(controller, target.pid, "Unlock") == gone, "the old program is gone")
    target.do("init(); p = alloc(8 * MIB); before = fill(p, 1, 8 * MIB)")
    assert controller.get("device_used()") >= empty + 8 * MIB
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    assert target.get("digest(p, 8 * MIB) == before")


FILL = (
    "step, blocks = 1 << 36, []\n"
    "while step >= MIB:\n"
    "    rc, at = driver.cuMemAlloc(step)\n"
    "    if int(rc) == 0: blocks.append(int(at))\n"
    "    else: step //= 2"
)


def test_a_checkpoint_without_a_free_block_keeps_the_contents_and_is_the_last(
    machine, controller, target
):
    """An H200 with driver 580.159.04 refused with 2 MiB free at most, and worked with some 65 MiB.
    It did not move that process any more. A driver that needs no room passes, too."""
    hog = machine.worker()
    hog.do(FILL)
    assert call(controller, target.pid, "Lock") == OK
    answer = call(controller, target.pid, "Checkpoint")
    assert answer == "CUDA_ERROR_OUT_OF_MEMORY" or (machine.real and answer == OK)
    if answer != OK:
        assert controller.get(f"checkpoint_of({target.pid}).state") == "locked"
        controller.do(f"checkpoint_of({target.pid}).unlock()")
        hog.do("while blocks: free(blocks.pop())")
        assert call(controller, target.pid, "Lock") == OK
        assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_UNKNOWN"
        controller.do(f"checkpoint_of({target.pid}).unlock()")
    else:
        hog.do("while blocks: free(blocks.pop())")
        controller.do(f"resume({target.pid})")
    assert target.get("digest(p, 16 * MIB) == expected")


@pytest.mark.kills
def test_a_restore_without_room_is_final_and_keeps_memory_until_the_kill(
    machine, controller, target
):
    controller.do(f"suspend({target.pid})")
    empty = controller.get("device_used()")
    hog = machine.worker()
    hog.do(FILL)
    hog.do("free(blocks.pop())")
    assert call(controller, target.pid, "Restore") == "CUDA_ERROR_OUT_OF_MEMORY"
    hog.do("while blocks: free(blocks.pop())")
    assert hog.leave()
    assert call(controller, target.pid, "Restore") == MISSING
    assert [call(controller, target.pid, w) for w in ("Unlock", "Checkpoint")] == [ILLEGAL] * 2
    kept = controller.get("device_used()") - empty
    assert kept > 0 or machine.real
    target.kill()
    wait_until(lambda: controller.get("device_used()") - empty < MIB, "it is free again")


def test_a_state_query_during_a_move_ends_with_it(machine, controller, target):
    """The answer comes at once, or when the move has ended."""
    target.do("big = alloc(256 * MIB)")
    other = machine.worker("ck(driver.cuInit(0))")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    for move, after in (("Checkpoint", 2), ("Restore", 1)):
        with slow(machine, move):
            controller.send(f"name_of(driver.cuCheckpointProcess{move}, {target.pid}, None)")
            wait_begun(machine)
            other.send(f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))")
            waits = not other.answered(QUIET_S)
        assert machine.real or waits
        assert controller.answer() == OK
        assert other.answer() in ((after,) if waits else (0, 1, 2))
    controller.do(f"checkpoint_of({target.pid}).unlock()")


def wait_begun(machine):
    """Wait until the driver has certainly begun a move, which a real one need not tell."""
    if machine.real:
        time.sleep(0.1)
        return
    faults = emulator.Faults(Path(machine.environment[emulator.ENV_STATE]))
    wait_until(lambda: faults.hanging() == 1, "the move has begun")


@contextlib.contextmanager
def slow(machine, move):
    """Let ``move`` last as long as the block on the emulated driver, where it takes no time; on a
    real one it takes some."""
    if machine.real:
        yield
        return
    faults = emulator.Faults(Path(machine.environment[emulator.ENV_STATE]))
    faults.set("hang", operation=move.lower())
    try:
        yield
    finally:
        faults.clear("hang")
