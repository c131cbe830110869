"""The machine's limits: copies, and the cheapest driver call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.bench import machine, plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import MICROSECONDS, Limit, speed_row, time_row

if TYPE_CHECKING:
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import BenchWorker

WAYS: Final = ("out", "in")
_WARM_UP: Final = 1
"""Copies that do not count: the first one of a pair of buffers is slower."""


def measure(bench: Bench) -> None:
    with bench.worker("bus") as bus, bench.step("open", "making a context"):
        _open(bench, bus)
        size = plan.copy_bytes(bench.room, bus.ask("probe_bytes_per_s"), bench.patience)
        _copies(bench, bus, size, pinned=True)
        _copies(bench, bus, size, pinned=False)
        with bench.step("driver_call", "driver calls"):
            seconds = bus.ask("nothing", runs=500)
            title = "a driver call that does nothing, from Python"
            bench.add(time_row("driver_call", "calls", title, MICROSECONDS, seconds))


def _open(bench: Bench, bus: BenchWorker) -> None:
    opened = bus.ask("open", uuid=bench.gpu.uuid)
    if bench.emulated:
        return  # its PCI address is made up
    bench.numa = machine.numa(opened["pci_bus_id"])
    # Host memory lies near the processor of the thread that touches it first.
    bus.ask("near", cpus=bench.numa.near_cpus)
    bench.link = machine.link(opened["pci_bus_id"])


def _copies(bench: Bench, bus: BenchWorker, size: int, *, pinned: bool) -> None:
    kind, words = ("pinned", "pinned") if pinned else ("pageable", "ordinary (pageable)")
    with bench.step(kind, f"copies from and to {words} memory"):
        bus.ask("take", size_bytes=size, pinned=pinned)
        for way in WAYS:
            args = {"size_bytes": size, "seconds": bench.patience.row_s, "runs_min": _WARM_UP + 3}
            samples = bus.ask("copy", way=way, **args)
            limit = _link_limit(bench) if pinned else bench.pinned_limit(way)
            title = f"copy {way}, {words} memory"
            row = speed_row(f"{kind}_{way}", "copies", title, size, samples[_WARM_UP:], limit)
            bench.add(row)
    quietly(lambda: bus.ask("give_back"))


def _link_limit(bench: Bench) -> Limit | None:
    return Limit(bench.link.gb_per_s, "of the PCIe link") if bench.link is not None else None
