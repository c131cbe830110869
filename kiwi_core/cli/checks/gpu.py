"""The CUDA driver, its checkpoint calls, NVML and every GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.cli.checks.finding import Finding, fail, ok, warn
from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver, nvml
from kiwi_core.gpu import mps as mps_service
from kiwi_core.units import format_bytes
from kiwi_emulator import ENV_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.gpu.nvml import GpuInfo

NVIDIA: Final = "0x10de"
DISPLAY_CLASSES: Final = ("0x0300", "0x0302")
"""PCI class codes of GPUs: VGA and 3D controllers."""

NO_NVML: Final = ("nvml-no-library", "nvml-no-driver")

NEEDED: Final = "CUDA {}.{} (driver 570)".format(*driver.CHECKPOINT_SINCE)


def check(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the driver. ``root`` holds ``/proc``, ``/sys`` and ``/dev``; tests pass another."""
    gap = driver.bindings_gap()
    if gap:
        yield bindings(gap)
    try:
        info = driver.capabilities()
    except GpuError as error:
        yield no_driver(error, hardware=has_nvidia_hardware(root))
        return
    yield library(info.library)
    if not gap:
        yield checkpoint(info)
    yield from mps(root)


def gpus(root: Path = Path("/")) -> tuple[list[GpuInfo], list[Finding]]:
    """Return every GPU, and the findings about them."""
    try:
        found, unreadable = nvml.survey()
    except GpuError as error:
        if error.code in NO_NVML and not has_nvidia_hardware(root):
            return [], []  # a machine without a GPU: check() reports it
        return [], [fail("NVML", error.message, error.remedy)]
    findings = [finding for gpu in found for finding in one(gpu)]
    findings += [
        fail(f"GPU {index}", error.message, error.remedy) for index, error in unreadable.items()
    ]
    return list(found), findings


def no_driver(error: GpuError, *, hardware: bool) -> Finding:
    if hardware:
        return fail(
            "driver",
            f"There is an NVIDIA GPU, but its driver does not work: {error.message}",
            error.remedy or "Install NVIDIA's driver, 570 or newer.",
        )
    return warn(
        "driver",
        "There is no NVIDIA GPU here (no driver, no device).",
        "Kiwi can be tried without one: kiwi daemon --emulate 1x512MiB",
    )


def bindings(gap: str) -> Finding:
    return fail("bindings", f"{gap} So Kiwi moves no memory.", driver.BINDINGS_REMEDY)


def library(path: str) -> Finding:
    if is_emulated(path):
        return warn(
            "driver",
            f"{path} is Kiwi's EMULATED driver: control logic only, no real GPU is used.",
            "For a real GPU, start without Kiwi's emulator in LD_LIBRARY_PATH.",
        )
    return ok("driver", f"{path or 'libcuda'} is loaded")


def checkpoint(info: driver.DriverInfo) -> Finding:
    text = f"CUDA {info.version[0]}.{info.version[1]}"
    if not info.checkpoint:
        return fail(
            "checkpoint",
            f"{text}: this driver cannot move another process's memory. {info.why_not}",
            f"Install a driver for {NEEDED} or newer.",
        )
    return ok("checkpoint", f"{text}: the driver can move a process's memory out and in")


def one(gpu: GpuInfo) -> Iterator[Finding]:
    area = f"GPU {gpu.index}"
    version = f", driver {gpu.driver_version}" if gpu.driver_version else ""
    yield ok(area, f"{gpu.name}, {format_bytes(gpu.total_bytes)}, {gpu.uuid}{version}")
    if gpu.mig:
        yield fail(
            area,
            "MIG is on: the driver cannot checkpoint processes on MIG slices.",
            f"Switch it off (nvidia-smi -i {gpu.index} -mig 0), or leave this GPU out with --gpu.",
        )
    if gpu.persistence is False:
        yield warn(
            area,
            "Persistence mode is off: the driver unloads between programs, which makes starts slow "
            "and can make checkpoints fail with 'operation not permitted'.",
            f"As root: nvidia-smi -i {gpu.index} -pm 1 (or enable nvidia-persistenced).",
        )


def mps(root: Path) -> Iterator[Finding]:
    """Look for an MPS control daemon: its clients cannot be checkpointed."""
    if mps_service.runs(root):
        yield fail("MPS", mps_service.RUNS, mps_service.REMEDY)
    elif os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        yield warn(
            "MPS",
            "CUDA_MPS_PIPE_DIRECTORY is set: programs started here look for an MPS daemon.",
            "Unset it, or make sure that no MPS daemon is started.",
        )


def has_nvidia_hardware(root: Path = Path("/")) -> bool:
    if (root / "dev/nvidiactl").exists():
        return True
    return any(
        _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAY_CLASSES)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def compiler() -> Finding:
    """Look for a compiler, which builds the emulated driver on first use."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return ok("emulator", f"can be built ({found})")
    from importlib.util import find_spec

    if find_spec("ziglang") is not None:
        return ok("emulator", "can be built (the ziglang package)")
    return warn(
        "emulator",
        "No C compiler: emulated GPUs (kiwi daemon --emulate) cannot be built.",
        "Only if you want them: pip install ziglang, or install gcc.",
    )


def is_emulated(library_path: str) -> bool:
    """Return whether the library is the emulator's: only that one has ``ENV_STATE`` in it."""
    try:
        return ENV_STATE.encode() in Path(library_path).read_bytes()
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
