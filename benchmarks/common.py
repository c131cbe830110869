"""Shared parts of all benchmarks: the description of the machine, measuring in turns, tables, JSON.

A benchmark reports and does not judge a build: its exit status is 0 whether a target is reached or
not. The results name no person, host or directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # tests.support starts real daemons and kernels …
sys.path.insert(1, str(ROOT / "tests" / "support"))  # … and Jupyter servers, by plain imports


# --- the machine ------------------------------------------------------------------------------


def machine(gpu: str = "none") -> dict[str, Any]:
    """Describe the machine. ``gpu``: a real GPU and its driver in words, "emulated" or "none"."""
    from kiwi_core import __version__

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "gpu": gpu,
        "kiwi": __version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# --- measuring --------------------------------------------------------------------------------


@dataclass
class Samples:
    """Samples of a duration, in nanoseconds."""

    values_ns: list[float] = field(default_factory=list)

    def add(self, value_ns: float) -> None:
        self.values_ns.append(value_ns)

    @property
    def median_ns(self) -> float:
        return statistics.median(self.values_ns)

    def percentile_ns(self, percent: float) -> float:
        ordered = sorted(self.values_ns)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def summary(self) -> dict[str, float]:
        """Return a summary in microseconds; p25 and p75 are the spread."""
        if not self.values_ns:
            return {"n": 0}
        return {
            "n": len(self.values_ns),
            "median_us": round(self.median_ns / 1e3, 2),
            "p25_us": round(self.percentile_ns(25) / 1e3, 2),
            "p75_us": round(self.percentile_ns(75) / 1e3, 2),
            "p99_us": round(self.percentile_ns(99) / 1e3, 2),
        }


def in_turns(
    subjects: dict[str, Callable[[], None]], rounds: int, *, warm_up: int = 20, pause_s: float = 0.0
) -> dict[str, Samples]:
    """Measure each subject once per round, in an order that shifts from round to round, so that
    other load on the machine affects all of them alike. ``pause_s``: rest before each."""
    names = list(subjects)
    samples = {name: Samples() for name in names}
    for number in range(-warm_up, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if pause_s:
                time.sleep(pause_s)
            began_ns = time.perf_counter_ns()
            subjects[name]()
            took_ns = time.perf_counter_ns() - began_ns
            if number >= 0:
                samples[name].add(took_ns)
    return samples


# --- reporting --------------------------------------------------------------------------------


def arguments(description: str | None, *more: Callable[[argparse.ArgumentParser], Any]) -> Any:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    for add in more:
        add(parser)
    return parser.parse_args()


def target(what: str, value: float, limit: float, unit: str = "×") -> dict[str, Any]:
    """Return a line of the verdict: ``value`` should be at most ``limit``."""
    return {
        "what": what, "value": round(value, 3), "limit": limit, "unit": unit,
        "reached": value <= limit,
    }  # fmt: skip


def report(name: str, results: dict[str, Any], args: Any, *, gpu: str = "none") -> None:
    """Print the verdict and write ``--json``. ``results["targets"]`` is a list of
    ``target(...)``."""
    results = {"benchmark": name, "machine": results.pop("machine", None) or machine(gpu)} | results
    for line in results.get("targets", []):
        verdict = "reached" if line["reached"] else "MISSED"
        print(
            f"{line['what']}: {line['value']:g} {line['unit']}"
            f" (target: at most {line['limit']:g}): {verdict}"
        )
    where = results["machine"]
    print(
        f"on {where['cpu']}, {where['cores']} cores, Python {where['python']},"
        f" GPU: {where['gpu']}, load before {where['load_before']}"
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with the first column left-aligned and the others right-aligned."""
    cells = [list(map(str, head))] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        first, *rest = (
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def samples_table(samples: dict[str, Samples]) -> None:
    rows = []
    for name, one in samples.items():
        s = one.summary()
        rows.append(
            (name, s["n"], *(float(s[k]) for k in ("median_us", "p25_us", "p75_us", "p99_us")))
        )
    table(("", "n", "median µs", "p25", "p75", "p99"), rows)
