"""Check and clean values that people or other programs hand in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.config import DEFAULTS, Config
from kiwi_core.errors import CallerError
from kiwi_core.units import format_duration_s, ns_to_seconds

if TYPE_CHECKING:
    from kiwi_core.wire.messages import Set

NAME_MAX_CHARS: Final = 200
"""Names are shown in one line of a sidebar; file systems allow 255 bytes."""


def clean_name(text: str) -> str:
    """Return ``text`` fit for a screen: one line, at most 200 characters. A character that steers a
    terminal or turns the reading direction becomes ``\\N{REPLACEMENT CHARACTER}``."""
    head = text[: NAME_MAX_CHARS + 1]
    shown = "".join(
        char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        for char in head
    )
    return shown if len(shown) <= NAME_MAX_CHARS else shown[: NAME_MAX_CHARS - 1] + "…"


def check_settings(wanted: Set, config: Config = DEFAULTS) -> None:
    """Raise ``CallerError`` ("bad-setting") for a quantum outside the limits, an empty request, or
    a priority without its session. (Only the daemon knows the policies.)

    Called by the client before it sends ``set`` and by the daemon before it obeys.
    """
    if (wanted.priority is None) != (not wanted.session):
        raise CallerError(
            "bad-setting",
            "A priority is a session's.",
            "Name both, the session and its priority; `kiwi status --json` lists sessions.",
        )
    said = (wanted.tq_s, wanted.anti_thrash, wanted.policy, wanted.priority)
    if all(one is None for one in said):
        raise CallerError(
            "bad-setting", "There is nothing to set.", "Name tq, anti-thrash, policy or priority."
        )
    if wanted.tq_s is None:
        return
    least_s, most_s = ns_to_seconds(config.tq_min_ns), ns_to_seconds(config.tq_max_ns)
    if not least_s <= wanted.tq_s <= most_s:  # also refuses what is not a number
        raise CallerError(
            "bad-setting",
            f"A time quantum of {wanted.tq_s:g} s is out of range.",
            f"Choose one from {format_duration_s(least_s)} to {format_duration_s(most_s)}.",
        )
