"""The words that every surface uses for a wait, a turn and the GPU's load.

``labextension/src/model/phrases.ts`` has the words for waits, turns and load in the sidebar; one
table of cases (``tests/support/surface_words.json``) tests both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB, format_bytes, format_wait_s, ordinal

if TYPE_CHECKING:
    from kiwi_core.wire.messages import Waiting
    from kiwi_core.wire.status import (
        GaugesStatus,
        GpuStatus,
        OutsideProgram,
        QueueEntry,
        SessionStatus,
    )


DAEMON_ENDED: Final = "The Kiwi daemon has ended, and the GPU memory of this program stays"
"""How the notice begins for a program whose memory a daemon that ended has left in system RAM."""


def wait_text(entry: QueueEntry) -> str:
    """Return how long a wait may still take; "": there is no forecast."""
    if entry.kept_out:
        return f"suspended by {entry.kept_out} until kiwi resume"
    return ", ".join(filter(None, ("held up" if entry.blocked else "", expected_text(entry))))


def waiting_text(waiting: Waiting) -> str:
    """Return one line for the user of a program that waits for the GPU."""
    expected = expected_text(waiting)
    if waiting.blocked is not None:
        why = waiting.detail or "Waiting for the GPU: it cannot be given now; Kiwi tries again."
        return f"{why} Expected wait: {expected}." if expected else why
    if waiting.position <= 0 and waiting.activity:
        activity = waiting.activity[:1].upper() + waiting.activity[1:]
        return ", ".join(filter(None, (activity, expected)))
    place = f"{ordinal(waiting.position)} in line" if waiting.position > 0 else ""
    holder = f"{waiting.holder} has it" if waiting.holder else ""
    parts = ", ".join(filter(None, (place, holder, waiting.activity, expected)))
    return f"Waiting for the GPU: {parts}" if parts else "Waiting for the GPU"


def expected_text(wait: Waiting | QueueEntry) -> str:
    """Return the forecast of a wait; "": there is none."""
    if wait.expected_wait_s is None:
        return ""
    low_s, high_s = wait.expected_low_s, wait.expected_high_s
    return format_wait_s(wait.expected_wait_s, low_s, high_s, wait.expected_why)


def turn_text(gpu: GpuStatus, holder: SessionStatus) -> str:
    """Return how long ``holder`` keeps the GPU; "": not known.

    The rest of a turn is an upper bound, and the words say so: others may well get the GPU earlier.
    """
    if all(entry.kept_out for entry in gpu.queue):
        return "until others ask"
    if not holder.guarded:
        return "until it is done"
    if holder.time_left_s is None or (len(gpu.holders) > 1 and not gpu.scheduler.serialised):
        return ""
    if holder.time_left_s <= 0:
        return "its turn is over"
    return f"at most {_whole(holder.time_left_s)} more"


def keeps_text(keeps_s: float) -> str:
    """Return that a program keeps its place, and for how long at most, to follow its name."""
    return f"keeps the GPU for up to {_whole(max(1.0, keeps_s))} in case its next cell comes"


BURSTS_COUNTED: Final = 8
"""Number of bursts whose largest need counts, as in the scheduler."""

COUNTED_GAP_BYTES: Final = 64 * MIB
"""A need that differs less from what a session holds explains no wait."""


def counted_text(session: SessionStatus) -> str:
    """Return what the session counts with and why, if it holds much less now; "" if it does not.
    Without these words nobody would see why it waits, or why others wait for it."""
    counted_bytes = session.peak_bytes or 0
    held_bytes = session.resident_bytes + session.paged_out_bytes
    if counted_bytes - held_bytes < COUNTED_GAP_BYTES:
        return ""
    return (
        f"counted with up to {format_bytes(counted_bytes)}, the most of its last {BURSTS_COUNTED}"
        f" bursts; it holds {format_bytes(held_bytes)} now"
    )


def load_text(gauges: GaugesStatus) -> str:
    """Return how hard the GPU works; "": not known."""
    parts = []
    if gauges.utilisation_percent is not None:
        parts.append(f"{gauges.utilisation_percent} % busy")
    if gauges.power_w is not None:
        limit = "" if gauges.power_limit_w is None else f" of {_watts(gauges.power_limit_w)}"
        parts.append(f"{_watts(gauges.power_w)}{limit}")
    if gauges.temperature_c is not None:
        parts.append(f"{gauges.temperature_c} °C")
    return ", ".join(parts)


LEFT_REMEDY: Final = (
    "End the processes that it left (the pid is that of the first): its memory is free then."
)
"""What to do about an ``OutsideProgram`` that is ``left``."""


def outside_text(program: OutsideProgram) -> str:
    """Return the name, and the pid if known, of a program outside Kiwi."""
    return f"{program.name} (pid {program.pid})" if program.pid else program.name


def _watts(power_w: float) -> str:
    return f"{math.floor(power_w + 0.5)} W"


def _whole(left_s: float) -> str:
    """Return whole seconds to count down with, and minutes from two on."""
    whole = math.ceil(left_s)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"
