"""Units and their conversion to text, shared by all parts of Kiwi.

Time is in integer nanoseconds of a monotonic clock, memory in integer bytes. Floats appear only
where users or other programs read a number (``*_s`` on the wire, in JSON and on screens).
"""

from __future__ import annotations

import re
from typing import Final, NewType

SessionId = NewType("SessionId", str)
"""The name of one session of one daemon; never reused, not even after the daemon restarts."""

OpId = NewType("OpId", int)
"""The number of one operation (suspend, page out …) that the scheduler ordered; never reused."""

NS_PER_S: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_FACTORS: Final[dict[str, int]] = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def seconds_to_ns(seconds: float) -> int:
    """Return the whole nanoseconds nearest to ``seconds``."""
    return round(seconds * NS_PER_S)


def ns_to_seconds(duration_ns: int) -> float:
    return duration_ns / NS_PER_S


def parse_size_bytes(text: str) -> int:
    """Return the bytes of ``512MiB``, ``1.5 GiB``, ``8G`` (binary) or ``80GB`` (decimal).

    Raise ``ValueError`` with an example for any other text.
    """
    match = _SIZE.match(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 8GiB")
    return int(float(match[1]) * factor)


def format_bytes(size_bytes: int) -> str:
    """Return ``size_bytes`` for users: ``0 B``, ``512 MiB``, ``38.4 GiB``."""
    for factor, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.0f} {name}" if value == int(value) else f"{value:.1f} {name}"
    return f"{size_bytes} B"


def format_duration_s(duration_s: float) -> str:
    """Return ``duration_s`` for users: ``0.3 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if duration_s < 9.95:
        return f"{duration_s:.1f} s"
    whole = round(duration_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ordinal(position: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``4th``, ``11th`` …"""
    if 10 <= position % 100 <= 20:
        return f"{position}th"
    return f"{position}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(position % 10, 'th') }"
