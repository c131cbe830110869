"""The speed of the driver's checkpoint, by size; and ``kiwi bench``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from stage import GIB, MIB, Program, Stage, job_command, kiwi

if TYPE_CHECKING:
    from blocking_pager import BlockingPager

    from kiwi_core.pager.api import Target

ROUNDS = 3
SIZES = (4 * GIB, 16 * GIB, GIB, 256 * MIB, 40 * GIB)
"""Sizes, the most important first: time may run out."""
EMULATED_SIZES = (64 * MIB, 16 * MIB)
BUS_LIMITED = ("page_out_inprocess", "page_in_inprocess")
"""Rows of ``kiwi bench`` whose limit is the bus; the checkpoint is as fast as the driver allows."""
LEAST_SHARE = 0.9


def pinned_copy(stage: Stage) -> dict[str, float]:
    """Return GB/s of copies between pinned memory and the GPU, each way and both at once."""
    size = 16 * MIB if stage.emulated else GIB
    return stage.run([sys.executable, "-c", PINNED, str(size)])


PINNED = """
import json, sys, time
from cuda.bindings import driver as cu
n = int(sys.argv[1])
def ck(r):
    assert int(r[0]) == 0, r
    return r[1] if len(r) == 2 else r[1:]
ck(cu.cuInit(0))
ck(cu.cuCtxSetCurrent(ck(cu.cuDevicePrimaryCtxRetain(ck(cu.cuDeviceGet(0))))))
device, other = int(ck(cu.cuMemAlloc(n))), int(ck(cu.cuMemAlloc(n)))
host, back = int(ck(cu.cuMemAllocHost(n))), int(ck(cu.cuMemAllocHost(n)))
streams = [ck(cu.cuStreamCreate(1)) for _ in range(2)]
out = lambda: ck(cu.cuMemcpyDtoHAsync(host, device, n, streams[0]))
into = lambda: ck(cu.cuMemcpyHtoDAsync(other, back, n, streams[1]))
def rate(*copies):
    best = 0.0
    for _ in range(6):
        began = time.perf_counter()
        for copy in copies: copy()
        for stream in streams: ck(cu.cuStreamSynchronize(stream))
        best = max(best, n / (time.perf_counter() - began) / 1e9)
    return best
print(json.dumps({"out_gb_s": rate(out), "in_gb_s": rate(into), "both_gb_s": rate(out, into)}))
"""


def run(stage: Stage) -> None:
    """Measure GB/s by size, as shares of the pinned copy before and after each; hash all bytes."""
    bus = pinned_copy(stage)
    for size in EMULATED_SIZES if stage.emulated else SIZES:
        if size > min(stage.total_bytes * 0.8, stage.ram_bytes * 0.6):
            continue
        # The time to move 3 times out and in at 3 GB/s, and to hash twice.
        if stage.left_s < 10 + 10 * size / (4 * GIB):
            stage.row(f"{size // MIB} MiB", f"left out: {stage.left_s:.0f} s are left")
            continue
        with stage.attempt(f"{size // MIB} MiB"):
            bus = _size(stage, size, bus)


def _size(stage: Stage, size: int, before: dict[str, float]) -> dict[str, float]:
    """Measure one size; return the bus as it is afterwards."""
    program = stage.spawn(job_command("hold", bytes=size))
    try:
        first = program.line(stage.left_s)
        rates, unchanged = _moves(stage, program, size)
        program.say("go\n")
        last = program.finish(stage.left_s)
    finally:
        program.end()
    after = pinned_copy(stage)
    name = f"{size // MIB} MiB"
    same = first["digest"] == last["digest"]
    stage.row(f"{name}: every byte as before", same, target="True", passed=same)
    for way in ("out", "in"):
        pinned = statistics.mean([before[f"{way}_gb_s"], after[f"{way}_gb_s"]])
        gb_s = statistics.median(rates[way])
        stage.row(
            f"{name}: {way}", round(gb_s, 3), unit="GB/s", share_of_pinned=round(gb_s / pinned, 4),
            pinned_gb_s=round(pinned, 2), all_gb_s=[round(one, 3) for one in rates[way]],
        )  # fmt: skip
    stage.row(f"{name}: seconds of an operation of nothing", unchanged)
    return after


def _moves(stage: Stage, program: Program, size: int) -> tuple[dict[str, list[float]], float]:
    from blocking_pager import BlockingPager

    pager = BlockingPager(stage.uuid)
    try:
        return _moved(stage, pager, target_of(program.pid), size)
    finally:
        pager.close()


def _moved(
    stage: Stage, pager: BlockingPager, target: Target, size: int
) -> tuple[dict[str, list[float]], float]:
    from kiwi_core.pager.api import Moved

    rates: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(ROUNDS):
        for way, call in (("out", pager.page_out), ("in", pager.page_in)):
            outcome = call(target, time.monotonic_ns() + int(max(1.0, stage.left_s) * 1e9))
            if not isinstance(outcome, Moved):
                raise RuntimeError(f"page {way}: {outcome}")  # noqa: TRY004
            # In a PID namespace NVML does not show a process's size: use the size it asked for.
            rates[way].append((outcome.bytes_moved or size) / outcome.elapsed_ns)
    began_s = time.monotonic()
    pager.page_in(target, time.monotonic_ns() + 10**10)
    return rates, round(time.monotonic() - began_s, 4)


def target_of(pid: int) -> Target:
    """Return the pager's name for a process."""
    from kiwi_core.gpu import processes
    from kiwi_core.pager.api import Target
    from kiwi_core.units import SessionId

    ref = processes.ref_of(pid)
    if ref is None:
        raise RuntimeError("the program has ended")
    return Target(SessionId("bench"), ref)


def bench(stage: Stage) -> None:
    """Run ``kiwi bench``: kiwi_bench.json has its full JSON; its rows with a target are rows
    here."""
    file = stage.folder / "kiwi_bench.json"
    # kiwi bench makes its own emulated GPU, without the self-test's faults.
    which = ["--emulate", "1x256MiB"] if stage.emulated else ["--gpu", stage.uuid]
    env = without_driver(stage.env) if stage.emulated else stage.env
    done = subprocess.run(
        kiwi("bench", *which, "--json", str(file)), env=env, capture_output=True, text=True,
        timeout=max(5.0, stage.left_s), check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if not file.exists():
        raise RuntimeError(done.stderr[-600:] or done.stdout[-600:])
    data = json.loads(file.read_text())
    for row in data["rows"]:
        value = f"{row['spread']['median']:.4g}"
        stage.row(row["name"], value, unit=row["unit"], **_against(row))
    for left_out in data["left_out"]:
        stage.row(f"left out: {left_out}", "")


def _against(row: dict[str, Any]) -> dict[str, Any]:
    if not row["limit"]:
        return {}
    share = {"of": row["limit"]["of"], "share": row["ratio"]}
    if row["name"] in BUS_LIMITED:
        target = f"≥ {LEAST_SHARE:g} {row['limit']['of']}"
        return share | {"target": target, "passed": row["ratio"] >= LEAST_SHARE}
    return share


def without_driver(env: dict[str, str]) -> dict[str, str]:
    """Return ``env`` without the self-test's emulated driver."""
    ours = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    return {k: v for k, v in env.items() if "EMULATOR" not in k and k not in ours}
