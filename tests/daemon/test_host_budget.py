"""Tests that a library's claim about paged-out memory counts only up to its process's RAM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kiwi_core.daemon.links.host_budget import HostBudget
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.units import GIB


@pytest.mark.parametrize(("has_gib", "left_gib"), [(1, 7), (6, 2), (9, 2)])
def test_a_claim_of_a_library_counts_as_far_as_its_process_has_ram(
    has_gib: int, left_gib: int
) -> None:
    """The library claims 6 of 8 GiB."""
    link = SimpleNamespace(
        report=LibraryReport(paged_out_bytes=6 * GIB), host_bytes=has_gib * GIB, greeted=True
    )
    links: Any = SimpleNamespace(everybody=lambda: [link])
    budget = HostBudget(links, lambda: {ProcessRef(1, 1): 6 * GIB}, 0, 8 * GIB)
    assert budget.left_bytes() == left_gib * GIB
