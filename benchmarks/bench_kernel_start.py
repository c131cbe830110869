"""How much longer a kernel takes to start with Kiwi: from its launch to its first answer.

Real kernels are started in turns: without Kiwi (the extension is not loaded at all), with Kiwi and
a daemon on an emulated GPU, as the package installs it, and again without, as a control. A kernel
loads the gate at its start, so the figure contains its cost. Processor time is also measured: other
load on the machine affects it less.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
from bench_cpu_cell import WITHOUT, has_kiwi
from common import Samples, arguments, machine, report, samples_table, target

from tests.support.daemon import running_daemon
from tests.support.kernels import running_kernel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

LIMIT_MS = 30.0


def started(env: Mapping[str, str], config: str, *, wanted: bool) -> tuple[int, float]:
    """Return how long a start took, and the kernel's processor time for it; both in nanoseconds."""
    began_ns = time.perf_counter_ns()
    with running_kernel(env, config=config) as kernel:
        took_ns = time.perf_counter_ns() - began_ns
        used = psutil.Process(kernel.pid).cpu_times()
        if has_kiwi(kernel) is not wanted:
            raise SystemExit(f"nothing to compare: Kiwi is loaded: {not wanted}")
    return took_ns, 1e9 * (used.user + used.system)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=40, help="of each kind")


def main() -> int:
    args = arguments(__doc__, options)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not compile at each start
    where = machine("emulated")
    starts = 4 if args.quick else args.starts
    walls: dict[str, Samples] = {}
    processor: dict[str, Samples] = {}
    with running_daemon() as daemon:
        kinds = {
            "without Kiwi": (daemon.env, WITHOUT, False),
            "with Kiwi": (daemon.env, "", True),
            "without Kiwi, control": (daemon.env, WITHOUT, False),
        }
        names = list(kinds)
        for number in range(starts + 1):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                env, config, wanted = kinds[name]
                wall_ns, used_ns = started(env, config, wanted=wanted)
                if number:  # the first starts fill caches
                    walls.setdefault(name, Samples()).add(wall_ns)
                    processor.setdefault(name, Samples()).add(used_ns)
    print("until its first answer")
    samples_table(walls)
    print("processor time")
    samples_table(processor)
    plain, kiwi, control = names
    results: dict[str, Any] = {
        "machine": where,
        "wall": {name: one.summary() for name, one in walls.items()},
        "processor": {name: one.summary() for name, one in processor.items()},
        "ratio": round(walls[kiwi].median_ns / walls[plain].median_ns, 4),
        "control_ratio": round(walls[control].median_ns / walls[plain].median_ns, 4),
    }
    results["targets"] = [
        target(f"{what} of a start, with Kiwi less without", more(one) / 1e6, LIMIT_MS, "ms")
        for what, one in (("time", walls), ("processor time", processor))
    ]
    report("kernel_start", results, args)
    return 0


def more(samples: dict[str, Samples]) -> float:
    return samples["with Kiwi"].median_ns - samples["without Kiwi"].median_ns


if __name__ == "__main__":
    sys.exit(main())
