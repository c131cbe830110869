"""Tests that only a result far below the usual one gets a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from kiwi_core.bench import remedies
from kiwi_core.bench.backends import CHECKPOINT, INPROCESS
from kiwi_core.bench.machine import Numa, PcieLink
from kiwi_core.bench.remedies import Facts
from kiwi_core.bench.results import Limit, Row, Spread

GEN5 = PcieLink(32.0, 16, 32.0, 16)


def row(name: str, value: float, limit: float | None = None) -> Row:
    return Row(
        name=name, group="", title="", unit="GB/s", spread=Spread(3, value, value, value),
        limit=Limit(limit, "of it") if limit else None, ratio=value / limit if limit else None,
    )  # fmt: skip


GOOD = {
    "pinned_out": (52.0, 63.0),
    "pinned_in": (55.0, 63.0),
    "pageable_out": (8.0, 52.0),
    "lease": (150.0, 25.0),
    "page_out_checkpoint": (4.0, 52.0),
    "page_in_checkpoint": (6.0, 55.0),
}


def found(changes: dict[str, tuple[float, float]] | None = None, **facts: Any) -> list[str]:
    rows = {name: row(name, *of) for name, of in (GOOD | (changes or {})).items()}
    usual: dict[str, Any] = {
        "row": rows.get, "link": GEN5, "numa": Numa(0, (0, 1)), "persistence": True,
    }  # fmt: skip
    return list(remedies.find(Facts(**(usual | facts)), (CHECKPOINT, INPROCESS)))


def test_a_good_machine_has_nothing_to_mend() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "facts", "says"),
    [
        ({}, {"numa": Numa(1, (0,))}, "numactl --cpunodebind=1"),
        ({}, {"persistence": False}, "nvidia-smi -pm 1"),
        ({}, {"link": PcieLink(32.0, 8, 32.0, 16)}, "x8 where the GPU can do"),
        ({"pinned_out": (20.0, 63.0), "pinned_in": (25.0, 63.0)}, {}, "the PCIe link carries 63"),
        (
            {"pinned_out": (8.0, 9.0), "pinned_in": (8.0, 9.0), "pageable_out": (7.5, 8.0)},
            {"link": None},
            "stage every copy",
        ),
        ({"pinned_out": (25.0, 63.0)}, {}, "copies out are much slower"),
        ({"lease": (900.0, 25.0)}, {}, "36 bare round trips"),
        ({"page_in_checkpoint": (0.5, 55.0)}, {}, "checkpoint reaches 0.9%"),
        ({"page_out_inprocess": (20.0, 52.0)}, {}, "inprocess reaches 38.5%"),
    ],
)
def test_each_finding_has_its_own_remedy(
    changes: dict[str, tuple[float, float]], facts: dict[str, Any], says: str
) -> None:
    (only,) = found(changes, **facts)
    assert says in only


def test_parts_without_a_measurement_are_not_judged() -> None:
    assert found(row={}.get, link=None, numa=None, persistence=None) == []
