"""How long ``kiwi status`` waits for the daemon while a driver call about a program hangs.

The daemon is a real one on an emulated GPU. Each driver call that the daemon makes about a program,
and each reading of NVML, is made to hang; meanwhile the status is requested again and again over a
new connection, as ``kiwi status`` does. Just before, the same is measured while nothing hangs. The
start of the command itself (Python and its imports) is left out.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, machine, report, table, target
from daemon import Daemon, running_daemon
from patience import wait_until
from session_program import SessionProgram

import kiwi_emulator as emulator

if TYPE_CHECKING:
    import argparse

    from kiwi_emulator import Operation

LIMIT_S = 1.0
PAUSE_S = 0.02
"""Rest between two requests, without which the daemon would do nothing but answer them."""
QUICK_TURNS = ("--tq", "0.3", "--swap-floor", "0", "--lock-timeout", "0.5", "--stuck-after", "0.5")
OUT: tuple[Operation, ...] = ("lock", "checkpoint", "get_state")
IN: tuple[Operation, ...] = ("restore", "unlock")
READINGS: tuple[Operation, ...] = ("nvml_memory", "nvml_processes")


def asked(daemon: Daemon, times: int) -> Samples:
    samples = Samples()
    for _ in range(times):
        began_ns = time.perf_counter_ns()
        daemon.status()
        samples.add(time.perf_counter_ns() - began_ns)
        time.sleep(PAUSE_S)
    return samples


def measured(call: Operation, times: int) -> tuple[Samples, Samples]:
    """Return the times without and with the hanging call. ``target`` holds memory that goes out for
    ``big``, or its memory is out and comes back."""
    with ExitStack() as stack:
        env = {"KIWI_EMULATOR_DRIVER": "worst"}
        daemon = stack.enter_context(running_daemon("1x256MiB", *QUICK_TURNS, env=env))
        big = SessionProgram(daemon, 150, name="big")
        stack.callback(big.close)
        moved = SessionProgram(daemon, 120, name="target")
        stack.callback(moved.close)
        asks = big
        if call in IN:
            moved.worker.do("client.release()")
            daemon.wait_state(moved.pid, "paged-out")
            asks = moved
        calm = asked(daemon, times)
        faults = emulator.Faults(daemon.state_path)
        about = 0 if call in READINGS else moved.pid
        faults.set("hang", pid=about, operation=call, count=-1)
        asks.start_burst()
        wait_until(lambda: faults.hits("hang"), "the call hangs")
        hung = asked(daemon, times)
        faults.clear("hang")
        wait_until(asks.granted, "it goes on")
        asks.stop_burst()
        return calm, hung


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=300, help="that the status is asked for")


def main() -> int:
    args = arguments(__doc__, options)
    where = machine("emulated")
    rows, targets, found = [], [], {}
    for call in (*OUT, *IN, *READINGS):
        calm, hung = measured(call, 20 if args.quick else args.times)
        longest_s = max(hung.values_ns) / 1e9
        figures: dict[str, Any] = {
            "calm": calm.summary(), "hung": hung.summary(), "longest_s": round(longest_s, 4),
            "ratio": round(hung.median_ns / calm.median_ns, 3),
        }  # fmt: skip
        found[call] = figures
        rows.append((call, calm.median_ns / 1e6, hung.median_ns / 1e6, figures["ratio"],
                     hung.percentile_ns(99) / 1e6, 1e3 * longest_s))  # fmt: skip
        targets.append(target(f"longest wait for status, {call} hangs", longest_s, LIMIT_S, "s"))
    table(("call", "calm ms", "hung ms", "ratio", "hung p99 ms", "longest ms"), rows)
    report("hanging_calls", {"machine": where, "calls": found, "targets": targets}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
