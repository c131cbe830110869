"""Estimates of the GPU memory that a session takes while it runs.

There are two, because errors differ in cost. ``need_bytes`` decides which sessions may run side by
side: too high a guess costs waiting. ``wish_bytes`` is the room that is made by paging *idle*
memory out, as far as possible: too high a guess costs one swap, too low a guess an out-of-memory
error.

A session of unknown need counts as needing the whole GPU. The first cells of a notebook often make
no more than a context (an import, a look at the device) and the next one loads the model. So a
need is known only once the session has held more than a small share of the GPU, or has stayed
small for some bursts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session

SMALL_SHARE: Final = 20
"""Up to a twentieth of the GPU is hardly more than a context (0.3-0.6 GB of 16-140 GB)."""

CONTEXT_MAX_BYTES: Final = 640 * MIB
SMALL_SHARE_MAX: Final = 10
"""A context is more than a twentieth of a GPU of less than 12 GB. So ``CONTEXT_MAX_BYTES`` count
as small, too, but never more than a tenth of the GPU."""

QUIET_BURSTS: Final = 3
"""Bursts without growth after which a small session is expected to stay small."""

BELIEVED_NS: Final = 30 * NS_PER_S
"""GPU time in one burst after which the peak of this burst counts, too. The first burst of a
training may last hours: until its end the training would count as needing the whole GPU."""

NOISE_SHARE: Final = 64
"""Growth by less than this part of the GPU is the allocator's rounding, not a new phase."""


def unknown(session: Session, total_bytes: int) -> bool:
    lively = session.quiet_bursts < QUIET_BURSTS
    return lively and session.peak_bytes <= _small_bytes(total_bytes)


def need_bytes(session: Session, total_bytes: int) -> int:
    """Return the expected need without the margin: at most the whole GPU, and up to that no less
    than what the session holds now and has asked for."""
    if session.quiet_bursts < QUIET_BURSTS and unknown(session, total_bytes):
        return total_bytes
    need = session.footprint_bytes + session.asked_bytes
    if need < session.peak_bytes:
        need = session.peak_bytes
    if need > total_bytes:
        return total_bytes
    return need or 1  # 0 would mean: not active


@lru_cache(maxsize=8)  # a process has few GPUs; this is asked several times per event
def _small_bytes(total_bytes: int) -> int:
    usual = max(total_bytes // SMALL_SHARE, CONTEXT_MAX_BYTES)
    return min(usual, total_bytes // SMALL_SHARE_MAX)


def wish_bytes(session: Session, total_bytes: int) -> int:
    """Return ``need_bytes`` plus the growth of the last burst; the whole GPU for a session that
    never held GPU memory, which may begin with any cell."""
    if not session.peak_bytes:
        return total_bytes
    return min(total_bytes, session.need_bytes + session.growth_bytes)


def burst_began(session: Session) -> None:
    session.burst_peak_bytes = session.footprint_bytes


def burst_stopped(session: Session) -> None:
    """Learn from a burst that was stopped in its middle, after its quantum was counted."""
    if session.attained_ns >= BELIEVED_NS:
        session.peak_bytes = max(session.peak_bytes, session.burst_peak_bytes)


def burst_ended(session: Session, total_bytes: int) -> None:
    """Learn from a burst that has ended."""
    session.bursts_ended += 1
    session.durations_ns.append(session.attained_ns)
    session.earlier_peak_bytes = max(session.peaks_bytes, default=0)
    session.peaks_bytes.append(session.burst_peak_bytes)
    session.quiet_bursts += 1
    _learn(session, total_bytes)


def seen(session: Session, total_bytes: int, in_burst: bool, of_last: bool = False) -> None:
    """Learn from a reading of the session's memory. Memory that it holds after a burst counts as
    held in that burst: short bursts end before their memory is read. ``of_last``: this applies
    although the next burst has begun."""
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
