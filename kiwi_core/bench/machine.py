"""A description of this machine, from ``/proc`` and ``/sys``: CPU, RAM, NUMA nodes, PCIe link.

It has no host name, user or path, so that a report can be sent to anybody.
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
"""Share of the bits on a PCIe lane that carry data, from generation 3 on (128 of 130)."""
_OLD_LANE_SHARE: Final = 0.8
"""The same for generations 1 and 2: 8 of 10."""


@dataclass(frozen=True)
class PcieLink:
    """The GPU's PCIe link: speed and width while it is used, and the most that is possible."""

    gt_per_s: float
    width: int
    gt_per_s_max: float
    width_max: int

    @property
    def gb_per_s(self) -> float:
        """The speed of the lanes; the protocol takes some 10 % of it."""
        share = _LANE_SHARE if self.gt_per_s >= 8 else _OLD_LANE_SHARE
        return self.gt_per_s * self.width * share / 8


@dataclass(frozen=True)
class Numa:
    """NUMA nodes. ``gpu_node`` is ``None`` if the machine has one node or does not say.
    ``own_nodes`` are those of the processors that this process may run on."""

    gpu_node: int | None
    own_nodes: tuple[int, ...]
    near_cpus: tuple[int, ...] = ()
    """The processors of the GPU's node that this process may use."""

    @property
    def far(self) -> bool:
        """Return whether this process may run on no processor near the GPU."""
        return self.gpu_node is not None and self.gpu_node not in self.own_nodes


def describe(root: Path = _ROOT) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(root),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }


def link(pci_bus_id: str, root: Path = _ROOT) -> PcieLink | None:
    """Return the GPU's link. Call it during or just after a copy: an idle link slows down."""
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
    """Parse a set of processors as ``/sys`` writes it, for example ``0-3,8,10-11``."""
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
