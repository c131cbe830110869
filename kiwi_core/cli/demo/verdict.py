"""Judge from the history whether the demo kept its promises: who held, who waited, what moved."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.cli.history import HistoryRun, HistorySpan

_NOTABLE_S = 0.05
"""A shorter wait is not printed."""


def overlaps(held: list[HistorySpan]) -> int:
    """Return how often two sessions held the GPU at the same time."""
    spans = sorted(held, key=lambda span: (span.from_s, span.to_s))
    return sum(a.to_s > b.from_s and a.session != b.session for a, b in itertools.pairwise(spans))


def verdict(
    run: HistoryRun,
    suspensions: Mapping[str, int],
    letters: dict[str, str],
    intact: dict[str, bool],
) -> tuple[bool, list[str]]:
    """Return whether all promises were kept, and lines with each promise and its numbers."""
    lines: list[str] = []
    for session, letter in sorted(letters.items(), key=lambda item: item[1]):
        lines += _of_one(run, session, letter, suspensions.get(session, 0))
    suspended = sum(suspensions.get(session, 0) for session in letters)
    moved = sum(move.bytes_moved for move in run.moves if move.direction == "out")
    times = overlaps(run.held)
    checks = [
        (all(intact.values()) and len(intact) == len(letters), "every byte intact in both"),
        (times == 0, f"at most one holder at any moment ({times} overlaps)"),
        (suspended > 0, f"a cell was suspended in its middle and went on ({suspended} times)"),
        (moved > 0, f"memory moved out to system RAM and back ({format_bytes(moved)} out)"),
    ]
    lines += [f"  {'ok  ' if good else 'FAIL'}  {text}" for good, text in checks]
    return all(good for good, _ in checks), lines


def _of_one(run: HistoryRun, session: str, letter: str, suspensions: int) -> list[str]:
    held = [one for one in run.held if one.session == session]
    waits_s = [one.to_s - one.from_s for one in run.waited if one.session == session]
    moved = {"out": 0, "in": 0}
    for move in run.moves:
        moved[move.direction] += move.bytes_moved * (move.session == session)
    spans = ", ".join(f"{one.from_s:.1f}–{one.to_s:.1f}" for one in held)
    waits = ", ".join(f"{wait_s:.1f}" for wait_s in waits_s if wait_s > _NOTABLE_S)
    return [
        f"  {letter} held the GPU (s): {spans or 'never'}",
        (
            f"  {letter} waited (s): {waits or 'never'}; suspended {suspensions} times; "
            f"{format_bytes(moved['out'])} out, {format_bytes(moved['in'])} in"
        ),
    ]
