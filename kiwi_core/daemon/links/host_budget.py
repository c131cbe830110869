"""The budget of system RAM for paged-out memory: one object answers every question about it.

``kiwi_core.gpu.host`` reads what the machine and its control groups allow; the pager and the
libraries tell what is taken. ``host_share`` divides the budget, and ``library_ram`` reclaims memory
that is held only for speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kiwi_core.daemon.links.host_share import RamUser
from kiwi_core.daemon.links.link import Link
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.daemon.links.links import Links
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.linked import LinkedProcess

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class HostBudget:
    """``fixed_bytes`` is the admin's budget; ``None``: read it from the machine, and leave
    ``reserve_bytes`` of its RAM alone. ``footprints`` returns the bytes of all paged-out memory."""

    _links: Links
    _footprints: Callable[[], Mapping[ProcessRef, int]]
    _reserve_bytes: int
    _fixed_bytes: int | None = None
    _read_last: dict[str, int] = field(default_factory=dict)

    def budget_bytes(self) -> int:
        """Return what all paged-out memory together may take, including what is out now."""
        if self._fixed_bytes is not None:
            return self._fixed_bytes
        return self._read("budget", self._taken_bytes)

    def left_bytes(self) -> int:
        """Return the part of the budget that is not taken."""
        if self._fixed_bytes is not None:
            return max(0, self._fixed_bytes - self._taken_bytes())
        return self._read("left", lambda: 0)

    def others_bytes(self) -> int:
        """Return the paged-out bytes that no library holds."""
        ours = sum(link.report.paged_out_bytes for link in self._links.everybody())
        return max(0, self._out_bytes() - ours)

    def arena_bytes(self) -> int:
        """Return what all libraries hold together, including paged-out memory."""
        return sum(ram_user(link).held_bytes for link in self._links.everybody())

    def _taken_bytes(self) -> int:
        """Return what is paged out, or held and given back on demand."""
        links = self._links.everybody()
        return self._out_bytes() + sum(ram_user(link).reclaimable_bytes for link in links)

    def _out_bytes(self) -> int:
        """Return what is paged out; a library's claim counts only as far as its process has RAM."""
        reported_bytes = sum(self._footprints().values())
        links = self._links.everybody()
        untrue_bytes = sum(
            max(0, x.report.paged_out_bytes - x.host_bytes) for x in links if x.greeted
        )
        return max(0, reported_bytes - untrue_bytes)

    def _read(self, what: str, taken_bytes: Callable[[], int]) -> int:
        """Read a budget; if that fails (no descriptor left), return the last value."""
        try:
            self._read_last[what] = host.host_budget_bytes(self._reserve_bytes, taken_bytes())
        except GpuError as error:
            if what not in self._read_last:
                raise
            log.error("the machine's RAM cannot be read", why=str(error))
        return self._read_last[what]


def ram_user(link: LinkedProcess) -> RamUser:
    """Return what the process of ``link`` holds, by its own report, as far as that is credible."""
    report = link.report
    held_bytes = max(report.arena_bytes, report.paged_out_bytes)
    if isinstance(link, Link) and link.doubted:
        held_bytes = report.paged_out_bytes
    return RamUser(
        report.resident_bytes + report.paged_out_bytes, report.paged_out_bytes, held_bytes
    )
