"""Run All beside a training: how long five short GPU cells of one notebook wait, at TQ 30 s.

Real kernels and a real daemon on an emulated GPU. The memory of the two notebooks does not fit
together, and the training computes all the time. The five cells are sent at once, as Run All does.
What counts is the time that their session waits, as the daemon counts it: under the default policy,
and under ``round-robin`` as the baseline of the same run.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from common import arguments, machine, report, table, target
from daemon import running_daemon
from kernels import running_kernel
from notebooks import Notebook

if TYPE_CHECKING:
    from daemon import Daemon

LIMIT_S = 12.0
CELLS = 5
MIB = 76
"""Of 128: two do not fit."""


def notebook(stack: ExitStack, daemon: Daemon, name: str) -> Notebook:
    env = daemon.env | {"JPY_SESSION_NAME": f"/home/somebody/{name}.ipynb"}
    made = Notebook(stack.enter_context(running_kernel(env)), daemon, name)
    made.take(MIB, seed=sum(name.encode()))
    return made


def measured(policy: str, tq_s: float) -> dict[str, Any]:
    with ExitStack() as stack:
        daemon = stack.enter_context(
            running_daemon("1x128MiB", f"--policy={policy}", f"--tq={tq_s}")
        )
        short, training = notebook(stack, daemon, "short"), notebook(stack, daemon, "training")
        enough = daemon.directory / "enough"
        loop = training.work(until=enough)
        training.wait_state("running")
        before_s, began_s = short.session.waited_s, time.monotonic()
        cells = [short.start("memory.step()") for _ in range(CELLS)]
        for cell in cells:
            short.finish(cell, 20 * tq_s)
        found = {
            "waited_s": round(short.session.waited_s - before_s, 2),
            "wall_s": round(time.monotonic() - began_s, 2),
            "suspensions_of_the_training": training.session.suspensions,
        }
        enough.touch()
        training.finish(loop, 20 * tq_s)
    return found


def main() -> int:
    args = arguments(__doc__)
    where, tq_s = machine("emulated"), 3.0 if args.quick else 30.0
    found = {policy: measured(policy, tq_s) for policy in ("interactive", "round-robin")}
    rows = [(policy, one["waited_s"], one["wall_s"], one["suspensions_of_the_training"])
            for policy, one in found.items()]  # fmt: skip
    table(("policy", "waited s", "all in all s", "suspensions"), rows)
    ratio = found["interactive"]["waited_s"] / max(0.01, found["round-robin"]["waited_s"])
    print(f"waited under interactive / round-robin: {ratio:.2f}")
    waited_s = found["interactive"]["waited_s"]
    targets = [target("five cells beside a training wait", waited_s, LIMIT_S * tq_s / 30, "s")]
    results = {"machine": where, "tq_s": tq_s, "policies": found, "ratio": round(ratio, 3)}
    report("run_all", results | {"targets": targets}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
