"""One daemon under load: 1,000 sessions, 200 lease cycles a second, and whether it stays small.

Each session is a process with a connection of its own (``sessions.py``), so the daemon watches
1,000 processes and 1,000 sockets. Each session asks for the GPU every five seconds at a time of its
own, holds it for a millisecond and gives it back. The daemon is a real one on an emulated GPU, with
its defaults: it does not know what these sessions need, so it gives the GPU to one at a time, and
the latency of a grant contains the wait for the sessions ahead. With ``--anti-thrash off`` every
request is granted at once, which shows the daemon's own share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from common import Samples, arguments, machine, report, table, target

from tests.support.daemon import running_daemon

if TYPE_CHECKING:
    import argparse

CYCLES_TO_FILL = 35
"""Cycles that fill a session's story of its last 64 lines, two for a cycle: until then, memory is
expected to grow. Only the growth after that counts."""

GROWTH_LIMIT = 1.05
"""Limit of resident memory at the end against that after the warm-up, to count as flat."""

GRANT_LIMIT_MS = 250.0
"""Limit of the 99th percentile of a grant, with the wait for the sessions ahead."""


def watch(process: psutil.Process, load: subprocess.Popen[str]) -> list[dict[str, float]]:
    """Return the daemon's memory, descriptors and processor time, each second until the load
    ends."""
    rows: list[dict[str, float]] = []
    began_s = time.monotonic()
    while load.poll() is None:
        with process.oneshot():
            cpu = process.cpu_times()
            rows.append(
                {
                    "at_s": round(time.monotonic() - began_s, 2),
                    "rss_bytes": process.memory_info().rss,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                    "cpu_s": cpu.user + cpu.system,
                }
            )
        try:
            load.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
    return rows


def run(mode: str, args: Any) -> dict[str, Any]:
    with running_daemon("1x256MiB", "--anti-thrash", mode) as daemon:
        process = psutil.Process(daemon.status().daemon_pid)
        empty_bytes = process.memory_info().rss
        load = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("sessions.py")),
             str(daemon.sockets()[0]), str(args.sessions), str(args.rate), str(args.seconds), "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert load.stdin is not None
        assert load.stdout is not None
        joined = json.loads(load.stdout.readline())["joined"]
        load.stdin.write("go\n")
        load.stdin.flush()
        with ThreadPoolExecutor(1) as reader:  # the output is more than a pipe holds
            said = reader.submit(load.stdout.read)
            rows = watch(process, load)
            outcome = json.loads(said.result())
        still_there = process.is_running() and daemon.status().daemon_pid == process.pid
    return evaluate(mode, args, rows, outcome) | {
        "joined": joined,
        "failed": outcome["failed"],
        "daemon_survived": still_there,
        "rss_empty_mib": round(empty_bytes / 2**20, 1),
    }


def evaluate(
    mode: str, args: Any, rows: list[dict[str, float]], outcome: dict[str, Any]
) -> dict[str, Any]:
    grants = Samples([1e9 * value for value in outcome["grants_s"]])
    full_s = min(CYCLES_TO_FILL * args.sessions / args.rate, args.seconds * 0.75)
    warm = [row for row in rows if full_s <= row["at_s"] <= args.seconds] or rows
    first, last = warm[0], warm[-1]
    busy_s = last["cpu_s"] - first["cpu_s"]
    lasted_s = last["at_s"] - first["at_s"] or 1.0
    return {
        "anti_thrash": mode,
        "sessions": args.sessions,
        "cycles": len(grants.values_ns),
        "cycles_per_s": round(len(grants.values_ns) / args.seconds, 1),
        "grant_p50_ms": round(grants.percentile_ns(50) / 1e6, 3),
        "grant_p99_ms": round(grants.percentile_ns(99) / 1e6, 3),
        "rss_start_mib": round(rows[0]["rss_bytes"] / 2**20, 1),
        "rss_warm_mib": round(first["rss_bytes"] / 2**20, 1),
        "rss_end_mib": round(last["rss_bytes"] / 2**20, 1),
        "rss_growth": round(last["rss_bytes"] / first["rss_bytes"], 4),
        "fds": [int(first["fds"]), int(last["fds"])],
        "threads": [int(first["threads"]), int(last["threads"])],
        "daemon_cpu_share": round(busy_s / lasted_s, 3),
        "rss_by_second_mib": [round(row["rss_bytes"] / 2**20, 1) for row in rows],
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0, help="lease cycles per second")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        help="with anti-thrash on; with off, a quarter of it",
    )
    parser.add_argument("--mode", choices=("on", "off"), action="append")


def main() -> int:
    args = arguments(__doc__, options)
    if args.quick:
        args.sessions, args.rate, args.seconds = 50, 20.0, 5.0
    where = machine("emulated")
    runs = []
    for mode in args.mode or ("on", "off"):
        if mode == "off":
            args.seconds /= 4
        runs.append(run(mode, args))
    shown = [key for key in runs[0] if key not in ("rss_by_second_mib", "anti_thrash")]
    table(("anti-thrash", *(str(one["anti_thrash"]) for one in runs)),
          [(key, *(str(one[key]) for one in runs)) for key in shown])  # fmt: skip
    targets = []
    for one in runs:
        mode = f"(anti-thrash {one['anti_thrash']})"
        short = args.rate / max(0.1, one["cycles_per_s"])
        # One tenth is allowed: the arrival times are random, and the last period is cut off.
        targets += [
            target(f"cycles asked for / done {mode}", short, 1.1),
            target(f"sessions that failed {mode}", one["failed"], 0, "sessions"),
        ]
        if one["anti_thrash"] == "on":  # the other run is too short for the memory
            targets += [
                target("99th percentile of a grant", one["grant_p99_ms"], GRANT_LIMIT_MS, "ms"),
                target("memory at the end / after warm-up", one["rss_growth"], GROWTH_LIMIT),
            ]
    report("daemon_load", {"machine": where, "runs": runs, "targets": targets}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
