"""Facts about this machine, and whether the preloaded library works on it. No checkpoint."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import module_text
from paging import pinned_copy
from stage import GIB, MIB, Program, Skipped, Stage, job_command, kiwi

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = {
    "driver calls": """
from job import DriverWork
work = DriverWork(SIZE); work.round(); said = work.digest()
""",
    "torch": """
import torch
a = torch.arange(SIZE // 8, device="cuda", dtype=torch.float32); b = torch.sin(a) * 2
m = torch.randn(1024, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
said = [b.double().sum().item(), (m @ m).double().sum().item(), a.cpu()[5].item()]
""",
    "cupy": """
import cupy
a = cupy.arange(SIZE // 8, dtype=cupy.float32); b = cupy.sin(a) * 2
said = [float(b.astype(cupy.float64).sum()), float(cupy.asnumpy(a)[5])]
""",
    "jax": """
import jax, jax.numpy as np
a = np.arange(SIZE // 8, dtype=np.float32); b = jax.jit(lambda x: np.sin(x) * 2)(a)
said = [float(b.sum()), float(a[5]), str(jax.devices()[0].platform)]
""",
    "triton": """
import torch, triton, triton.language as tl
exec(compile(open(KERNEL).read(), KERNEL, "exec"))
x = torch.arange(4096, device="cuda", dtype=torch.float32); y = torch.empty_like(x)
double[(4,)](x, y, 4096, BLOCK=1024); said = y.sum().item()
""",
}
TRITON_KERNEL = """
import triton, triton.language as tl
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""


def run(stage: Stage) -> None:
    """Run the steps, the cheap ones first; the libraries take most of the minute."""
    steps: dict[str, Callable[[Stage], None]] = {
        "the machine": _machine, "NVML sees pids": _pids, "bus": _bus, "the library": _library,
        "RAM": _ram, "kiwi doctor": _doctor,
    }  # fmt: skip
    for name, step in steps.items():
        with stage.attempt(name):
            step(stage)


def _machine(stage: Stage) -> None:
    from common import machine

    for name, value in machine("emulated" if stage.emulated else "").items():
        if value != "":
            stage.row(name, value)
    text = module_text()
    kind = "open" if "Open Kernel" in text else "proprietary" if text else "no /proc/driver/nvidia"
    stage.row("kernel module", kind, text=text.split("\n", 1)[0])
    stage.row("runtime", _runtime())
    stage.row("/dev/shm", round(shutil.disk_usage("/dev/shm").total / GIB, 1), unit="GiB")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    stage.row(
        "memlock", "unlimited" if locked < 0 else locked // MIB, unit="" if locked < 0 else "MiB"
    )
    stage.row("C compiler", next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "none"))


def _runtime() -> str:
    """Return what is known of the container or virtual machine that we are in."""
    words = [os.uname().release]
    for file, word in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if Path(file).exists():
            words.append(word)
    first = Path("/proc/1/comm")
    return ", ".join([*words, f"pid 1: {first.read_text().strip()}" if first.exists() else ""])


def _pids(stage: Stage) -> None:
    """Record whether NVML shows our processes, and their sizes."""
    from kiwi_core.gpu import nvml

    size = 16 * MIB if stage.emulated else 256 * MIB
    program = stage.spawn(job_command("hold", bytes=size))
    try:
        program.line(40)
        mine = nvml.processes(stage.uuid).get(program.pid)
    finally:
        program.end()
    told = mine is not None
    stage.row(
        "NVML tells the memory of our processes", told, target="True", passed=told,
        context_bytes=None if mine is None else mine - size,
    )  # fmt: skip


def _bus(stage: Stage) -> None:
    for name, gb_s in pinned_copy(stage).items():
        stage.row(f"pinned copy {name.removesuffix('_gb_s')}", round(gb_s, 2), unit="GB/s")


def _library(stage: Stage) -> None:
    """Run each library with the preloaded library and without, in parallel; compare the answers."""
    from kiwi_core import preload

    try:
        library = preload.library()
    except preload.Unavailable as why:
        raise Skipped(f"there is no preloaded library: {why}") from None
    stage.row("preloaded library", f"{library.stat().st_size} bytes")
    started: dict[str, tuple[Program, Program]] = {}
    for name in LIBRARIES:
        if stage.emulated and name != "driver calls":
            stage.row(f"{name} with the library", "left out: it needs the CUDA runtime")
        elif name != "driver calls" and importlib.util.find_spec(name) is None:
            stage.row(f"{name} with the library", "left out: not installed")
        else:
            command = _command(stage, name)
            env = stage.env | preload.environment(library, stage.env)
            started[name] = (stage.spawn(command, env), stage.spawn(command))
    try:
        for name, (with_it, without) in started.items():
            _compare(stage, name, with_it, without)
    finally:
        for pair in started.values():
            for program in pair:
                program.end()


def _command(stage: Stage, name: str) -> list[str]:
    kernel = stage.work / "kernel.py"
    kernel.write_text(TRITON_KERNEL)
    size = 16 * MIB if stage.emulated else GIB
    here = str(Path(__file__).parent)
    head = f"import sys, json, os; sys.path.insert(0, {here!r})\n"
    head += f"SIZE = {size}; KERNEL = {str(kernel)!r}\n"
    head += "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\n"
    head += "os.environ['JAX_PLATFORMS'] = 'cuda'  # not on the CPU without a word\n"
    return [sys.executable, "-c", head + LIBRARIES[name] + "\nprint(json.dumps({'said': said}))"]


def _compare(stage: Stage, name: str, with_it: Program, without: Program) -> None:
    with stage.attempt(f"{name} with the library"):
        try:
            expected = without.finish(stage.left_s)["said"]
        except TimeoutError as error:
            raise Skipped(f"no time: {error}") from None
        except RuntimeError as error:
            raise Skipped(f"it does not run without the library either: {error}") from None
        said = with_it.finish(stage.left_s)["said"]
        same = said == expected
        words = "lives; same results" if same else f"{said} instead of {expected}"
        stage.row(f"{name} with the library", words, target="same as without", passed=same)


def _ram(stage: Stage) -> None:
    """Touch some RAM and measure again: a virtual machine may get RAM as it is used."""
    before = _meminfo()
    size = 64 * MIB if stage.emulated else 4 * GIB
    with mmap.mmap(-1, size) as memory:
        for at in range(0, size, 4096):
            memory[at] = 1
        during = _meminfo()
    stage.row("RAM", round(before["MemTotal"] / GIB, 1), unit="GiB")
    stage.row("RAM available", round(before["MemAvailable"] / GIB, 1), unit="GiB")
    grown = during["MemTotal"] - before["MemTotal"]
    stage.row("RAM grows when it is used", grown > 0, grown_bytes=grown)


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _doctor(stage: Stage) -> None:
    done = subprocess.run(
        kiwi("doctor", "--json"), env=stage.env, capture_output=True, text=True,
        timeout=max(1.0, min(30.0, stage.left_s)), check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    for one in findings:
        if one["level"] != "ok":
            stage.row(f"doctor: {one['area']}", one["level"], words=str(one)[:400])
    stage.row("doctor: areas that are well", sum(one["level"] == "ok" for one in findings))
