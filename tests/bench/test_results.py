"""Tests of rows, ratios, JSON and the table, with made-up numbers."""

from __future__ import annotations

import json

import msgspec
import pytest

from kiwi_core.bench.results import (
    MICROSECONDS,
    SCHEMA,
    Left,
    Limit,
    Report,
    Row,
    speed_row,
    time_row,
    to_json,
)
from kiwi_core.cli.bench_text import EMULATED, report_lines
from kiwi_core.cli.terminal import Style
from kiwi_core.units import GIB


def report(*rows: Row, left: tuple[Left, ...] = (), **more: object) -> Report:
    usual = {
        "kiwi": "1", "took_s": 61.0, "emulated": False, "others": 0, "machine": {"gpu": "X"},
        "uses": {"gpu_bytes": GIB}, "remedies": (),
    }  # fmt: skip
    return Report(rows=rows, left_out=left, **(usual | more))  # type: ignore[arg-type]


COPY = speed_row("pinned_out", "copies", "copy out", 10 * 10**9, [0.5, 0.25, 0.2])
PAGED = speed_row(
    "page_out_x", "x", "page-out", 10**9, [0.5, 0.5, 1.0], Limit(40.0, "of the pinned copy")
)
LEASE = time_row("lease", "lease", "lease", MICROSECONDS, [60e-6], Limit(20.0, "the round trip"))


def test_speeds_are_bytes_over_seconds() -> None:
    assert (COPY.spread.runs, COPY.unit) == (3, "GB/s")
    assert (COPY.spread.min, COPY.spread.median, COPY.spread.max) == (20.0, 40.0, 50.0)
    assert COPY.ratio is None


def test_ratios_are_medians_over_the_limit() -> None:
    assert PAGED.spread.median == 2.0
    assert PAGED.ratio == pytest.approx(0.05)
    assert LEASE.spread.median == pytest.approx(60.0)
    assert LEASE.ratio == pytest.approx(3.0)


def test_json_says_everything_with_its_schema() -> None:
    left = Left("page_y", "page-out, y", "not here")
    data = json.loads(to_json(report(COPY, PAGED, left=(left,))))
    assert data["schema"] == SCHEMA
    assert data["complete"] is True
    assert data["left_out"] == [
        {"name": "page_y", "title": "page-out, y", "reason": "not here", "failed": False}
    ]
    _, row = data["rows"]
    assert row["limit"] == {"value": 40.0, "of": "of the pinned copy"}
    assert row["spread"] == {"runs": 3, "min": 1.0, "median": 2.0, "max": 2.0}
    assert (row["unit"], row["bytes"], row["name"]) == ("GB/s", 10**9, "page_out_x")


def test_what_failed_makes_it_incomplete() -> None:
    failed = Left("lease", "lease", "The daemon did not start.", failed=True)
    assert json.loads(to_json(report(left=(failed,))))["complete"] is False


def test_the_table() -> None:
    failed = Left("lease", "lease", "The daemon did not start.", failed=True)
    lines = report_lines(
        report(COPY, PAGED, LEASE, left=(failed,), remedies=("Turn it on.",)), Style(False)
    )
    text = "\n".join(lines)
    assert "copy out  40.0 GB/s  20.0 … 50.0" in text
    assert "5.0% of the pinned copy" in text
    assert "60.0 µs" in text
    assert "3.00 × the round trip" in text
    assert "lease: The daemon did not start." in text
    assert "→ Turn it on." in text
    assert EMULATED not in text


def test_an_emulated_gpu_is_compared_with_nothing_but_its_lease() -> None:
    emulated = msgspec.structs.replace(report(COPY, PAGED, LEASE), emulated=True)
    text = "\n".join(report_lines(emulated, Style(False)))
    assert EMULATED in text
    assert "pinned copy" not in text
    assert "3.00 × the round trip" in text


def test_meaningless_numbers_are_marked() -> None:
    assert EMULATED in report_lines(report(COPY, emulated=True), Style(False))
    (last,) = report_lines(report(COPY, others=2), Style(False))[-1:]
    assert "not this machine's limits" in last
