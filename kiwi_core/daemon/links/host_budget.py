"""The budget of system RAM for paged-out memory: one object answers every question about it.

How much the machine and its control groups allow, ``kiwi_core.gpu.host`` reads. Who has taken how
much is what the pager and the libraries say. ``host_share`` divides it, and ``limits`` has memory
given back that is held only for speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kiwi_core.daemon.links.host_share import Holder
from kiwi_core.daemon.links.link import Link
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.daemon.links.links import Links
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.linked import Linked

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class HostBudget:
    """``fixed_bytes`` is the admin's word; ``None``: the machine is asked, and ``reserve_bytes`` of
    its RAM are left alone. ``footprints`` are the bytes of all that is out."""

    _links: Links
    _footprints: Callable[[], Mapping[ProcessRef, int]]
    _reserve_bytes: int
    _fixed_bytes: int | None = None
    _read_last: dict[str, int] = field(default_factory=dict)

    def budget_bytes(self) -> int:
        """Return what all paged-out memory together may take, with what is out now."""
        if self._fixed_bytes is not None:
            return self._fixed_bytes
        return self._read("budget", self._taken_bytes)

    def left_bytes(self) -> int:
        """Return how much of the budget nobody has taken."""
        if self._fixed_bytes is not None:
            return max(0, self._fixed_bytes - self._taken_bytes())
        return self._read("left", lambda: 0)

    def others_bytes(self) -> int:
        """Return what is out, and no library's."""
        ours = sum(link.told.paged_out_bytes for link in self._links.everybody())
        return max(0, self._out_bytes() - ours)

    def arena_bytes(self) -> int:
        """Return what all libraries hold together, with what is out."""
        return sum(holder(link).held_bytes for link in self._links.everybody())

    def _taken_bytes(self) -> int:
        """Out, or held and given back if it is needed."""
        links = self._links.everybody()
        return self._out_bytes() + sum(holder(link).reclaimable_bytes for link in links)

    def _out_bytes(self) -> int:
        """Of what libraries say to have out, no more than their processes have."""
        said_bytes = sum(self._footprints().values())
        links = self._links.everybody()
        untrue_bytes = sum(
            max(0, x.told.paged_out_bytes - x.host_bytes) for x in links if x.greeted
        )
        return max(0, said_bytes - untrue_bytes)

    def _read(self, what: str, taken_bytes: Callable[[], int]) -> int:
        """As it was read last where it cannot be read now (no descriptor left)."""
        try:
            self._read_last[what] = host.host_budget_bytes(self._reserve_bytes, taken_bytes())
        except GpuError as error:
            if what not in self._read_last:
                raise
            log.error("the machine's RAM cannot be read", why=str(error))
        return self._read_last[what]


def holder(link: Linked) -> Holder:
    """Return what the process of ``link`` has, by its own word as far as that is believed."""
    told = link.told
    held_bytes = max(told.arena_bytes, told.paged_out_bytes)
    if isinstance(link, Link) and link.doubted:
        held_bytes = told.paged_out_bytes
    return Holder(told.resident_bytes + told.paged_out_bytes, told.paged_out_bytes, held_bytes)
