"""How long a daemon with 1,000 sessions takes to end, and how much of a processor.

Each session is a process with a connection of its own (``sessions.py``) and no GPU memory. The
daemon asks the driver about each of them before it ends, since a remembered flag is no evidence.
The yardstick is the end of a daemon without sessions, in the same run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from common import arguments, machine, report, table, target

from tests.support.daemon import running_daemon

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tests.support.daemon import Daemon

LIMIT_S = 1.0
SETTLE_S = 6.0
"""Time for the readings that follow the joining: a round of all sessions takes five seconds."""


def main() -> int:
    args = arguments(__doc__, options)
    if args.quick:
        args.sessions, args.rounds = 50, 1
    where = machine("emulated")
    rows = [one for _ in range(args.rounds) for one in (ended(0), ended(args.sessions))]
    table(("sessions", "s until it has ended", "its processor time, s"),
          [(str(row["sessions"]), row["wall_s"], row["cpu_s"]) for row in rows])  # fmt: skip
    best = min(row["wall_s"] for row in rows if row["sessions"])
    targets = [target(f"end with {args.sessions} sessions, best round", best, LIMIT_S, "s")]
    report("shutdown", {"machine": where, "rounds": rows, "targets": targets}, args)
    return 0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)


def ended(sessions: int) -> dict[str, Any]:
    """Start a daemon with ``sessions``, end it, and return how long that took."""
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon("1x256MiB"))
        process = psutil.Process(daemon.status().daemon_pid)
        if sessions:
            stack.enter_context(joined(daemon, sessions))
            time.sleep(SETTLE_S)
        assert daemon.process is not None
        before_s, began_s = processor_s(process), time.monotonic()
        daemon.process.terminate()
        used_s = before_s
        with suppress(psutil.NoSuchProcess):
            while daemon.process.poll() is None:
                used_s = processor_s(process)
                time.sleep(0.005)
        daemon.process.wait()
        wall_s = time.monotonic() - began_s
    return {"sessions": sessions, "wall_s": round(wall_s, 3), "cpu_s": round(used_s - before_s, 2)}


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def joined(daemon: Daemon, sessions: int) -> Iterator[None]:
    """Have ``sessions`` join the daemon. Their processes end when the daemon has ended."""
    load = subprocess.Popen(
        [sys.executable, "-S", str(Path(__file__).with_name("sessions.py")),
         str(daemon.sockets()[0]), str(sessions), "1", "1", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert load.stdout is not None
    assert json.loads(load.stdout.readline())["joined"] == sessions
    try:
        yield
    finally:
        load.communicate("go\n")


if __name__ == "__main__":
    sys.exit(main())
