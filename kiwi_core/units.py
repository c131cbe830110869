"""Units and their conversion to text, shared by all parts of Kiwi.

Time is in integer nanoseconds of a monotonic clock, memory in integer bytes. Floats appear only
where users or other programs read a number (``*_s`` on the wire, in JSON and on screens).
"""

from __future__ import annotations

import math
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


def format_period_s(period_s: float) -> str:
    """Return the text of a time that a user has set, without parts that are zero: ``15 min``, ``1
    h``, ``4 s``.
    """
    if period_s < 60:
        return f"{period_s:g} s"
    return format_duration_s(period_s).removesuffix(" 0 s").removesuffix(" 0 min")


def format_wait_s(
    expected_s: float, low_s: float | None = None, high_s: float | None = None, why: str = ""
) -> str:
    """Return the rest of a wait for users: ``any moment``, ``about 12 s``, ``10-25 s``, ``up to 7
    s``, ``about 3 min (others go first)``. The labextension's ``formatWait`` does the same.
    """
    text = _range(low_s, high_s) if low_s is not None and high_s is not None else ""
    if not text:
        about = _amount(expected_s)
        text = "any moment" if about == "0 s" else f"about {about}"
    return f"{text} ({why})" if why else text


def _range(low_s: float, high_s: float) -> str:
    """Return a range, coarse so that it is steady as the wait gets shorter; "" for one figure."""
    low, high = _amount(low_s, coarse=True), _amount(high_s, coarse=True)
    if low == high or high_s <= low_s or high == "0 s":
        return ""
    if low == "0 s":
        return f"up to {high}"
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low}\N{EN DASH}{high}"


def _amount(wait_s: float, coarse: bool = False) -> str:
    """Return seconds below 100 s, minutes below 100 min, else hours. ``coarse``: in steps of about
    a tenth, and with limits of 90, since otherwise 95 s would follow 1.5 min."""
    seconds = _rounded(wait_s, 5 if coarse and wait_s >= 20 else 1)
    most = 90 if coarse else 100
    if seconds < most:
        return f"{seconds:g} s"
    minutes = _rounded(wait_s / 60, 0.5 if coarse and wait_s < 600 else 1)
    if minutes < most:
        return f"{minutes:g} min"
    return f"{_rounded(wait_s / 3600, 0.5 if coarse else 1):g} h"


def _rounded(value: float, step: float) -> float:
    return math.floor(max(0.0, value) / step + 0.5) * step


def ordinal(position: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``4th``, ``11th`` …"""
    if 10 <= position % 100 <= 20:
        return f"{position}th"
    return f"{position}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(position % 10, 'th') }"
