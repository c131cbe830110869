"""One line of ``kiwi doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but not for everything or not as well as it could; the remedy says how."""
    FAIL = "fail"
    """Kiwi cannot work here until the remedy is done."""


@dataclass(frozen=True)
class Finding:
    """``area`` names in a word or two what was checked; ``remedy`` says what to do (OK: empty)."""

    level: Level
    area: str
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Finding:
    return Finding(Level.OK, area, text)


def warn(area: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARN, area, text, remedy)


def fail(area: str, text: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, area, text, remedy)
