"""What this machine is, from ``/proc`` and ``/sys``: CPU, RAM, NUMA nodes, the GPU's PCIe link.

No host name, no user, no path: a report can be sent to anybody.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path("/")

_LANE_SHARE: Final = 0.985
"""Of the bits on a PCIe lane from generation 3 on that carry data (128 of 130)."""
_OLD_LANE_SHARE: Final = 0.8
"""Generations 1 and 2: 8 of 10."""


@dataclass(frozen=True)
class PcieLink:
    """The GPU's PCIe link, as it is while it is used, and as it could be."""

    gt_per_s: float
    width: int
    gt_per_s_max: float
    width_max: int

    @property
    def gb_per_s(self) -> float:
        """What the lanes carry; protocol takes some 10 % of it."""
        share = _LANE_SHARE if self.gt_per_s >= 8 else _OLD_LANE_SHARE
        return self.gt_per_s * self.width * share / 8


@dataclass(frozen=True)
class Numa:
    """``gpu_node`` is ``None`` where the machine has one node, or does not say. ``own_nodes``: of
    the processors that this process may run on."""

    gpu_node: int | None
    own_nodes: tuple[int, ...]
    near_cpus: tuple[int, ...] = ()
    """Those of the GPU's node that this process may use."""

    @property
    def far(self) -> bool:
        """May this process run on no processor near the GPU?"""
        return self.gpu_node is not None and self.gpu_node not in self.own_nodes


def describe(root: Path = _ROOT) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(root),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "huge_pages": huge_pages(root),
    }


def huge_pages(root: Path = _ROOT) -> str:
    """``always``, ``madvise``, ``never``; empty where the kernel does not say."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else ""


def link(pci_bus_id: str, root: Path = _ROOT) -> PcieLink | None:
    """Read it while or right after something is copied: an idle link slows down to save power."""
    device = root / "sys/bus/pci/devices" / pci_bus_id
    numbers = [
        _first_number(_text(device / name))
        for name in (
            "current_link_speed", "current_link_width", "max_link_speed", "max_link_width",
        )
    ]  # fmt: skip
    if not all(numbers):
        return None
    return PcieLink(numbers[0], int(numbers[1]), numbers[2], int(numbers[3]))


def numa(pci_bus_id: str, root: Path = _ROOT) -> Numa:
    nodes = _nodes(root)
    allowed = os.sched_getaffinity(0)
    own = tuple(sorted(node for node, cpus in nodes.items() if cpus & allowed))
    text = _text(root / "sys/bus/pci/devices" / pci_bus_id / "numa_node").strip()
    node = int(text) if re.fullmatch(r"\d+", text) else None  # -1: the machine does not say
    if node is None or len(nodes) < 2 or node not in nodes:
        return Numa(None, own)
    return Numa(node, own, tuple(sorted(nodes[node] & allowed)))


def cpus_of(text: str) -> set[int]:
    """``0-3,8,10-11`` as ``/sys`` writes sets of processors."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _nodes(root: Path) -> dict[int, set[int]]:
    found = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        found[int(path.name.removeprefix("node"))] = cpus_of(_text(path / "cpulist"))
    return found


def _cpu_model(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_number(text: str) -> float:
    found = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    return float(found[1]) if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
