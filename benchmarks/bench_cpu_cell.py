"""A cell that does not use the GPU, in a kernel with Kiwi and in one without.

Real kernels, asked as a notebook asks (``execute_request``); a round trip is over when the reply
and the kernel's "idle" have come. All live at once and are asked in turns, so that whatever the
machine does hits all of them. With Kiwi means: the extension is loaded as its package installs it,
connected to a real daemon on an emulated GPU, and watching each cell; without means that the
extension is not loaded at all. A third kernel, a second one without Kiwi, is the control: two
equal kernels differ, too, and a ratio means something only beside theirs. ``numpy`` cells count:
they are what notebooks that do not need the GPU mostly run.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, in_turns, machine, report, samples_table, target

from tests.support.daemon import running_daemon
from tests.support.kernels import running_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.kernels import Kernel

LIMIT = 1.05

WITHOUT = "c.InteractiveShellApp.extra_extensions = []"
"""A user's own configuration comes after what packages install."""

CELLS = {
    "x = 1": "x = 1",
    "ten lines": """\
import math
rows = []
for number in range(50):
    value = math.sqrt(number)
    if value > 3:
        rows.append((number, round(value, 2)))
def total(pairs):
    return sum(second for _, second in pairs)
print(total(rows))
rows[-1]
""",
    "numpy": """\
import numpy as np
a = np.arange(10_000).reshape(100, 100)
print((a @ a.T).trace(), a.mean())
""",
}

CELLS["ten lines, new text"] = CELLS["ten lines"] + "# {number}\n"
"""Kiwi keeps what it has read of a cell; here each text is new to it."""

LOADED = "'kiwi_jupyter.kernel' in get_ipython().extension_manager.loaded"
"""Not a cell that is measured: does this kernel have Kiwi?"""


def asking(kernel: Kernel, code: str) -> Callable[[], None]:
    numbers = itertools.count()
    return lambda: ask(kernel, code.replace("{number}", str(next(numbers))))


def ask(kernel: Kernel, code: str) -> None:
    """One round trip. Waits on the sockets themselves: the tests' driver polls, which is too coarse
    for a few milliseconds."""
    client = kernel.client
    wanted = client.execute(code, allow_stdin=False)
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == wanted:
            break
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"the cell failed: {reply['content']}")
    while True:
        message = client.get_iopub_msg(timeout=60)
        if (
            message["parent_header"].get("msg_id") == wanted
            and message["msg_type"] == "status"
            and message["content"]["execution_state"] == "idle"
        ):
            return


def has_kiwi(kernel: Kernel) -> bool:
    return kernel.check(LOADED).result == "True"


def wait_for_session(daemon: Any, kernel: Kernel) -> bool:
    ends_s = time.monotonic() + 15
    while time.monotonic() < ends_s:
        if daemon.session(kernel.pid) is not None:
            return True
        time.sleep(0.1)
    return False


def main() -> int:
    args = arguments(__doc__)
    rounds = 30 if args.quick else 300
    where = machine("emulated")
    results: dict[str, Any] = {"machine": where, "cells": {}}
    targets = []
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        kiwi = stack.enter_context(running_kernel(daemon.env))
        plain = stack.enter_context(running_kernel(config=WITHOUT))
        control = stack.enter_context(running_kernel(config=WITHOUT))
        if not has_kiwi(kiwi):
            kiwi.check("%load_ext kiwi_jupyter.kernel")
            results["loaded_by"] = "load_ext"
        kiwi.check("import os, sys")
        connected = wait_for_session(daemon, kiwi)
        results |= {"kiwi_loaded": has_kiwi(kiwi), "plain_loaded": has_kiwi(plain)}
        results["connected_to_daemon"] = connected
        if results["plain_loaded"] or not (results["kiwi_loaded"] and connected):
            raise SystemExit(f"nothing to compare: {results}")
        for name, code in CELLS.items():
            subjects = {
                "without Kiwi": asking(plain, code),
                "with Kiwi": asking(kiwi, code),
                "without Kiwi, control": asking(control, code),
            }
            samples = in_turns(subjects, rounds, warm_up=15)
            plain_ns = samples["without Kiwi"].median_ns
            ratio = samples["with Kiwi"].median_ns / plain_ns
            control_ratio = samples["without Kiwi, control"].median_ns / plain_ns
            print(f"cell: {name} (control / without: {control_ratio:.3f})")
            samples_table(samples)
            results["cells"][name] = {
                **{key: one.summary() for key, one in samples.items()},
                "ratio": round(ratio, 4),
                "control_ratio": round(control_ratio, 4),
                "ratio_of_p25": round(_p25(samples["with Kiwi"], samples["without Kiwi"]), 4),
            }
            targets.append(target(f"cell with Kiwi / without, {name}", ratio, LIMIT))
    results["targets"] = targets
    report("cpu_cell", results, args)
    return 0


def _p25(one: Samples, other: Samples) -> float:
    """Less shaken by whatever else runs on the machine than the medians are."""
    return one.percentile_ns(25) / other.percentile_ns(25)


if __name__ == "__main__":
    sys.exit(main())
