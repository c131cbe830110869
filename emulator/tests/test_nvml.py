"""Tests of nvidia-ml-py on the emulated NVML."""

from __future__ import annotations

import pytest
from cuda_processes import wait_until

import kiwi_emulator as emulator

MIB = 1 << 20


@pytest.fixture
def observer(boot):
    """Return a machine, and a process that only observes and never initialises CUDA."""
    machine = boot("2x64MiB")
    worker = machine.worker(
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)"
    )
    return machine, worker


def processes(worker):
    code = "{p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)}"
    return {int(pid): used for pid, used in worker.get(code).items()}


def test_nvml_reports_the_emulated_gpus(observer):
    machine, worker = observer
    uuid = emulator.books(machine.state).gpus[1].uuid
    assert worker.get("pynvml.nvmlDeviceGetCount()") == 2
    assert "Emulated" in worker.get("pynvml.nvmlDeviceGetName(h)")
    assert worker.get(f"pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID('{uuid}'))") == 1
    assert worker.fails("pynvml.nvmlDeviceGetHandleByUUID('GPU-0')") == "Not Found"
    version = worker.get("pynvml.nvmlSystemGetDriverVersion()")
    assert int(version.split(".")[0]) >= 570
    assert "emulated" in version
    versions = {profile.cuda_version for profile in emulator.DRIVERS.values()}
    assert worker.get("pynvml.nvmlSystemGetCudaDriverVersion()") in versions
    assert worker.get("pynvml.nvmlDeviceGetPersistenceMode(h)") == 1
    worker.do("pynvml.nvmlShutdown()")
    assert worker.fails("pynvml.nvmlDeviceGetCount()") == "Uninitialized"


def test_memory_per_gpu_and_process_follows_allocation_checkpoint_and_death(observer):
    machine, worker = observer
    assert processes(worker) == {}
    a, b = machine.worker(), machine.worker()
    a.do("alloc(10 * MIB)")
    assert processes(worker) == {a.pid: 12 * MIB, b.pid: 2 * MIB}
    assert worker.get("pynvml.nvmlDeviceGetMemoryInfo(h).used") == 14 * MIB
    two = "pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2)"
    assert worker.get(f"{two}.free") == 50 * MIB
    b.do(f"suspend({a.pid})")
    assert processes(worker) == {b.pid: 2 * MIB}
    b.do(f"resume({a.pid})")
    b.kill()
    assert processes(worker) == {a.pid: 12 * MIB}
    assert worker.get("pynvml.nvmlDeviceGetMemoryInfo(h).used") == 12 * MIB


def test_utilisation_tells_the_busy_process_from_the_idle_one(observer):
    machine, worker = observer
    busy, idle = machine.worker(), machine.worker()
    assert worker.get("pynvml.nvmlDeviceGetUtilizationRates(h).gpu") == 0
    busy.do("launch('spin_ns', 60_000_000_000)")
    look = "{s.pid: s.smUtil for s in pynvml.nvmlDeviceGetProcessUtilization(h, 0)}"

    def shares():
        return {int(pid): share for pid, share in worker.get(look).items()}

    wait_until(lambda: shares().get(busy.pid, 0) > 90, "it is seen to be busy")
    assert shares()[idle.pid] == 0
    wait_until(
        lambda: worker.get("pynvml.nvmlDeviceGetUtilizationRates(h).gpu") > 90, "so is the GPU"
    )
    busy.kill()
    wait_until(lambda: worker.get("pynvml.nvmlDeviceGetUtilizationRates(h).gpu") == 0, "then idle")
    idle.kill()
    assert worker.fails("pynvml.nvmlDeviceGetProcessUtilization(h, 0)") == "Not Found"
