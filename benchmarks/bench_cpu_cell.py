"""A cell without contention, on the CPU or the GPU, in a kernel with Kiwi and in one without.

Real kernels get requests as from a notebook (``execute_request``); a round trip is over when the
reply and the kernel's "idle" have come. All kernels run at the same time and are asked in turns, so
that other load on the machine affects all of them. With Kiwi, the extension is loaded as its
package installs it, connected to a real daemon on an emulated GPU, and watches each cell; without
Kiwi, the extension is not loaded at all. A second kernel without Kiwi is the control: two equal
kernels also differ, by up to 5 % for as long as they live, so four sets of kernels are measured and
pooled; a ratio means something only beside the control's. ``numpy`` cells matter: notebooks that do
not need the GPU mostly run such cells. GPU cells come last, in the same kernels; those without Kiwi
get the emulated driver from their environment.
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
    from collections.abc import Callable, Iterable

    from tests.support.kernels import Kernel

LIMIT = 1.03

SETS = 4
ROUNDS = 100
"""Sets of three kernels, one after the other, and the round trips of each cell in each kernel."""

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


def measure(rounds: int, found: dict[str, Any]) -> dict[str, dict[str, Samples]]:
    """Measure each cell in three kernels that start now, in turns. Return the samples by cell and
    kernel, and add to ``found`` what the kernels have loaded."""
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        kiwi = stack.enter_context(running_kernel(daemon.env))
        if not has_kiwi(kiwi):
            kiwi.check("%load_ext kiwi_jupyter.kernel")
            found["loaded_by"] = "load_ext"
        kiwi.check("%%kiwi gpu\n1")  # it connects
        connected = wait_for_session(daemon, kiwi)
        emulation = json.loads(kiwi.check("%%kiwi cpu\n" + EMULATION).text)
        plain = stack.enter_context(running_kernel(emulation, config=WITHOUT))
        control = stack.enter_context(running_kernel(emulation, config=WITHOUT))
        found |= {"kiwi_loaded": has_kiwi(kiwi), "plain_loaded": has_kiwi(plain)}
        found["connected_to_daemon"] = connected
        if found["plain_loaded"] or not (found["kiwi_loaded"] and connected):
            raise SystemExit(f"nothing to compare: {found}")
        kernels = {"without Kiwi": plain, "with Kiwi": kiwi, "without Kiwi, control": control}
        samples = in_each(CELLS, kernels, rounds)
        for kernel in kernels.values():
            kernel.check(START_GPU)
        return samples | in_each(GPU_CELLS, kernels, rounds)


def in_each(
    cells: dict[str, str], kernels: dict[str, Kernel], rounds: int
) -> dict[str, dict[str, Samples]]:
    return {
        name: in_turns({key: asking(one, code) for key, one in kernels.items()}, rounds, warm_up=15)
        for name, code in cells.items()
    }


def summary(name: str, samples: dict[str, Samples]) -> dict[str, Any]:
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
    results: dict[str, Any] = {"machine": machine("emulated"), "sets_of_kernels": SETS}
    sets = [measure(10 if args.quick else ROUNDS, results) for _ in range(SETS)]
    results["cells"] = {
        name: summary(name, {key: pooled(one[name][key] for one in sets) for key in sets[0][name]})
        for name in sets[0]
    }
    results["targets"] = [
        target(f"cell with Kiwi / without, {name}", one["ratio"], LIMIT)
        for name, one in results["cells"].items()
    ]
    report("cpu_cell", results, args)
    return 0


def pooled(several: Iterable[Samples]) -> Samples:
    return Samples([value_ns for one in several for value_ns in one.values_ns])


def _p25(one: Samples, other: Samples) -> float:
    """Return the ratio of first quartiles, which other load on the machine affects less than
    medians."""
    return one.percentile_ns(25) / other.percentile_ns(25)


if __name__ == "__main__":
    sys.exit(main())
