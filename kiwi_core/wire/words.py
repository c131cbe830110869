"""The sentences of every surface about a wait, a turn and the GPU's load.

``labextension/src/model/phrases.ts`` has those of the sidebar. Both are made of ``terms.py``, and
one table of cases (``tests/support/surface_words.json``) tests both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kiwi_core import terms
from kiwi_core.units import MIB, format_bytes, format_duration_s, ordinal

if TYPE_CHECKING:
    from kiwi_core.wire.messages import Waiting
    from kiwi_core.wire.status import (
        GaugesStatus,
        GpuStatus,
        OutsideProgram,
        QueueEntry,
        SchedulerStatus,
        SessionStatus,
    )


DAEMON_ENDED: Final = "The Kiwi daemon has ended, and the GPU memory of this program stays"
"""How the notice begins for a program whose memory a daemon that ended has left in system RAM."""


def wait_text(entry: QueueEntry) -> str:
    """Return how long a wait may still take; "": there is no forecast."""
    if entry.kept_out:
        return terms.KEPT_OUT.format(who=entry.kept_out)
    return ", ".join(filter(None, (terms.HELD_UP if entry.blocked else "", expected_text(entry))))


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


def format_wait_s(
    expected_s: float, low_s: float | None = None, high_s: float | None = None, why: str = ""
) -> str:
    """Return the rest of a wait for users: ``any moment``, ``about 12 s``, ``10-25 s``, ``up to 7
    s``, ``about 3 min (others go first)``. The labextension's ``formatWait`` does the same.
    """
    text = _range(low_s, high_s) if low_s is not None and high_s is not None else ""
    if not text:
        about = _amount(expected_s)
        text = terms.ANY_MOMENT if about == "0 s" else terms.ABOUT.format(amount=about)
    return f"{text} ({why})" if why else text


def _range(low_s: float, high_s: float) -> str:
    """Return a range, coarse so that it is steady as the wait gets shorter; "" for one figure."""
    low, high = _amount(low_s, coarse=True), _amount(high_s, coarse=True)
    if low == high or high_s <= low_s or high == "0 s":
        return ""
    if low == "0 s":
        return terms.UP_TO.format(amount=high)
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


def turn_text(gpu: GpuStatus, holder: SessionStatus) -> str:
    """Return how long ``holder`` keeps the GPU; "": not known.

    The rest of a turn is an upper bound, and the words say so: others may well get the GPU earlier.
    """
    if all(entry.kept_out for entry in gpu.queue):
        return terms.UNTIL_OTHERS_ASK
    if not holder.guarded:
        return terms.UNTIL_DONE
    if holder.time_left_s is None or (len(gpu.holders) > 1 and not gpu.scheduler.serialised):
        return ""
    if holder.time_left_s <= 0:
        return terms.TURN_OVER
    return terms.AT_MOST.format(left=_whole(holder.time_left_s))


def keeps_text(keeps_s: float) -> str:
    """Return that a program keeps its place, and for how long at most, to follow its name."""
    return terms.KEEPS.format(left=_whole(max(1.0, keeps_s)))


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
        parts.append(terms.BUSY.format(percent=gauges.utilisation_percent))
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
    return terms.PROGRAM.format(name=program.name, pid=program.pid) if program.pid else program.name


def outside_texts(gpu: GpuStatus) -> list[str]:
    """Return how much GPU memory is not Kiwi's, as far as it can matter to anybody."""
    named_bytes = sum(program.used_bytes for program in gpu.outside)
    unnamed_bytes = gpu.memory.outside_bytes - named_bytes
    texts = [f"{format_bytes(named_bytes)} {terms.OUTSIDE}"] if named_bytes else []
    if unnamed_bytes >= terms.UNNAMED_LEAST_BYTES:
        texts.append(f"{format_bytes(unnamed_bytes)} {terms.UNNAMED}")
    return texts


def settings_text(scheduler: SchedulerStatus) -> str:
    """Return the settings of how the GPU is shared."""
    parts = [
        f"{terms.QUANTUM} {format_duration_s(scheduler.tq_s)}",
        f"{terms.ANTI_THRASH} {scheduler.anti_thrash.value}",
    ]
    if scheduler.policy:  # an older daemon says none
        parts.append(f"{terms.POLICY} {scheduler.policy}")
    return ", ".join(parts)


def _watts(power_w: float) -> str:
    return f"{math.floor(power_w + 0.5)} W"


def _whole(left_s: float) -> str:
    """Return whole seconds to count down with, and minutes from two on."""
    whole = math.ceil(left_s)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"
