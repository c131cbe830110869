"""What the preloaded library adds to a call of the CUDA driver without contention.

A C program and a Python program (cuda.bindings) make the same call over and over on the emulated
driver, with the library and without it, in turns, and once more without it as a control: processor
time of the calling thread per call. With valgrind, also instructions per call, which no load on the
machine changes. The emulated driver's calls are shorter than a real one's, so a ratio here is worse
than on a GPU; the library's own cost is the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Samples, arguments, machine, report, table, target

import kiwi_emulator as emulator
from kiwi_core import compiled, preload
from tests.support.instructions import costs
from tests.support.preload_world import PROGRAMS

LIMIT = 1.01
CALLS = {
    "copy": "cuMemcpyHtoD, 4 bytes",
    "record": "cuEventRecord",
    "wait": "cuStreamSynchronize, idle",
    "launch": "cuLaunchKernel",
}
FROM_PYTHON = {
    "python": "cuLaunchKernel from Python",
    "python-wait": "the same, each followed by cuStreamSynchronize",
}
LAUNCHES_PER_WAIT = {"python": 64, "python-wait": 1}


class Programs:
    def __init__(self, directory: Path) -> None:
        self._c = directory / "overhead"
        compiler = [*compiled.find_compiler(), "-O2", "-pthread", "-o", str(self._c)]
        subprocess.run([*compiler, str(PROGRAMS / "overhead.c"), "-ldl"], check=True)
        emulator.create_state(directory / "gpus", emulator.parse_gpus("1x64MiB"))
        mine = emulator.environment(directory / "gpus", emulator.build())
        fixed = {"PYTHONHASHSEED": "0"}  # two runs of Python then execute the same instructions
        plain = dict(os.environ) | fixed | mine | {"KIWI_SOCKET_DIR": str(directory / "no-daemon")}
        loaded = plain | preload.environment(preload.library(), before=plain)
        self._environments = {"plain": plain, "preloaded": loaded, "plain again": plain}

    def ns(self, call: str, count: int, how: str) -> float:
        return float(self._run(self._command(call, count), how).stdout)

    def instructions(self, call: str, count: int, how: str) -> tuple[float, float]:
        """Return the calling thread's instructions per call: all, and those in the library. The
        difference between many and few calls leaves out what happens once."""
        few, many = (self._collected(call, n, how) for n in (count, 3 * count))
        return (many[0] - few[0]) / (2 * count), (many[1] - few[1]) / (2 * count)

    def _collected(self, call: str, count: int, how: str) -> tuple[int, int]:
        profile = self._c.with_name("callgrind.out")
        found = costs(self._command(call, count), self._environments[how], profile)
        library = sum(cost for name, cost in found.items() if name.endswith(preload.NAME))
        return sum(found.values()), library

    def _command(self, call: str, count: int) -> list[str]:
        if call in FROM_PYTHON:
            launches = str(PROGRAMS / "launches.py")
            return [sys.executable, launches, str(count), str(LAUNCHES_PER_WAIT[call])]
        return [str(self._c), call, str(count)]

    def _run(self, command: list[str], how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self._environments[how],
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )


def measure(programs: Programs, call: str, count: int, rounds: int) -> dict[str, Any]:
    samples = {how: Samples() for how in ("plain", "preloaded", "plain again")}
    for _ in range(rounds):
        for how, one in samples.items():
            one.add(programs.ns(call, count, how))
    results: dict[str, Any] = {
        how: {
            "n": rounds,
            "least_ns": round(min(one.values_ns), 1),
            "median_ns": round(one.median_ns, 1),
            "p75_ns": round(one.percentile_ns(75), 1),
        }
        for how, one in samples.items()
    }
    plain_ns, preloaded_ns = samples["plain"].median_ns, samples["preloaded"].median_ns
    results["added_ns"] = round(preloaded_ns - plain_ns, 1)
    results["ratio"] = round(preloaded_ns / plain_ns, 4)
    return results


def main() -> None:
    args = arguments(__doc__)
    where = machine("emulated")
    rounds, count = (3, 2000) if args.quick else (15, 100_000)
    results: dict[str, Any] = {"machine": where, "calls": {}}
    with tempfile.TemporaryDirectory() as directory:
        programs = Programs(Path(directory))
        for call in (*CALLS, *FROM_PYTHON):
            several = count // 5 if call in ("launch", *FROM_PYTHON) else count
            results["calls"][call] = measure(programs, call, several, rounds)
            if shutil.which("valgrind"):
                few = 200 if args.quick else 2000
                plain, _ = programs.instructions(call, few, "plain")
                _, added = programs.instructions(call, few, "preloaded")
                results["calls"][call]["instructions"] = {
                    "plain": round(plain, 1),
                    "added": round(added, 1),
                    "ratio": round(1 + added / plain, 4),
                }
    rows = []
    for call, one in results["calls"].items():
        counted = one.get("instructions", {})
        rows.append(
            (
                (CALLS | FROM_PYTHON)[call],
                *(one[how]["median_ns"] for how in ("plain", "preloaded", "plain again")),
                one["added_ns"],
                *(counted.get(key, "–") for key in ("plain", "added")),
            )
        )
    head = ("", "plain ns", "preloaded ns", "plain again ns", "added ns", "instructions", "added")
    table(head, rows)
    python, launch = results["calls"]["python"], results["calls"]["launch"]
    results["targets"] = [target("launch loop from Python, processor time", python["ratio"], LIMIT)]
    waits = results["calls"]["python-wait"]
    for place, one in (("from Python", python), ("with waits", waits), ("in C", launch)):
        if counted := one.get("instructions"):
            results["targets"].append(
                target(f"launch loop {place}, instructions", counted["ratio"], LIMIT)
            )
    report("preload_gate", results, args, gpu="emulated")


if __name__ == "__main__":
    main()
