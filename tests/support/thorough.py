"""The tests that only ``make test-all`` runs, which ``tests/thorough.txt`` lists."""

from __future__ import annotations

import re
from pathlib import Path

LIST = Path(__file__).parents[1] / "thorough.txt"


def lines() -> list[str]:
    """Return the patterns: node IDs of tests in which ``*`` stands for any text."""
    text = LIST.read_text().splitlines()
    return [line for line in text if line and not line.startswith("#")]


def pattern(*lines: str) -> re.Pattern[str]:
    """Return a pattern for the node IDs that one of ``lines`` names."""
    return re.compile("|".join(".*".join(map(re.escape, line.split("*"))) for line in lines))
