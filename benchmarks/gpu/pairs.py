"""Two programs on one GPU: those that do not fit together, and those that do."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from stage import (
    Bench,
    alone,
    daemon,
    has,
    job_command,
    spawn,
    together,
    without_driver,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _calibrated(bench: Bench, kind: str, size: int, seconds: float) -> list[str]:
    """A job of about ``seconds`` by itself."""
    sample_s = 1.0 if bench.emulated else 3.0
    said = alone(bench, job_command(kind, bytes=size, calibrate=sample_s))
    rate = said["rounds"] / (said["ended_s"] - said["ready_s"])
    return job_command(kind, bytes=size, rounds=max(10, int(rate * seconds)))


def _kind_of_job(bench: Bench) -> str:
    return "torch" if has("torch") and not bench.emulated else "driver"


def _wall(run: Callable[[], list[dict[str, Any]]]) -> tuple[float, list[dict[str, Any]]]:
    began_s = time.monotonic()
    said = run()
    return time.monotonic() - began_s, said


def not_fitting(pagers: Sequence[str]) -> Callable[[Bench], dict[str, Any]]:
    """Two jobs of 60 % each, sharing with a quantum, against one after the other."""

    def run(bench: Bench) -> dict[str, Any]:
        kind = _kind_of_job(bench)
        tq_s = 1.0 if bench.emulated else 30.0
        command = _calibrated(bench, kind, int(bench.total_bytes * 0.6), bench.job_s)
        serial_s, one_by_one = _wall(lambda: [alone(bench, command) for _ in range(2)])
        found: dict[str, Any] = {
            "kind": kind,
            "tq_s": tq_s,
            "job_s_alone": [round(one["ended_s"] - one["began_s"], 2) for one in one_by_one],
            "one_after_the_other_s": round(serial_s, 2),
            "target": 1.03,
        }
        digests = {one["digest"] for one in one_by_one}
        for pager in pagers:
            bench.so_far(found)
            found[pager] = _shared(bench, command, tq_s, pager, digests) | {"serial_s": serial_s}
            found[pager]["ratio"] = round(found[pager]["sharing_s"] / serial_s, 4)
        return found

    return run


def _shared(
    bench: Bench, command: list[str], tq_s: float, pager: str, digests: set[str]
) -> dict[str, Any]:
    with daemon(bench, tq_s) as one:
        seconds, said = _wall(
            lambda: together(bench, [one.run(name, command, pager) for name in ("a", "b")])
        )
        swaps = [swap for swap in one.status().swaps if swap.seconds > 0]
    return {
        "sharing_s": round(seconds, 2),
        "results_identical": len(digests | {job["digest"] for job in said}) == 1,
        "longest_pause_s": [job["slowest_round_s"] for job in said],
        "pause_bound_s": round(tq_s + sum(swap.seconds for swap in swaps[-2:]), 2),
        "swaps": [
            {"direction": str(s.direction), "gb_s": round(s.bytes_moved / s.seconds / 1e9, 3)}
            for s in swaps
        ],
    }


def fitting(bench: Bench) -> dict[str, Any]:
    """Two notebooks of 30 % each, ten cells each at the same time, with Kiwi and without, in
    turns. Measured from when both have set up: that is the state in which notebooks live."""
    kind = _kind_of_job(bench)
    command = _calibrated(bench, kind, int(bench.total_bytes * 0.3), bench.job_s / 4)
    command += ["--cells=10"]
    without: list[float] = []
    with_kiwi: list[float] = []
    digests: set[str] = set()
    with daemon(bench, 30.0) as one:
        for _ in range(3):
            without.append(_pair(bench, command, bench.env, digests))
            env = without_driver(one.env) if bench.emulated else one.env
            with_kiwi.append(_pair(bench, [*command, "--kiwi"], env, digests))
        swaps = len(one.status().swaps)
    ratio = statistics.median(with_kiwi) / statistics.median(without)
    return {
        "kind": kind,
        "without_s": [round(value, 3) for value in without],
        "with_kiwi_s": [round(value, 3) for value in with_kiwi],
        "ratio": round(ratio, 4),
        "target": 1.02,
        "swaps": swaps,
        "results_identical": len(digests) == 1,
    }


def _pair(bench: Bench, command: list[str], env: dict[str, str], digests: set[str]) -> float:
    pair = [spawn(command, env) for _ in range(2)]
    for _ in range(2):
        for one in pair:
            assert one.stdout is not None
            one.stdout.readline()
        time.sleep(1.0)
        for one in pair:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
    said = together(bench, pair)
    digests.update(one["digest"] for one in said)
    return float(max(one["ended_s"] for one in said) - min(one["began_s"] for one in said))
