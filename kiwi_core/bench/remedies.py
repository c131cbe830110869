"""Results that are far below the usual ones, each as a sentence with a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.machine import Numa, PcieLink
    from kiwi_core.bench.results import Row

LINK_SHARE_MIN: Final = 0.65
"""Pinned copies usually reach 80-90 % of what the lanes carry."""

SYMMETRY_MIN: Final = 0.6
"""Ratio of the slower way to the faster one."""

PAGEABLE_MAX: Final = 0.9
"""Share of the pinned copy's speed; usually a third or less."""
FAST_GB_PER_S: Final = 15.0
"""Above this, ordinary memory that is as fast as pinned memory is good (NVLink to the CPU)."""

LEASE_MAX: Final = 20.0
"""Bare round trips for each lease; 5 to 7 have been measured on a busy machine."""


@dataclass(frozen=True)
class Facts:
    """The input of the rules."""

    row: Callable[[str], Row | None]
    link: PcieLink | None
    numa: Numa | None
    persistence: bool | None

    def median(self, name: str) -> float | None:
        row = self.row(name)
        return row.spread.median if row is not None else None

    def ratio(self, name: str) -> float | None:
        row = self.row(name)
        return row.ratio if row is not None else None


def of(bench: Bench, backends: Sequence[Backend]) -> list[str]:
    rows = {row.name: row for row in bench.rows}
    facts = Facts(rows.get, bench.link, bench.numa, bench.gpu.persistence)
    return list(find(facts, backends))


def find(facts: Facts, backends: Sequence[Backend]) -> Iterator[str]:
    yield from _placement(facts)
    yield from _bus(facts)
    yield from _kiwi(facts, backends)


def _placement(facts: Facts) -> Iterator[str]:
    numa = facts.numa
    if numa is not None and numa.far:
        yield (
            f"The GPU is at NUMA node {numa.gpu_node}, and this process may run on "
            f"{_nodes(numa.own_nodes)} only, so every copy goes through the other socket. Start "
            f"Jupyter and kiwi with: numactl --cpunodebind={numa.gpu_node} "
            f"--membind={numa.gpu_node}"
        )
    if facts.persistence is False:
        yield (
            "Persistence mode is off: the driver starts anew for each first program, which takes "
            "seconds. As root: nvidia-smi -pm 1"
        )


def _nodes(nodes: tuple[int, ...]) -> str:
    return "node " + " and ".join(map(str, nodes)) if nodes else "unknown nodes"


def _bus(facts: Facts) -> Iterator[str]:
    out, back, link = facts.median("pinned_out"), facts.median("pinned_in"), facts.link
    if link is not None and (link.width < link.width_max or link.gt_per_s < link.gt_per_s_max):
        yield (
            f"The GPU's PCIe link runs at {link.gt_per_s:g} GT/s x{link.width} where the GPU can "
            f"do {link.gt_per_s_max:g} GT/s x{link.width_max}: another slot, a riser or a setting "
            "of the firmware may be the reason (nvidia-smi -q, PCIe Generation and Link Width)."
        )
    if out is None or back is None:
        return
    if link is not None and max(out, back) < LINK_SHARE_MIN * link.gb_per_s:
        yield (
            f"Pinned copies reach {max(out, back):.1f} GB/s where the PCIe link carries "
            f"{link.gb_per_s:.0f}: look for other traffic, a virtual machine's IOMMU settings, "
            "a far NUMA node (numactl --hardware), and power saving of the CPU."
        )
    if min(out, back) < SYMMETRY_MIN * max(out, back):
        slow = "out" if out < back else "in"
        yield (
            f"Pinned copies {slow} are much slower than the other way: usually host memory on a "
            "far NUMA node, or PCIe relaxed ordering switched off in the firmware."
        )
    pageable = facts.ratio("pageable_out")
    if pageable is not None and pageable > PAGEABLE_MAX and out < FAST_GB_PER_S:
        yield (
            "Pinned memory is copied no faster than ordinary memory, as if the driver had to stage "
            "every copy: confidential computing and some virtual machines do that."
        )


def _kiwi(facts: Facts, backends: Sequence[Backend]) -> Iterator[str]:
    lease = facts.ratio("lease")
    if lease is not None and lease > LEASE_MAX:
        yield (
            f"A lease takes {lease:.0f} bare round trips: the machine's processors are probably "
            "busy (uptime)."
        )
    for backend in backends:
        shares = [facts.ratio(f"page_{way}_{backend.name}") for way in ("out", "in")]
        worst = min((share for share in shares if share is not None), default=None)
        if worst is not None and worst < backend.usual_share / 2:
            yield (
                f"The backend {backend.name} reaches {worst:.1%} of the pinned copy, less than "
                f"half of what is usual ({backend.usual_share:.0%}): "
                + (_SLOW_CHECKPOINT if backend.from_driver else "please report it.")
            )


_SLOW_CHECKPOINT: Final = (
    "the driver's own checkpoints take all that time. A newer driver is faster; "
    "see also persistence mode, and programs that pin much host memory."
)
