"""The results: rows with ratios, and the JSON that other programs read."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA: Final = 1
"""The version of the JSON; it rises when the new JSON would mislead a reader of the old one."""

GB_PER_S: Final = "GB/s"
MICROSECONDS: Final = "us"
SECONDS: Final = "s"


class Spread(msgspec.Struct, frozen=True):
    runs: int
    min: float
    median: float
    max: float


class Limit(msgspec.Struct, frozen=True):
    """The value that a row is compared with, in the row's unit; ``of`` describes it in words."""

    value: float
    of: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One result. ``name`` is stable, for programs; ``title`` is for people. ``ratio`` is the
    median over the limit's value: a share for speeds, a multiple for times. ``bytes``: the size
    that was copied, pinned, mapped or moved in one run. ``pinned_bytes``: how much of what a
    library moved went to pinned memory; ``None`` if the library does not decide that."""

    name: str
    group: str
    title: str
    unit: str
    spread: Spread
    bytes: int = 0
    limit: Limit | None = None
    ratio: float | None = None
    pinned_bytes: int | None = None


class Left(msgspec.Struct, frozen=True):
    """A row that is missing, and why. ``failed``: it should be there."""

    name: str
    title: str
    reason: str
    failed: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    kiwi: str
    took_s: float
    emulated: bool
    others: int
    """Programs that used the GPU meanwhile; if any, the numbers are not the machine's limits."""
    machine: dict[str, Any]
    uses: dict[str, int]
    rows: tuple[Row, ...]
    left_out: tuple[Left, ...]
    remedies: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Return whether everything was measured that this machine has."""
        return not any(left.failed for left in self.left_out)


def spread(values: Sequence[float]) -> Spread:
    return Spread(
        runs=len(values), min=min(values), median=statistics.median(values), max=max(values)
    )


def speed_row(
    name: str, group: str, title: str, size_bytes: int, seconds: Sequence[float],
    limit: Limit | None = None,
) -> Row:  # fmt: skip
    """Return a row in GB/s from the seconds of each run of ``size_bytes``."""
    values = [size_bytes / 1e9 / one for one in seconds]
    return _row(name, group, title, GB_PER_S, values, limit, size_bytes)


def time_row(
    name: str, group: str, title: str, unit: str, seconds: Sequence[float],
    limit: Limit | None = None, size_bytes: int = 0,
) -> Row:  # fmt: skip
    """Return a row of times in ``unit``. ``limit`` is in ``unit``, ``seconds`` in seconds."""
    factor = 1e6 if unit == MICROSECONDS else 1.0
    return _row(name, group, title, unit, [one * factor for one in seconds], limit, size_bytes)


def _row(
    name: str, group: str, title: str, unit: str, values: Sequence[float],
    limit: Limit | None, size_bytes: int,
) -> Row:  # fmt: skip
    found = spread(values)
    return Row(
        name=name, group=group, title=title, unit=unit, spread=found, bytes=size_bytes,
        limit=limit, ratio=found.median / limit.value if limit is not None else None,
    )  # fmt: skip


def to_json(report: Report) -> bytes:
    data = {"schema": SCHEMA, **msgspec.to_builtins(report), "complete": report.complete}
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
