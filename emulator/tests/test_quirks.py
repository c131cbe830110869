"""Behaviour of the emulated driver under each profile: a test for each row of the table in
``emulator/README.md``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import hosts
import pytest
from cuda_processes import WorkerGoneError, wait_until
from cuda_setups import VMM

import kiwi_emulator as emulator

MIB = 1 << 20
QUIET_S = 0.5
"""Time after which a call that has not answered counts as waiting."""

CHECKPOINTING = 4
"""Number of that state."""
RECEIVES = {"45", "207"}
"""Numbers of the system call recvfrom, on x86 and on ARM."""
REAL = sorted(set(emulator.DRIVERS) - {"tame"})

OLD = (
    "s = ck(driver.cuStreamCreate(1)); e = ck(driver.cuEventCreate(0)); p = alloc(4 * MIB)\n"
    "expected = fill(p, 3, 4 * MIB); ck(driver.cuEventRecord(e, s)); sync()"
)
SYNCS = {
    "cuCtxSynchronize": "name_of(driver.cuCtxSynchronize)",
    "cuStreamSynchronize": "name_of(driver.cuStreamSynchronize, s)",
    "cuEventSynchronize": "name_of(driver.cuEventSynchronize, e)",
    "cuEventQuery": "name_of(driver.cuEventQuery, e)",
    "cuStreamQuery": "name_of(driver.cuStreamQuery, s)",
}


@pytest.fixture(params=REAL)
def machine(request, boot):
    return boot("1x64MiB", request.param)


@pytest.fixture
def worst(boot):
    return boot("1x64MiB", "worst")


def caller(machine):
    return machine.worker("ck(driver.cuInit(0))")


def call(controller, pid, what, args=", None"):
    return controller.get(f"name_of(driver.cuCheckpointProcess{what}, {pid}{args})")


@contextmanager
def stopped(worker):
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


# --- profiles -----------------------------------------------------------------------------------


def test_worst_has_what_any_driver_has_but_the_end_of_the_host():
    every = {m for name in REAL for m in emulator.DRIVERS[name].quirks}
    assert set(emulator.DRIVERS["worst"].quirks) == every - {"kill_takes_host_down"}


def test_a_machine_is_described_with_its_driver():
    specs, driver = emulator.parse_machine("2x512MiB, driver=595")
    assert (len(specs), driver) == (2, "595")
    assert emulator.parse_machine("1x64MiB")[1] is None
    with pytest.raises(ValueError, match="580, 595, 595-open, 610, tame, worst"):
        emulator.parse_machine("1x64MiB,driver=470")
    with pytest.raises(ValueError, match="driver=NAME"):
        emulator.parse_machine("1x64MiB,brand=595")


def test_the_environment_chooses_for_machines_that_do_not_say(tmp_path, monkeypatch):
    monkeypatch.setenv(emulator.ENV_DRIVER, "580")
    gpus = emulator.parse_gpus("1x64MiB")
    emulator.create_state(tmp_path / "a", gpus)
    assert emulator.has_quirk(tmp_path / "a", "state_waits")
    assert not emulator.has_quirk(tmp_path / "a", "nccl_kills")
    emulator.create_state(tmp_path / "b", gpus, "595")
    assert emulator.has_quirk(tmp_path / "b", "nccl_kills")
    monkeypatch.setenv(emulator.ENV_DRIVER, "999")
    with pytest.raises(ValueError, match="'999' is not an emulated driver"):
        emulator.create_state(tmp_path / "c", gpus)


def test_a_daemon_is_told_which_driver_it_emulates(machine):
    name = machine.worker("import pynvml; pynvml.nvmlInit()").get(
        "pynvml.nvmlSystemGetDriverVersion()"
    )
    assert name in {f"{p.driver}-kiwi-emulated" for p in emulator.DRIVERS.values()}


# --- the target's own calls ---------------------------------------------------------------------


def test_it_crashes_in_the_thread_that_calls_with_work_ahead_it_waits(worst):
    controller, target = caller(worst), worst.worker()
    target.do(OLD)
    controller.do(f"suspend({target.pid})")
    target.send(
        "ck(driver.cuMemsetD8Async(p, 1, 64, s)); ck(driver.cuStreamSynchronize(s))", "exec"
    )
    assert not target.answered(QUIET_S)
    controller.do(f"resume({target.pid})")
    target.answer()


def test_while_a_checkpoint_is_under_way_a_wait_crashes_already(worst):
    controller, target = caller(worst), worst.worker()
    target.do(OLD)
    emulator.set_copy_bandwidth(worst.state, 1 << 10)
    emulator.set_driver_version(worst.state, 13040)  # the books then tell that it has begun
    controller.do(f"checkpoint_of({target.pid}).lock()")
    controller.send(f"name_of(driver.cuCheckpointProcessCheckpoint, {target.pid}, None)")
    wait_until(lambda: worst.books(target).state == CHECKPOINTING, "it has begun")
    target.send(SYNCS["cuStreamSynchronize"])
    assert target.ended(30.0)
    assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"


STUCK_UNTIL_A_CALL_WAITS = """
stuck, comes = Stuck(), threading.Event()
system_call = f"/proc/self/task/{threading.get_native_id()}/syscall"
def end_once_a_call_waits():
    comes.wait()
    looks = 0
    while looks < 4:  # in one, the thread may wait for its turn to run Python, at a futex, too
        time.sleep(0.05)
        looks = looks + 1 if open(system_call).read().split()[0] in ("202", "98") else 0
    stuck.let_go()
"""


def test_a_wait_that_comes_during_the_lock_does_not_crash_afterwards(worst):
    controller, target = caller(worst), worst.worker()
    target.do(OLD + STUCK_UNTIL_A_CALL_WAITS)  # the lock waits for its end
    controller.send(f"suspend({target.pid})", "exec")
    assert not controller.answered(QUIET_S)
    target.do("threading.Thread(target=end_once_a_call_waits).start()")
    target.send("comes.set() or " + SYNCS["cuStreamSynchronize"])
    assert target.answer() == "CUDA_SUCCESS"
    controller.answer()
    controller.do(f"resume({target.pid})")
    assert target.get("digest(p, 4 * MIB) == expected")


def test_a_context_that_must_be_made_waits_for_the_unlock(machine):
    """Only counting a context that exists needs no GPU memory."""
    controller, target = caller(machine), machine.worker("ck(driver.cuInit(0))")
    controller.do(f"suspend({target.pid})")
    target.send("name_of(driver.cuDevicePrimaryCtxRetain, 0)")
    assert not target.answered(QUIET_S)
    controller.do(f"resume({target.pid})")
    assert target.answer() == "CUDA_SUCCESS"


# --- state queries, stopped targets, strangers --------------------------------------------------


def test_a_state_query_waits_for_an_operation_and_nvml_does_not(machine):
    controller, other, target = caller(machine), caller(machine), machine.worker()
    other.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    target.do("p = alloc(16 * MIB)")
    controller.do(f"checkpoint_of({target.pid}).lock()")
    for move in ("Checkpoint", "Restore"):
        machine.faults.set("hang", operation=move.lower())
        controller.send(f"name_of(driver.cuCheckpointProcess{move}, {target.pid}, None)")
        wait_until(lambda: machine.faults.hanging() == 1, "it has begun")
        assert other.get("pynvml.nvmlDeviceGetMemoryInfo(h).total") == 64 * MIB
        other.send(f"name_of(driver.cuCheckpointProcessGetState, {target.pid})")
        assert not other.answered(QUIET_S)
        machine.faults.clear("hang")
        assert controller.answer() == "CUDA_SUCCESS"
        assert other.answer() == "CUDA_SUCCESS"


def test_a_lock_whose_target_ends_meanwhile_answers_304(machine):
    controller, target = caller(machine), machine.worker()
    target.do("launch('spin_ns', 3_600_000_000_000)")
    controller.send(f"name_of(driver.cuCheckpointProcessLock, {target.pid}, None)")
    assert not controller.answered(QUIET_S)
    target.kill()
    assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"


def test_calls_of_one_caller_are_serialised_under_the_worst(worst):
    controller, other = caller(worst), caller(worst)
    target, healthy = worst.worker(), worst.worker()
    ask = f"name_of(driver.cuCheckpointProcessGetState, {healthy.pid})"
    controller.do(
        "def beside(pid):\n"
        "    thread = threading.Thread(target=driver.cuCheckpointProcessGetState, args=(pid,))\n"
        "    thread.start(); return thread"
    )
    with stopped(target):
        controller.do(f"thread = beside({target.pid})")
        asks = Path(f"/proc/{controller.pid}/task/{controller.get('thread.native_id')}/syscall")
        wait_until(lambda: asks.read_text().split()[0] in RECEIVES, "it waits for an answer")
        controller.send(ask)
        assert not controller.answered(QUIET_S)
        assert other.get(ask) == "CUDA_SUCCESS"
    assert controller.answer() == "CUDA_SUCCESS"


# --- room ---------------------------------------------------------------------------------------


def test_a_restore_without_room_keeps_all_that_was_free_until_the_process_is_killed(machine):
    controller, target, hog = caller(machine), machine.worker(), machine.worker()
    controller.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    rows = "[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]"
    target.do("p = alloc(40 * MIB)")
    controller.do(f"suspend({target.pid})")
    hog.do("q = alloc(40 * MIB)")
    assert call(controller, target.pid, "Restore") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert controller.get(f"checkpoint_of({target.pid}).state") == "checkpointed"
    assert machine.used() == 64 * MIB
    assert controller.get(rows) == [hog.pid]
    assert controller.get("pynvml.nvmlDeviceGetMemoryInfo(h).free") == 0
    hog.do("free(q)")
    assert machine.used() == 24 * MIB
    assert hog.fails("alloc(41 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert call(controller, target.pid, "Restore") == "CUDA_ERROR_OPERATING_SYSTEM"
    illegal = "CUDA_ERROR_ILLEGAL_STATE"
    assert [call(controller, target.pid, w) for w in ("Unlock", "Checkpoint")] == [illegal] * 2
    target.kill()
    wait_until(lambda: machine.used() == 2 * MIB, "what it kept is free again")


def test_more_comes_back_than_nvml_said_and_as_much_is_needed(machine):
    emulator.set_context_bytes(machine.state, 8 * MIB)
    controller, target = caller(machine), machine.worker()
    controller.do(
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "def row(): return [p.usedGpuMemory for p in "
        "pynvml.nvmlDeviceGetComputeRunningProcesses(h)]\n"
        "def free_now(): return pynvml.nvmlDeviceGetMemoryInfo(h).free"
    )
    target.do("p = alloc(32 * MIB)")
    (said,), before = controller.get("row()"), controller.get("free_now()")
    controller.do(f"suspend({target.pid})")
    assert controller.get("row()") == []
    freed = controller.get("free_now()") - before
    assert freed - said == 6 * MIB
    hog = machine.worker("init(); q = alloc(64 * MIB - 8 * MIB - " + str(said + 4 * MIB) + ")")
    assert controller.get("free_now()") == said + 4 * MIB
    assert call(controller, target.pid, "Restore") == "CUDA_ERROR_OUT_OF_MEMORY"
    hog.kill()


def test_a_stream_takes_gpu_memory_and_gives_it_back(machine):
    target = machine.worker()
    before = machine.used()
    target.do("streams = [ck(driver.cuStreamCreate(1)) for _ in range(4)]")
    assert machine.used() - before == 4 * (64 << 10)
    target.do("[ck(driver.cuStreamDestroy(s)) for s in streams]")
    assert machine.used() == before
    target.do(
        "a = alloc(62 * MIB - 65536); s = ck(driver.cuStreamCreate(1))\n"
        "full = name_of(driver.cuStreamCreate, 1)"
    )
    assert target.get("full") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_unmapping_does_not_wait_for_a_kernel_and_freeing_does(machine):
    target = machine.worker()
    target.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [desc], 1))\n"
        "p = alloc(MIB); s = ck(driver.cuStreamCreate(1))"
    )
    target.do("launch('spin_ns', 1_000_000_000, stream=s); free(p)")
    assert target.get("name_of(driver.cuStreamQuery, s)") == "CUDA_SUCCESS"
    target.do(
        "stuck = Stuck(s); launch('fill_u32', at, size // 4, 1, stream=s)\n"
        "ck(driver.cuMemUnmap(at, size))"
    )
    assert target.get("name_of(driver.cuStreamQuery, s)") == "CUDA_ERROR_NOT_READY"
    assert target.fails("stuck.end()") == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_memory_that_is_unmapped_under_a_running_kernel_costs_the_context_not_the_process(machine):
    target = machine.worker()
    target.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [desc], 1))\n"
        "s = ck(driver.cuStreamCreate(1))\n"
        "for i in range(400): launch('xorshift_u32', at, size // 4, i, stream=s)\n"
        "stuck = Stuck(s); launch('xorshift_u32', at, size // 4, 0, stream=s)\n"
        "ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemRelease(h))"
    )  # the kernels before ``stuck`` run now, or have ended; the one after it has not begun
    assert target.fails("stuck.end()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert machine.device_bytes(target) == 0


def test_what_moves_into_the_addresses_of_unmapped_memory_stays(machine):
    target = machine.worker()
    target.do(
        VMM + "small = 64 << 10\n"
        "h = ck(driver.cuMemCreate(size, prop, 0))\n"
        "at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))\n"
        "ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [desc], 1))\n"
        "s = ck(driver.cuStreamCreate(1)); launch('spin_ns', 1_000_000_000, stream=s)\n"
        "ck(driver.cuMemUnmap(at, size)); ck(driver.cuMemAddressFree(at, size))\n"
        "first = alloc(small)\n"
        "while first < at: first = alloc(small)\n"
        "second = alloc(small); launch('fill_u32', second, small // 4, 7, stream=s)\n"
        "free(first)\n"  # waits for the kernels: now what was unmapped under them goes
        "back = read(second, 4)"
    )
    assert target.get("first == at and second < at + size")
    assert target.get("list(back)") == [7, 0, 0, 0]


# --- who dies of it -----------------------------------------------------------------------------


def test_a_process_with_an_nccl_group_dies_of_a_checkpoint_on_595_and_later(machine):
    controller, target = caller(machine), machine.worker()
    target.do(
        "def named():\n"
        "    here = f'/proc/self/task/{threading.get_native_id()}/comm'\n"
        "    open(here, 'w').write('pt_nccl_watchdg')\n"
        "    is_named.set(); time.sleep(3600)\n"
        "is_named = threading.Event()\n"
        "threading.Thread(target=named, daemon=True).start(); is_named.wait()"
    )
    controller.do(f"checkpoint_of({target.pid}).lock()")
    answer = call(controller, target.pid, "Checkpoint")
    if emulator.has_quirk(machine.state, "nccl_kills"):
        assert answer == "CUDA_ERROR_OPERATING_SYSTEM"
        assert target.ended(30.0)
        assert target.returncode == -signal.SIGABRT
    else:
        assert answer == "CUDA_SUCCESS"


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("killed", marks=pytest.mark.host_goes_down),
        "put_away_first",
        "by_itself",
    ],
)
def test_killing_a_restored_process_takes_the_host_down_on_the_open_module(boot, ending):
    machine = boot("1x64MiB", "595-open")
    controller, target = caller(machine), machine.worker()
    target.do("p = alloc(MIB)")
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    assert emulator.host_down(machine.state) == 0
    if ending == "by_itself":
        assert target.leave()
    else:
        if ending == "put_away_first":
            controller.do(f"suspend({target.pid})")
        target.kill()
    assert emulator.host_down(machine.state) == (target.pid if ending == "killed" else 0)
    machine.worker()  # reaps what is dead
    assert emulator.host_down(machine.state) == (target.pid if ending == "killed" else 0)


def test_a_test_that_took_its_host_down_is_told(boot):
    machine = boot("1x64MiB", "595-open")
    controller, target = caller(machine), machine.worker()
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    assert hosts.fallen() == {}
    target.kill()
    assert hosts.fallen() == {machine.state: target.pid}
    assert hosts.fallen() == {}, "each is told once"


def test_other_drivers_let_a_restored_process_be_killed(worst):
    controller, target = caller(worst), worst.worker()
    controller.do(f"suspend({target.pid}); resume({target.pid})")
    target.kill()
    assert emulator.host_down(worst.state) == 0


# --- faults -------------------------------------------------------------------------------------


@pytest.fixture
def pair(worst):
    target = worst.worker()
    target.do(OLD)
    return caller(worst), target


def test_a_checkpoint_that_refuses_and_poisons(worst, pair):
    controller, target = pair
    worst.faults.set("checkpoint_poison")
    assert call(controller, target.pid, "Lock") == "CUDA_SUCCESS"
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_NOT_SUPPORTED"
    assert call(controller, target.pid, "Unlock") == "CUDA_SUCCESS"
    for code in ("sync()", "read(p, 4)", "alloc(64)"):
        assert target.fails(code) == "CUDA_ERROR_LAUNCH_FAILED"


def test_a_checkpoint_of_a_broken_context_answers_its_error(worst, pair):
    controller, target = pair
    assert target.fails("launch('fill_u32', 8, 1, 1); sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert call(controller, target.pid, "Lock") == "CUDA_SUCCESS"
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert call(controller, target.pid, "Unlock") == "CUDA_SUCCESS"
    assert target.fails("sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_a_checkpoint_that_kills(worst, pair, delay_s):
    controller, target = pair
    worst.faults.set("checkpoint_kill", duration_s=delay_s)
    controller.do(f"checkpoint_of({target.pid}).lock()")
    began_s = time.monotonic()
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert time.monotonic() - began_s >= delay_s
    assert target.ended(30.0)
    assert call(controller, target.pid, "GetState", "") == "CUDA_ERROR_OPERATING_SYSTEM"


def test_a_lock_that_kills(worst, pair):
    controller, target = pair
    worst.faults.set("lock_kill")
    assert call(controller, target.pid, "Lock") == "CUDA_ERROR_OPERATING_SYSTEM"
    with pytest.raises(WorkerGoneError):
        target.get("1")
    wait_until(lambda: target.returncode == -signal.SIGSEGV, "it died of the driver")


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("checkpoint_oom", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("checkpoint_unsupported", "CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
def test_a_checkpoint_that_the_machine_cannot_do_changes_nothing(worst, pair, fault, answer):
    controller, target = pair
    worst.faults.set(fault, count=-1)
    controller.do(f"checkpoint_of({target.pid}).lock()")
    for _ in range(2):
        assert call(controller, target.pid, "Checkpoint") == answer
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("digest(p, 4 * MIB) == expected")


@pytest.mark.parametrize(("gpu", "needs_kib"), [("1x64MiB", 1024), ("1x256MiB", 2048)])
@pytest.mark.parametrize("driver", REAL)
def test_a_checkpoint_needs_a_little_free_memory(boot, driver, gpu, needs_kib):
    machine = boot(gpu, driver)
    target, hog = machine.worker(), machine.worker()
    controller = caller(machine)
    target.do(OLD)
    hog.do(
        "init(); last = alloc(64 << 10)\n"
        f"alloc(ck(driver.cuMemGetInfo())[0] - {needs_kib - 64} * 1024)"
    )
    controller.do(f"checkpoint_of({target.pid}).lock()")
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert controller.get(f"checkpoint_of({target.pid}).state") == "locked"
    hog.do("free(last)")
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_UNKNOWN", "never again"
    controller.do(f"checkpoint_of({target.pid}).unlock()")
    assert target.get("digest(p, 4 * MIB) == expected")
    assert target.leave()
    another = machine.worker()
    another.do("init()")
    controller.do(f"suspend({another.pid}); resume({another.pid})")


@pytest.mark.parametrize("deep", [False, True], ids=["locked", "checkpointed"])
def test_nvml_calls_of_the_target_wait_while_it_is_held(worst, deep):
    controller, target = caller(worst), worst.worker()
    reader = "pynvml.nvmlDeviceGetMemoryInfo(h).total"
    setup = "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)"
    for one in (controller, target):
        one.do(setup)
    total = target.get(reader)
    controller.do(f"suspend({target.pid})" if deep else f"checkpoint_of({target.pid}).lock()")
    for code in (
        reader,
        "pynvml.nvmlInit()",
        "pynvml.nvmlDeviceGetCount()",
        "pynvml.nvmlShutdown()",
    ):
        target.send(code)
    assert controller.get(reader) == total, "another process is answered"
    assert not target.answered(QUIET_S)
    controller.do(f"resume({target.pid})" if deep else f"checkpoint_of({target.pid}).unlock()")
    assert [target.answer() for _ in range(4)] == [total, None, 1, None]


def test_nvml_answers_on_a_driver_without_the_quirk(worst, pair):
    controller, target = pair
    target.do("import pynvml; pynvml.nvmlInit()")
    emulator.set_quirk(worst.state, "nvml_waits", on=False)
    controller.do(f"suspend({target.pid})")
    assert target.get("pynvml.nvmlDeviceGetCount()") == 1


def test_mig_shows_in_nvml_and_refuses_checkpoints(worst, pair):
    controller, target = pair
    controller.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    assert "Not Supported" in controller.fails("pynvml.nvmlDeviceGetMigMode(h)")
    emulator.set_quirk(worst.state, "mig")
    assert controller.get("pynvml.nvmlDeviceGetMigMode(h)") == [1, 1]
    controller.do(f"checkpoint_of({target.pid}).lock()")
    assert call(controller, target.pid, "Checkpoint") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_restore_that_is_invalid_for_ever(worst, pair):
    controller, target = pair
    controller.do(f"suspend({target.pid})")
    worst.faults.set("restore_invalid")
    for _ in range(3):
        assert call(controller, target.pid, "Restore") == "CUDA_ERROR_INVALID_VALUE"
    assert controller.get(f"checkpoint_of({target.pid}).state") == "checkpointed"


def test_nvml_names_processes_without_sizes(worst, pair):
    controller, _ = pair
    controller.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    sizes = "[p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]"
    assert controller.get(sizes)[0] > 0
    emulator.set_quirk(worst.state, "no_process_sizes")
    assert controller.get(sizes) == [None]


def test_nvml_shows_no_processes_in_another_pid_namespace(worst, pair):
    controller, _ = pair
    controller.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    rows = "len(pynvml.nvmlDeviceGetComputeRunningProcesses(h))"
    assert controller.get(rows) == 1
    emulator.set_quirk(worst.state, "no_process_rows")
    assert controller.get(rows) == 0
    assert controller.get("pynvml.nvmlDeviceGetMemoryInfo(h).used") > 4 * MIB
