"""A process that has imported its libraries, and measures in children: what gate.py runs.

    zygote.py torch|driver      forks a child for each line {"what": …, "rounds": N} that comes in

The import of PyTorch takes longer than all else, so it is done once. The driver is started in the
child, so each measurement has a context of its own, and under Kiwi's library each child is a
program of its own. The child prints a JSON line. Kinds of measurement:

    loop    a step whose GPU waits for launches, N times
    large   PyTorch's kernels over much memory, N times: the GPU's side
    calls   PyTorch's calls, one kind at a time
    added   the same step after each thing that owning memory adds to a process, without Kiwi
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from job import DriverWork, call_times, check, say, training_step

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]

WARM_SHARE = 6
"""One of so many steps runs before the time is taken."""
LARGE_ELEMENTS, GATHERED, SIDE = 1 << 29, 1 << 24, 8192
"""Sizes of the large kernels: 2 GiB of floats, and a matrix of this side."""
REGISTERED_BYTES, EMULATED_REGISTERED_BYTES = 1 << 30, 1 << 23
WAKES_S = 0.25


class Torch:
    """A training step so small that the GPU waits for launches: the worst case for a gate."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.step = training_step(width=64, rows=256)

    def books(self) -> dict[str, int]:
        """Return what PyTorch's allocator took from the driver so far."""
        said = self.torch.cuda.memory_stats()
        return {f"device_{kind}s": said.get(f"num_device_{kind}", 0) for kind in ("alloc", "free")}


class Driver:
    """The same with driver calls, for a machine without PyTorch."""

    def __init__(self) -> None:
        self._job = DriverWork(1 << 22)

    def step(self) -> None:
        for _ in range(100):
            check(self._job.cu.cuMemsetD8Async(self._job.scratch, 1, 64, 0))
        check(self._job.cu.cuMemcpyDtoH(bytearray(16), self._job.scratch, 16))

    def books(self) -> dict[str, int]:
        return {}


KINDS: dict[str, tuple[type[Torch] | type[Driver], tuple[str, ...]]] = {
    "torch": (Torch, ("torch", "cuda.bindings.driver")),
    "driver": (Driver, ("cuda.bindings.driver",)),
}
"""The program of each kind, and what it imports."""


def timed(program: Torch | Driver, rounds: int) -> dict[str, float]:
    """Return what a step takes, by the clock and by what the kernel counts of this thread."""
    before, books = resource.getrusage(resource.RUSAGE_THREAD), program.books()
    took_s = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        program.step()
        took_s.append(time.perf_counter() - began_s)
    after = resource.getrusage(resource.RUSAGE_THREAD)

    def a_step(*names: str) -> float:
        return sum(getattr(after, name) - getattr(before, name) for name in names) / rounds

    return {
        "median_us": statistics.median(took_s) * 1e6,
        "p10_us": sorted(took_s)[rounds // 10] * 1e6,
        "user_us": a_step("ru_utime") * 1e6,
        "system_us": a_step("ru_stime") * 1e6,
        "switches": a_step("ru_nvcsw", "ru_nivcsw"),
        "faults": a_step("ru_minflt"),
    } | {name: float(count - books[name]) for name, count in program.books().items()}


def loop(program: Torch | Driver, rounds: int) -> dict[str, Any]:
    for _ in range(rounds // WARM_SHARE):
        program.step()
    said = timed(program, rounds)
    return said | {"owned_bytes": owned_bytes()}


def owned_bytes() -> int:
    """Return the memory that Kiwi's library owns in this process: 0 without it, or as a gate."""
    try:
        ask = ctypes.CDLL(None).kiwi_preload_pinned
    except AttributeError:
        return 0
    pinned, pageable, owned = (ctypes.c_uint64() for _ in range(3))
    ask(*map(ctypes.byref, (pinned, pageable, owned)))
    return owned.value


def added(program: Torch | Driver, rounds: int) -> dict[str, Any]:
    """Add what owning adds to a process, one thing after the other, and take the time after
    each."""
    from cuda.bindings import driver as cu

    for _ in range(rounds // WARM_SHARE):
        program.step()
    found = {"as it is": timed(program, rounds)["median_us"]}
    stream = check(cu.cuStreamCreate(1))  # non-blocking, as the pager's
    host, there = check(cu.cuMemHostAlloc(4096, 0)), check(cu.cuMemAlloc(4096))
    check(cu.cuMemcpyHtoDAsync(there, host, 4096, stream))
    check(cu.cuMemcpyDtoHAsync(host, there, 4096, stream))
    check(cu.cuStreamSynchronize(stream))
    found["a second stream, used once"] = timed(program, rounds)["median_us"]
    registering = Registering(isinstance(program, Driver))
    found["while memory is registered again and again"] = timed(program, rounds)["median_us"]
    registering.end()
    found["with registered memory"] = timed(program, rounds)["median_us"]
    over = threading.Event()
    waking = threading.Thread(target=lambda: [None for _ in iter(lambda: over.wait(WAKES_S), True)])
    waking.start()
    found["with a thread that wakes 4 times a second"] = timed(program, rounds)["median_us"]
    over.set()
    waking.join()
    check(cu.cuStreamDestroy(stream))
    found["without the second stream again"] = timed(program, rounds)["median_us"]
    return found


class Registering:
    """Registers host memory and takes it back, over and over, in a thread of its own; at the end
    the memory stays registered."""

    def __init__(self, small: bool) -> None:
        from cuda.bindings import driver as cu

        self._cu = cu
        self._bytes = EMULATED_REGISTERED_BYTES if small else REGISTERED_BYTES
        self._room = mmap.mmap(-1, self._bytes)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        ctypes.memset(self._at, 1, self._bytes)
        self._context = check(cu.cuCtxGetCurrent())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        check(self._cu.cuCtxSetCurrent(self._context))
        while not self._over.is_set():
            check(self._cu.cuMemHostRegister(self._at, self._bytes, 1))
            check(self._cu.cuMemHostUnregister(self._at))
        check(self._cu.cuMemHostRegister(self._at, self._bytes, 1))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def large(_program: Torch | Driver, rounds: int) -> dict[str, float]:
    """Return the milliseconds of each kernel."""
    import torch

    a = torch.ones(LARGE_ELEMENTS, device="cuda")
    b = torch.empty_like(a)
    m = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16)
    places = torch.randint(0, LARGE_ELEMENTS, (GATHERED,), device="cuda")
    kernels: dict[str, Step] = {
        "add over 2 GiB": lambda: torch.add(a, a, out=b),
        "random reads over 2 GiB": lambda: a[places],
        "matrix product": lambda: m @ m,
    }
    found = {}
    for name, kernel in kernels.items():
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        kernel()
        began.record()
        for _ in range(rounds):
            kernel()
        ended.record()
        torch.cuda.synchronize()
        found[name] = began.elapsed_time(ended) / rounds
    return found


def calls(_program: Torch | Driver, rounds: int) -> dict[str, float]:
    return call_times(rounds)


MEASUREMENTS = {"loop": loop, "large": large, "calls": calls, "added": added}


def measure(kind: str, order: dict[str, Any]) -> None:
    """Measure in this process, a child, and end it: nothing of the zygote's ends with it."""
    status = 1
    try:
        say(**MEASUREMENTS[order["what"]](KINDS[kind][0](), order["rounds"]))
        status = 0
    except BaseException as error:  # noqa: BLE001 - it is the answer
        say(failed=f"{type(error).__name__}: {error}"[:300])
    finally:
        os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    for module in KINDS[kind][1]:
        __import__(module)
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            measure(kind, order)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, 1):  # it died without an answer
            say(failed=f"the child ended with status {status}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
