"""Tests that every failure has a code, a sentence and, if there is one, a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver, nvml
from kiwi_core.gpu.results import cuda_error, nvml_error


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (2, "no-gpu-memory"),
        (304, "os-call-failed"),
        (401, "illegal-state"),
        (500, "driver-too-old"),
        (600, "lock-timeout"),
        (800, "not-permitted"),
        (801, "unsupported"),
    ],
)
def test_cuda_results(number: int, code: str) -> None:
    error = cuda_error("lock of process 7", number, "CUDA_ERROR_WHATEVER")
    assert (error.code, error.driver_code) == (code, number)
    assert error.message.startswith("Lock of process 7 failed: ")
    assert f"(CUDA error {number})." in error.message


def test_permission_comes_with_what_to_do() -> None:
    remedy = cuda_error("x", 800).remedy
    assert "same user" in remedy
    assert "CAP_SYS_PTRACE" in remedy
    assert "PID namespace" in remedy
    assert "nvidia-smi -pm 1" in remedy


def test_an_unknown_result_keeps_the_drivers_words() -> None:
    error = cuda_error("x", 987, "CUDA_ERROR_NEW: something new")
    assert error.code == "driver"
    assert "something new" in str(error)
    assert "987" in str(error)


def test_nvml_results() -> None:
    assert nvml_error("x", 12).code == "nvml-no-library"
    assert "emulate" in nvml_error("x", 9).remedy
    assert nvml_error("x", 777, "words").code == "nvml-failed"


NO_DRIVER = """
import kiwi_core.gpu, kiwi_core.gpu.driver as driver, kiwi_core.gpu.nvml as nvml
import kiwi_core.pager.session_pager, sys
from kiwi_core.errors import GpuError
assert not {"cuda.bindings", "cuda.core", "pynvml"} & set(sys.modules)
assert driver.library_path() == ""
for call in (driver.init, driver.driver_version, driver.capabilities, nvml.gpus):
    try:
        call()
    except GpuError as error:
        print(error.code)
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_without_a_driver_importing_works_and_calls_say_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["no-driver"] * 3 + ["nvml-no-library"]


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_a_lock_needs_a_limit(timeout_ms: int) -> None:
    with pytest.raises(Exception, match="timeout above 0"):
        driver.lock(1, timeout_ms)


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    state = driver.checkpoint_state(process.pid)
    assert state is driver.CheckpointState.NOT_A_CUDA_PROCESS
    with pytest.raises(GpuError, match="not a live process"):
        driver.unlock(process.pid)


def test_rows_that_cannot_be_true_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen on machines whose NVML answers with pids of another namespace, or with garbage."""
    row = SimpleNamespace
    mine = os.getpid()
    rows = [row(pid=mine, usedGpuMemory=5), row(pid=2, usedGpuMemory=7)]
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda _uuid: 0,
        nvmlDeviceGetMemoryInfo=lambda _gpu: row(total=100, free=60),
        nvmlDeviceGetComputeRunningProcesses=lambda _gpu: rows,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_initialised_pid", -1)
    monkeypatch.setattr(nvml, "is_kernel_thread", lambda pid: pid == 2)
    assert nvml.users("GPU-1") == nvml.GpuUsers(60, {mine: 5}, sized=True)
    rows.append(row(pid=1, usedGpuMemory=71 << 40))
    assert nvml.users("GPU-1") == nvml.GpuUsers(60, {mine: 5}, sized=False)
