"""The machine's limits: copies, pinning, and driver calls that map memory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.bench import machine, plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import MICROSECONDS, Limit, speed_row, time_row
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import Worker

WAYS: Final = ("out", "in")
_WARM_UP: Final = 1
"""Copies that do not count: the first one of a pair of buffers is slower."""

_PIN_RUNS: Final = 3
_THREADS_MAX: Final = 8
_VMM_RUNS_MAX: Final = 200
_BOTH: Final = "both ways at once"


def measure(bench: Bench) -> None:
    with bench.worker("bus") as bus, bench.step("open", "making a context"):
        _open(bench, bus)
        speed = bus.ask("probe_bytes_per_s")
        size = plan.copy_bytes(bench.room, speed, bench.patience)
        _pinned(bench, bus, size)
        _pageable(bench, bus, size)
        _pinning(bench, bus)
        _vmm(bench, bus)


def _open(bench: Bench, bus: Worker) -> None:
    opened = bus.ask("open", uuid=bench.gpu.uuid)
    if bench.emulated:
        return  # its PCI address is made up
    bench.numa = machine.numa(opened["pci_bus_id"])
    # Host memory lies near the processor of the thread that touches it first.
    bus.ask("near", cpus=bench.numa.near_cpus)
    bench.link = machine.link(opened["pci_bus_id"])


def _pinned(bench: Bench, bus: Worker, size: int) -> None:
    bus.ask("take", ways=WAYS, size_bytes=size, pinned=True)
    for way in WAYS:
        with bench.step(f"pinned_{way}", f"copy {way}, pinned"):
            seconds = _copy(bench, bus, way, size)
            limit = _link_limit(bench)
            title = f"copy {way}, pinned memory"
            bench.add(speed_row(f"pinned_{way}", "copies", title, size, seconds, limit))
    with bench.step("pinned_both", f"copies {_BOTH}"):
        found = bus.ask("copy_both", size_bytes=size, seconds=bench.patience.row_s)
        _both_rows(bench, "pinned_both", "in one process", size, found)
    with bench.step("pinned_two", f"copies {_BOTH}, two processes", needs_s=8.0):
        _two_processes(bench, bus, size)
    quietly(lambda: bus.ask("give_back"))


def _copy(bench: Bench, bus: Worker, way: str, size: int) -> list[float]:
    samples: list[float] = bus.ask(
        "copy", way=way, size_bytes=size, seconds=bench.patience.row_s, runs_min=_WARM_UP + 3
    )
    return samples[_WARM_UP:]


def _link_limit(bench: Bench) -> Limit | None:
    return Limit(bench.link.gb_per_s, "of the PCIe link") if bench.link is not None else None


def _against(bench: Bench, name: str, words: str) -> Limit | None:
    value = bench.value(name)
    return Limit(value, words) if value else None


def _two_processes(bench: Bench, first: Worker, size: int) -> None:
    with bench.worker("bus") as second:
        second.ask("open", uuid=bench.gpu.uuid)
        if bench.numa is not None:
            second.ask("near", cpus=bench.numa.near_cpus)
        second.ask("take", ways=["in"], size_bytes=size, pinned=True)
        # One clock for both: each gets the order before the start.
        args = {
            "size_bytes": size,
            "seconds": bench.patience.row_s,
            "start_ns": time.monotonic_ns() + 100_000_000,
        }
        first.tell("copy", way="out", **args)
        second.tell("copy", way="in", **args)
        found = {"out": first.answer(30.0), "in": second.answer(30.0)}
        _both_rows(bench, "pinned_two", "in two processes", size, found)


def _both_rows(
    bench: Bench, name: str, where: str, size: int, found: dict[str, list[float]]
) -> None:
    for way in WAYS:
        limit = _against(bench, f"pinned_{way}", f"of the copy {way} alone")
        title = f"copy {way} while the other way runs, {where}"
        seconds = found[way][_WARM_UP:] or found[way]
        bench.add(speed_row(f"{name}_{way}", "copies", title, size, seconds, limit))


def _pageable(bench: Bench, bus: Worker, size: int) -> None:
    with bench.step("pageable", "copies from and to ordinary memory"):
        bus.ask("take", ways=WAYS, size_bytes=size, pinned=False)
        for way in WAYS:
            seconds = _copy(bench, bus, way, size)
            limit = _against(bench, f"pinned_{way}", f"of the pinned copy {way}")
            title = f"copy {way}, ordinary (pageable) memory"
            bench.add(speed_row(f"pageable_{way}", "copies", title, size, seconds, limit))
    quietly(lambda: bus.ask("give_back"))


def _pinning(bench: Bench, bus: Worker) -> None:
    first = plan.first_pinned_bytes(bench.room)
    (took_s,) = bus.ask("pin_register", size_bytes=first, threads=1, runs=1)
    size = plan.pin_bytes(bench.room, first / took_s, bench.patience)
    limit = _against(bench, "pinned_out", "of the pinned copy out")
    with bench.step("pin_allocate", "pinning: the driver allocates", needs_s=5.0):
        seconds = bus.ask("pin_allocate", size_bytes=size, runs=_PIN_RUNS)
        title = "pin memory: cuMemHostAlloc"
        bench.add(speed_row("pin_allocate", "pinning", title, size, seconds, limit))
    several = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    for threads in dict.fromkeys((1, several)):
        words = "1 thread" if threads == 1 else f"{threads} threads"
        with bench.step(f"pin_register_{threads}", f"pinning: {words}", needs_s=5.0):
            seconds = bus.ask("pin_register", size_bytes=size, threads=threads, runs=_PIN_RUNS)
            name = "pin_register" if threads == 1 else "pin_register_threads"
            title = f"pin memory: mmap, touch and register, {words}"
            bench.add(speed_row(name, "pinning", title, size, seconds, limit))


def _vmm(bench: Bench, bus: Worker) -> None:
    with bench.step("driver_call", "driver calls"):
        seconds = bus.ask("nothing", runs=500)
        title = "a driver call that does nothing, from Python"
        bench.add(time_row("driver_call", "calls", title, MICROSECONDS, seconds))
    for size in plan.vmm_sizes(bench.room):
        label = format_bytes(size).replace(" ", "")
        with bench.step(f"vmm_{label}", f"mapping {label}", needs_s=4.0):
            found = bus.ask(
                "vmm", size_bytes=size, seconds=bench.patience.row_s / 2, runs_max=_VMM_RUNS_MAX
            )
            _vmm_rows(bench, label, size, found)


def _vmm_rows(bench: Bench, label: str, size: int, found: dict[str, list[float]]) -> None:
    words = {"create": "create", "map": "map", "set_access": "set access to"}
    for call, seconds in found.items():
        title = f"{words.get(call, call)} {label}"
        name = f"vmm_{call}_{label}"
        bench.add(time_row(name, "calls", title, MICROSECONDS, seconds, size_bytes=size))
    both_s = [sum(calls) for calls in zip(*found.values(), strict=True)]
    speed = bench.value("pinned_in")
    limit = Limit(size / 1e9 / speed * 1e6, "the pinned copy of as much") if speed else None
    name, title = f"vmm_all_{label}", f"all five, {label}"
    bench.add(time_row(name, "calls", title, MICROSECONDS, both_s, limit, size))
