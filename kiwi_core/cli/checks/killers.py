"""Checks of driver versions that kill the programs that they move, or that hang the machine.

Sources: public reports, collected in November 2026 (NVIDIA/cuda-checkpoint#15, #51, #53, #58, and
runs on drivers 580, 595 and 610). Where no report covers a newer driver, the worst is assumed.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.cli.checks.finding import Finding, ok, warn
from kiwi_core.gpu import mps
from kiwi_core.nvidia_module import NCCL_DIES_SINCE, Module, module_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NVML_KILLS_SINCE: Final = 610

PROFILERS: Final = frozenset({"nsys", "ncu", "nsys-launcher", "cuda-gdb"})
INJECTION: Final = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
"""Variables that name a library which the driver loads into every program; profilers set them."""


def check(
    root: Path = Path("/"),
    machine: str = platform.machine(),
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yield no finding without NVIDIA's kernel module. ``root`` is the directory that holds
    ``/proc``; tests pass another."""
    module = module_of(root)
    if module is None:
        return
    yield restored(module)
    yield nccl(module)
    yield unloaded_nvml(module)
    yield profilers(root, environment)
    if machine in ("aarch64", "arm64"):
        yield warn(
            "arm64",
            "On one kind of arm64 machine (GB10, driver 580.142) the driver says that it can move "
            "programs, and then answers 'not supported'.",
            "Try it: kiwi bench moves a program of its own. If that is refused, use the in-process "
            "pager (KIWI_PAGER=inprocess).",
        )


def restored(module: Module) -> Finding:
    kind = "open" if module.open else "proprietary"
    text = f"{module.version or 'of an unknown version'}, the {kind} kernel module"
    if not module.kills_hang:
        return ok("module", text)
    return warn(
        "module",
        f"{text}: killing a program whose memory was moved out and back can hang this machine "
        "some 30 seconds later (seen with 595.71).",
        "End such programs by themselves: restart kernels from Jupyter, which moves their memory "
        "out first, and do not use kill -9. The proprietary module has not shown this.",
    )


def nccl(module: Module) -> Finding:
    if module.major < NCCL_DIES_SINCE:
        return ok("NCCL", "this driver moves programs with an NCCL communicator on one GPU")
    return warn(
        "NCCL",
        f"Driver {module.version} ends a program with an NCCL communicator when its memory is "
        "moved. Kiwi leaves such programs in the GPU; others wait for them.",
        "For one GPU start training without a process group, call destroy_process_group() when it "
        "is no longer needed, or use driver 580.",
    )


def unloaded_nvml(module: Module) -> Finding:
    if module.major < NVML_KILLS_SINCE:
        return ok("NVML use", "programs may load and unload NVML")
    return warn(
        "NVML use",
        f"Driver {module.version} kills a program that has unloaded NVML without nvmlShutdown, "
        "when its memory is moved.",
        "Call nvmlShutdown before a library that uses NVML is unloaded, or keep it loaded.",
    )


def profilers(root: Path, environment: Mapping[str, str]) -> Finding:
    remedy = "Profile with Kiwi off (KIWI_DISABLE=1), one program at a time."
    for name in INJECTION:
        if environment.get(name):
            text = f"{name} is set: programs started here run under a profiler, and the driver "
            return warn("profilers", f"{text}cannot move such programs.", remedy)
    running = sorted(mps.commands(root) & PROFILERS)
    if running:
        text = f"{running[0]} runs: the driver cannot move a program that is profiled (CUPTI)."
        return warn("profilers", text, remedy)
    return ok("profilers", "none runs; a program under one (CUPTI, torch.profiler) cannot be moved")
