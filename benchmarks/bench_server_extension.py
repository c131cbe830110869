"""The cost of the server extension for the Jupyter server: 50 sessions, 10 readers of the stream.

A real Jupyter server runs beside a real daemon on an emulated GPU. 50 session programs (processes
with a connection each, ``sessions.py``) together take the GPU at a few rates; ten WebSockets in
another process read the stream as browsers do. The processor time of the server's process in such a
stretch is compared with stretches before and after without readers, of the same server under the
same load; the difference is the cost of the readers. Processor time is used, so that other load on
the machine matters only as far as it cools the caches. The results also have the daemon's share.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from common import arguments, machine, report, table, target
from lab import TOKEN
from lab_load import crowd, running_stage

if TYPE_CHECKING:
    import argparse

    from sharing_stage import Stage

READER = Path(__file__).with_name("stream_readers.py")

SESSIONS, READERS = 50, 10

LIMIT_PERCENT = 1.0
"""Target share of one core, at ``TYPICAL`` bursts a second."""

TYPICAL = 3.0
RATES = (0.0, TYPICAL, 10.0)
"""Bursts per second of all sessions together. 50 notebooks whose users run a cell every few
minutes begin 0.2 to 0.5 a second."""

FORGOTTEN_S = 34.0
"""Time after which the server has closed its connection to the daemon: after 30 s without
readers."""


class Readers:
    """The readers of ten browsers, in a process of their own."""

    def __init__(self, stage: Stage) -> None:
        command = [sys.executable, str(READER), stage.lab.url, TOKEN]
        self._process = subprocess.Popen(
            [*command, str(READERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.snapshot_bytes = int(self._hear()["snapshot_bytes"])

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def _say(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    begin = _say

    def end(self) -> dict[str, Any]:
        self._say()
        found = self._hear()
        self._process.communicate()
        assert not found["ended"], "a stream ended in the middle"
        return found


def busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def stretch(stage: Stage, seconds: float) -> dict[str, float]:
    """Return the share of a core, in percent, that server and daemon take."""
    assert stage.lab.process is not None
    server = psutil.Process(stage.lab.process.pid)
    daemon = psutil.Process(stage.daemon.status().daemon_pid)
    before, began_s = (busy_s(server), busy_s(daemon)), time.monotonic()
    time.sleep(seconds)
    lasted_s = time.monotonic() - began_s
    return {
        "server": 100 * (busy_s(server) - before[0]) / lasted_s,
        "daemon": 100 * (busy_s(daemon) - before[1]) / lasted_s,
    }


def watched(stage: Stage, seconds: float) -> dict[str, Any]:
    readers = Readers(stage)
    time.sleep(2)  # the snapshots have been sent
    readers.begin()
    shares = stretch(stage, seconds)
    upstream = stage.connections()
    heard = readers.end()["readers"]
    return {
        **shares,
        "upstream": upstream,
        "snapshot_bytes": readers.snapshot_bytes,
        "messages_per_s": statistics.mean(one["messages"] for one in heard) / seconds,
        "bytes_per_s": statistics.mean(one["bytes"] for one in heard) / seconds,
    }


def run(stage: Stage, rate: float, args: Any) -> dict[str, Any]:
    forgotten_s = 1.0 if args.quick else FORGOTTEN_S
    rounds_s = args.rounds * (2 * args.seconds + forgotten_s + 10) + args.seconds + 60
    nobody, somebody = [], []
    with crowd(stage, SESSIONS, rate, rounds_s):
        time.sleep(2)
        nobody.append(stretch(stage, args.seconds))
        for _ in range(args.rounds):
            somebody.append(watched(stage, args.seconds))
            time.sleep(forgotten_s)
            nobody.append(stretch(stage, args.seconds))
    found = {"bursts_per_s": rate, "nobody": nobody, "somebody": somebody}
    for who in ("server", "daemon"):
        idle = statistics.median(one[who] for one in nobody)
        found[f"{who}_nobody_percent"] = round(idle, 3)
        found[f"{who}_cost_percent"] = round(
            statistics.median(one[who] for one in somebody) - idle, 3
        )
    for name in ("messages_per_s", "bytes_per_s", "snapshot_bytes", "upstream"):
        found[name] = round(statistics.median(one[name] for one in somebody), 1)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=float, default=0.1, help="stream_interval_s")
    parser.add_argument("--rate", type=float, action="append", help="bursts/s; several times")


def main() -> int:
    args = arguments(__doc__, options)
    if args.quick:
        args.seconds, args.rounds = 3.0, 1
    where = machine("emulated")
    option = f"--KiwiServerApp.stream_interval_s={args.interval}"
    with running_stage("1x256MiB", lab_options=[option]) as stage:
        runs = [run(stage, rate, args) for rate in args.rate or RATES]
    shown = [name for name in runs[0] if name not in ("nobody", "somebody", "bursts_per_s")]
    table(("bursts/s", *(f"{one['bursts_per_s']:g}" for one in runs)),
          [(name, *(one[name] for one in runs)) for name in shown])  # fmt: skip
    targets = []
    for one in runs:
        if one["bursts_per_s"] <= TYPICAL:
            what = f"server: 10 readers, 50 sessions, {one['bursts_per_s']:g} bursts/s"
            targets.append(target(what, one["server_cost_percent"], LIMIT_PERCENT, "% of a core"))
        targets.append(target("connections to the daemon", one["upstream"], 1, ""))
    results = {"machine": where, "stream_interval_s": args.interval}
    report("server_extension", results | {"targets": targets, "runs": runs}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
