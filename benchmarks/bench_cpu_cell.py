"""A cell without contention, on the CPU or the GPU, in a kernel with Kiwi and in one without.

Real kernels get requests as from a notebook (``execute_request``); a round trip is over when the
reply and the kernel's "idle" have come. All kernels run at the same time and are asked in turns, so
that other load on the machine affects all of them. With Kiwi, the extension is loaded as its
package installs it, connected to a real daemon on an emulated GPU, and watches each cell; without
Kiwi, the extension is not loaded at all. A second kernel without Kiwi is the control: two equal
kernels also differ, and a ratio means something only beside theirs. ``numpy`` cells matter:
notebooks that do not need the GPU mostly run such cells. GPU cells come last, in the same three
kernels; the kernels without Kiwi get the emulated driver from their environment.
"""

from __future__ import annotations

import itertools
import json
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

LIMIT = 1.03

WITHOUT = "c.InteractiveShellApp.extra_extensions = []"
"""Configuration of a user, which comes after the configuration of packages."""

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
"""Cell with a new text each time: Kiwi caches what it has read of a cell."""

START_GPU = """\
from cuda.bindings import driver as cuda
assert cuda.cuInit(0)[0] == 0
context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1]
cuda.cuCtxSetCurrent(context)
memory = cuda.cuMemAlloc(32 << 20)[1]
"""

GPU_CELL = """\
for value in range(8):
    cuda.cuMemsetD8(memory, value, 32 << 20)
cuda.cuCtxSynchronize()
"""

GPU_CELLS = {
    "GPU": GPU_CELL,
    "GPU, new text": GPU_CELL + "# {number}\n",
    "numpy beside the GPU": CELLS["numpy"],
    "ten lines beside the GPU, new text": CELLS["ten lines, new text"],
}

EMULATION = """\
import json, os
names = [n for n in os.environ if n.startswith("KIWI_EMU")] + ["LD_LIBRARY_PATH"]
print(json.dumps({n: os.environ[n] for n in names}))
"""

LOADED = "'kiwi_jupyter.kernel' in get_ipython().extension_manager.loaded"
"""Cell that is not measured and checks whether the kernel has Kiwi."""


def asking(kernel: Kernel, code: str) -> Callable[[], None]:
    numbers = itertools.count()
    return lambda: ask(kernel, code.replace("{number}", str(next(numbers))))


def ask(kernel: Kernel, code: str) -> None:
    """Make one round trip. It waits on the sockets themselves: the tests' driver polls, which is
    too coarse for a few milliseconds."""
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


def compare(name: str, code: str, kernels: dict[str, Kernel], rounds: int) -> dict[str, Any]:
    """Measure one cell in all kernels, in turns."""
    subjects = {key: asking(kernel, code) for key, kernel in kernels.items()}
    samples = in_turns(subjects, rounds, warm_up=15)
    plain_ns = samples["without Kiwi"].median_ns
    control_ratio = samples["without Kiwi, control"].median_ns / plain_ns
    print(f"cell: {name} (control / without: {control_ratio:.3f})")
    samples_table(samples)
    return {
        **{key: one.summary() for key, one in samples.items()},
        "ratio": round(samples["with Kiwi"].median_ns / plain_ns, 4),
        "control_ratio": round(control_ratio, 4),
        "ratio_of_p25": round(_p25(samples["with Kiwi"], samples["without Kiwi"]), 4),
    }


def main() -> int:
    args = arguments(__doc__)
    rounds = 30 if args.quick else 300
    where = machine("emulated")
    results: dict[str, Any] = {"machine": where, "cells": {}}
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        kiwi = stack.enter_context(running_kernel(daemon.env))
        if not has_kiwi(kiwi):
            kiwi.check("%load_ext kiwi_jupyter.kernel")
            results["loaded_by"] = "load_ext"
        kiwi.check("%%kiwi gpu\n1")  # it connects
        connected = wait_for_session(daemon, kiwi)
        emulation = json.loads(kiwi.check("%%kiwi cpu\n" + EMULATION).text)
        plain = stack.enter_context(running_kernel(emulation, config=WITHOUT))
        control = stack.enter_context(running_kernel(emulation, config=WITHOUT))
        results |= {"kiwi_loaded": has_kiwi(kiwi), "plain_loaded": has_kiwi(plain)}
        results["connected_to_daemon"] = connected
        if results["plain_loaded"] or not (results["kiwi_loaded"] and connected):
            raise SystemExit(f"nothing to compare: {results}")
        kernels = {"without Kiwi": plain, "with Kiwi": kiwi, "without Kiwi, control": control}
        for name, code in CELLS.items():
            results["cells"][name] = compare(name, code, kernels, rounds)
        for kernel in kernels.values():
            kernel.check(START_GPU)
        for name, code in GPU_CELLS.items():
            results["cells"][name] = compare(name, code, kernels, rounds)
    results["targets"] = [
        target(f"cell with Kiwi / without, {name}", one["ratio"], LIMIT)
        for name, one in results["cells"].items()
    ]
    report("cpu_cell", results, args)
    return 0


def _p25(one: Samples, other: Samples) -> float:
    """Return the ratio of first quartiles, which other load on the machine affects less than
    medians."""
    return one.percentile_ns(25) / other.percentile_ns(25)


if __name__ == "__main__":
    sys.exit(main())
