"""What a session is expected to take in the GPU while it runs.

Two answers, because being wrong costs differently. ``need_bytes`` decides who may run beside whom:
too high a guess costs waiting. ``wish_bytes`` is what is made free by moving *idle* memory out, as
far as that can be had: too high a guess costs one swap, too low a guess an out-of-memory error.

Unknown: the whole GPU. A notebook's first cells often make no more than a context (import, a look
at the device) and its next one loads the model; so what a session holds counts as known only once
it is more than a small share of the GPU, or has stayed small for some bursts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session

SMALL_SHARE: Final = 20
"""A twentieth of the GPU or less is hardly more than a context (0.3-0.6 of 16-140 GB)."""

CONTEXT_MAX_BYTES: Final = 640 * MIB
SMALL_SHARE_MAX: Final = 10
"""On cards of less than 12 GB a context is more than a twentieth. So up to this much is small,
but never more than a tenth of the GPU."""

QUIET_BURSTS: Final = 3
"""Bursts without growth after which even a small session is believed to stay small."""

BELIEVED_NS: Final = 30 * NS_PER_S
"""GPU time in one burst after which what it has held in it is believed, too. A training's first
burst may go on for hours: until its end it would count as one that needs the whole GPU."""

NOISE_SHARE: Final = 64
"""Growth by less than this part of the GPU is allocators rounding, not a new phase."""


def unknown(session: Session, total_bytes: int) -> bool:
    lively = session.quiet_bursts < QUIET_BURSTS
    return lively and session.peak_bytes <= _small_bytes(total_bytes)


def need_bytes(session: Session, total_bytes: int) -> int:
    """Without the margin, at most the whole GPU; never less than what it holds now
    and has asked for."""
    if unknown(session, total_bytes):
        return total_bytes
    wanted = session.footprint_bytes + session.asked_bytes
    need = max(session.peak_bytes, wanted, 1)  # 0 would mean: not active
    return need if need < total_bytes else total_bytes


@lru_cache(maxsize=8)  # a process has few GPUs; this is asked several times per event
def _small_bytes(total_bytes: int) -> int:
    usual = max(total_bytes // SMALL_SHARE, CONTEXT_MAX_BYTES)
    return min(usual, total_bytes // SMALL_SHARE_MAX)


def wish_bytes(session: Session, total_bytes: int) -> int:
    """``need_bytes``, and as much again as it grew in its last burst. One that never held GPU
    memory may begin with any cell: the whole GPU."""
    if not session.peak_bytes:
        return total_bytes
    return min(total_bytes, session.need_bytes + session.growth_bytes)


def burst_began(session: Session) -> None:
    session.burst_peak_bytes = session.footprint_bytes
    session.attained_ns = 0
    session.busy = None


def burst_stopped(session: Session) -> None:
    """In its middle; its quantum is counted."""
    if session.attained_ns >= BELIEVED_NS:
        session.peak_bytes = max(session.peak_bytes, session.burst_peak_bytes)


def burst_ended(session: Session, total_bytes: int) -> None:
    """Learn from the burst that is over."""
    session.bursts_ended += 1
    session.durations_ns.append(session.attained_ns)
    session.earlier_peak_bytes = max(session.peaks_bytes, default=0)
    session.peaks_bytes.append(session.burst_peak_bytes)
    session.quiet_bursts += 1
    _learn(session, total_bytes)


def seen(session: Session, total_bytes: int, in_burst: bool, of_last: bool = False) -> None:
    """Its memory was observed. What it holds after a burst was held in the burst, too: short
    bursts are over before anybody looks. ``of_last``: also if the next one has begun."""
    resident = session.resident_bytes
    if in_burst:
        session.burst_peak_bytes = max(session.burst_peak_bytes, resident)
    if (of_last or not in_burst) and session.peaks_bytes and resident > session.peak_bytes:
        session.peaks_bytes[-1] = resident
        _learn(session, total_bytes)


def _learn(session: Session, total_bytes: int) -> None:
    session.growth_bytes = max(0, session.peaks_bytes[-1] - session.earlier_peak_bytes)
    session.peak_bytes = max(session.peaks_bytes)
    if session.growth_bytes > total_bytes // NOISE_SHARE:
        session.quiet_bursts = 0
