"""The parts of run_all.py: each takes a Bench and returns what it found."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage import (
    GIB,
    JOB,
    MIB,
    Bench,
    Skipped,
    alone,
    daemon,
    finish,
    has,
    in_a_log,
    job_command,
    kiwi,
    need,
    spawn,
    together,
    without_driver,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.pager.api import Target

NEEDED = ("cuda.bindings", "pynvml", "psutil", "msgspec", "structlog")
"""Without these nothing runs."""
LOOKED_FOR = ("torch", "cupy", "jax", "triton", "pytest", "pytest_timeout", "hypothesis", "IPython")
PAGERS = ("checkpoint", "inprocess")

INPROCESS = "tests/gpu/inprocess"
"""Tests of the in-process pager with PyTorch, CuPy, JAX and Triton."""
GPU_TESTS = (
    "tests/bench/test_real.py",
    "tests/gpu",
    "tests/pager/stored/test_real_gpu.py",
    "tests/pager/test_real_gpu.py",
    "tests/preload/owner/test_real_gpu.py",
)
"""Named one by one: other suites need packages (Jupyter, a browser) that a GPU machine has not."""


def machine(bench: Bench) -> dict[str, Any]:
    """Raises Skipped where the rest cannot run."""
    from common import machine as describe

    missing = [name for name in NEEDED if not _has(name)]
    if missing:
        raise Skipped(f"missing in {sys.executable}: {', '.join(missing)}")
    if bench.emulated:
        _emulate(bench)
    from kiwi_core import preload
    from kiwi_core.gpu import nvml

    gpu = nvml.gpus()[0]
    bench.uuid, bench.total_bytes = gpu.uuid, gpu.total_bytes
    bench.env.setdefault("CUDA_VISIBLE_DEVICES", gpu.uuid if not bench.emulated else "0")
    try:
        library = f"{preload.library().stat().st_size} bytes"
    except preload.Unavailable as why:
        library = str(why)
    words = "emulated" if bench.emulated else f"{gpu.name}, driver {gpu.driver_version}"
    return {
        "machine": describe(words),
        "gpu_bytes": gpu.total_bytes,
        "libraries": {name: has(name) for name in LOOKED_FOR},
        "preload_library": library,
        "c_compiler": any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        "doctor": _doctor(bench),
    }


def _has(name: str) -> bool:
    try:
        return has(name)
    except ModuleNotFoundError:  # its parent
        return False


def _emulate(bench: Bench) -> None:
    from kiwi_core import emulator

    libs = emulator.build()
    state = bench.work / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    extra = emulator.environment(state, libs)
    bench.env |= extra
    os.environ.update(extra)
    emulator.load(str(libs.libcuda), str(libs.libnvml))


def _doctor(bench: Bench) -> Any:
    """What is not well; only the areas of the rest, whose words have paths of this machine."""
    env = without_driver(bench.env) if bench.emulated else bench.env
    done = subprocess.run(
        kiwi("doctor", "--json"), env=env, capture_output=True, text=True, timeout=60, check=False
    )
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError, TypeError):
        return done.stderr[-500:]
    return {
        "ok": [one["area"] for one in findings if one["level"] == "ok"],
        "not_ok": [one for one in findings if one["level"] != "ok"],
    }


def limits(bench: Bench) -> dict[str, Any]:
    """``kiwi bench``: its own JSON, whole; the GPU must be nobody else's meanwhile."""
    file = (bench.folder / "kiwi_bench.json").absolute()
    which = ["--emulate", "1x256MiB"] if bench.emulated else ["--gpu", bench.uuid]
    env = without_driver(bench.env) if bench.emulated else bench.env
    done = subprocess.run(
        kiwi("bench", *which, "--json", str(file)),
        env=env, capture_output=True, text=True, timeout=bench.left_s, check=False,
    )  # fmt: skip
    if not file.exists():
        raise RuntimeError(done.stderr[-1500:])
    data = json.loads(file.read_text())
    os.environ["KIWI_BENCH_JSON"] = str(file)  # its test judges these numbers
    rows = {
        row["name"]: f"{row['spread']['median']:.4g} {row['unit']}"
        + (f", {row['ratio']:.3g} {row['limit']['of']}" if row["limit"] else "")
        for row in data["rows"]
    }
    return {
        "status": done.returncode, "bench_took_s": data["took_s"], "in_full": file.name,
        "rows": rows, "left_out": data["left_out"], "remedies": data["remedies"],
    }  # fmt: skip


def tests(name: str, *words: str) -> Callable[[Bench], dict[str, Any]]:
    """pytest; all that it says is in ``name.log``."""

    def run(bench: Bench) -> dict[str, Any]:
        if not has("pytest"):
            raise Skipped("pytest is not installed in this Python")
        log = bench.folder / f"{name}.log"
        command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short"]
        command += ["-p", "no:cacheprovider", "--color=no", *words]
        status = in_a_log(command, log, bench.left_s - 30)
        lines = log.read_text(errors="replace").strip().splitlines()
        return {
            "in_full": log.name,
            "status": "not done in time" if status is None else status,
            "last": lines[-1] if lines else "",
            "passed": sum(" PASSED" in line for line in lines),
            "not_passed": [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40],
        }

    return run


def _pinned_copy(bench: Bench) -> dict[str, Any]:
    """GB/s of plain copies between pinned memory and the GPU, by a process of its own."""
    size = 32 * MIB if bench.emulated else GIB
    code = f"""
import json, sys, time
sys.path.insert(0, {str(Path(JOB).parent)!r})
from job import DriverWork, check
work = DriverWork({size} + (1 << 26)); cu = work.cu; n = {size}
device = int(check(cu.cuMemAlloc(n)))
host = int(check(cu.cuMemAllocHost(n)))
def rate(copy):
    best = 0.0
    for _ in range(6):
        began = time.perf_counter(); check(copy()); check(cu.cuCtxSynchronize())
        best = max(best, n / (time.perf_counter() - began) / 1e9)
    return best
print(json.dumps({{"out_gb_s": rate(lambda: cu.cuMemcpyDtoH(host, device, n)),
                   "in_gb_s": rate(lambda: cu.cuMemcpyHtoD(device, host, n))}}))
"""
    return finish(spawn([sys.executable, "-c", code], bench.env), 60)


def paging(bench: Bench) -> dict[str, Any]:
    """GB/s out and in by the driver's checkpoint, by size, as shares of the pinned copy before and
    after each size. (The in-process pager's are in ``kiwi bench``.)"""
    sizes = [16 * MIB, 64 * MIB] if bench.emulated else [256 * MIB, GIB, 4 * GIB, 16 * GIB]
    found: dict[str, Any] = {"backend": "checkpoint", "rows": []}
    for size in sizes:
        if size <= bench.total_bytes * 0.8 and bench.left_s > 40:
            found["rows"].append(_paged(bench, size))
            bench.so_far(found)
    return found


def _paged(bench: Bench, size: int) -> dict[str, Any]:
    from kiwi_core.gpu import driver
    from kiwi_core.pager.api import Moved
    from kiwi_core.pager.checkpoint import CheckpointPager

    driver.init()
    pager = CheckpointPager(bench.uuid)
    before = _pinned_copy(bench)
    process = spawn(job_command("hold", bytes=size), bench.env)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    target = _target(process.pid)
    rates: dict[str, list[float]] = {"out": [], "in": []}
    try:
        for _ in range(3):
            for way, call in (("out", pager.page_out), ("in", pager.page_in)):
                outcome = call(target, time.monotonic_ns() + 60 * 10**9)
                if not isinstance(outcome, Moved):
                    raise RuntimeError(f"page {way}: {outcome}")  # noqa: TRY004
                rates[way].append(outcome.bytes_moved / outcome.elapsed_ns)
    except BaseException:
        process.kill()
        raise
    last = finish(process, 60)
    after = _pinned_copy(bench)
    row: dict[str, Any] = {"bytes": size, "intact": first["digest"] == last["digest"]}
    for way in ("out", "in"):
        pinned = statistics.mean([before[f"{way}_gb_s"], after[f"{way}_gb_s"]])
        gb_s = statistics.median(rates[way])
        row |= {
            f"{way}_gb_s": round(gb_s, 3),
            f"{way}_all": [round(rate, 3) for rate in rates[way]],
            f"pinned_{way}_gb_s": round(pinned, 2),
            f"{way}_share_of_pinned": round(gb_s / pinned, 4),
        }
    return row


def _target(pid: int) -> Target:
    from kiwi_core.gpu import processes
    from kiwi_core.pager.api import Target
    from kiwi_core.units import SessionId

    ref = processes.ref_of(pid)
    if ref is None:
        raise RuntimeError("the program has ended")
    return Target(SessionId("bench"), ref)


# --- frameworks ---------------------------------------------------------------------------------


def training(bench: Bench) -> dict[str, Any]:
    """A PyTorch training loop, suspended in mid-cell again and again: the same losses?"""
    need(bench, "torch")
    command = job_command("train", rounds=400)
    plain = alone(bench, command)
    found: dict[str, Any] = {
        "rounds": plain["rounds"],
        "first_and_last_loss": [float.fromhex(plain["losses"][i]) for i in (0, -1)],
    }
    for pager in PAGERS:
        bench.so_far(found)
        found[pager] = _trained(bench, command, pager, plain["losses"])
    return found


def _trained(bench: Bench, command: list[str], pager: str, losses: list[str]) -> dict[str, Any]:
    with daemon(bench, 2.0) as one:
        subprocess.run(
            kiwi("set", "anti-thrash=always", "--socket-dir", str(one.directory)),
            env=one.env, check=True, capture_output=True,
        )  # fmt: skip
        said = together(bench, [one.run(name, command, pager) for name in ("a", "b")])
        swaps = len(one.status().swaps)
        journal = next((one.directory / "state").glob("*.journal")).read_text()
    stops = sum(journal.count(f'"action":"{what}"') for what in ("Suspend", "PageOut"))
    return {
        "losses_identical": [job["losses"] == losses for job in said],
        "stopped_in_mid_loop": stops,
        "swaps": swaps,
    }


def libraries(bench: Bench) -> dict[str, Any]:
    """CuPy and JAX: memory taken, moved out and in by the driver, and the same afterwards."""
    if bench.emulated:
        raise Skipped("CuPy and JAX need the CUDA runtime, which the emulated driver has not")
    found: dict[str, Any] = {}
    array = "a = x.arange(1 << 26, dtype='float32'); f = lambda: float(a.sum())"
    programs = {"cupy": f"import cupy as x; {array}", "jax": f"import jax.numpy as x; {array}"}
    for library, code in programs.items():
        found[library] = _moved(bench, code) if has(library) else "not installed"
        bench.so_far(found)
    return found


def _moved(bench: Bench, code: str) -> str:
    from kiwi_core.gpu import driver
    from kiwi_core.pager.checkpoint import CheckpointPager

    driver.init()
    pager = CheckpointPager(bench.uuid)
    loop = "; print(f(), flush=True); input(); print(f(), flush=True)"
    env = bench.env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = spawn([sys.executable, "-c", code + loop], env)
    assert process.stdout is not None
    before = process.stdout.readline().strip()
    if not before:
        return "the program failed"
    target = _target(process.pid)
    out = pager.page_out(target, time.monotonic_ns() + 60 * 10**9)
    back = pager.page_in(target, time.monotonic_ns() + 60 * 10**9)
    after, _ = process.communicate("\n", timeout=60)
    verdict = "same" if after.strip() == before else f"{before} became {after.strip()}"
    return f"{verdict}; out: {out}; in: {back}"
