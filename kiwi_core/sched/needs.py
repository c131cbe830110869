"""What a session is expected to take in the GPU while it runs.

Unknown (never completed a burst that held GPU memory): the whole GPU. Else the highest peak of
its last bursts plus what the last burst grew by beyond the earlier peaks, so that one burst
without growth brings the expectation down to the peak; and never less than what it has now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.sched.session import Session


def need_bytes(session: Session, total_bytes: int) -> int:
    """Without the margin, at most the whole GPU."""
    if not session.peaks_bytes:
        return total_bytes
    need, footprint = session.expected_bytes, session.footprint_bytes
    if need < footprint:
        need = footprint
    return need if need < total_bytes else total_bytes


def burst_began(session: Session) -> None:
    session.burst_peak_bytes = session.footprint_bytes
    session.attained_ns = 0
    session.busy = None


def burst_ended(session: Session) -> None:
    """Learn from the burst that is over. One that never held GPU memory teaches nothing."""
    session.bursts_ended += 1
    session.durations_ns.append(session.attained_ns)
    if session.burst_peak_bytes:
        _learn(session, session.burst_peak_bytes)


def seen(session: Session, in_burst: bool) -> None:
    """Its memory was observed. What it holds after a burst was held in the burst, too: short
    bursts are over before anybody looks."""
    resident = session.resident_bytes
    if in_burst:
        session.burst_peak_bytes = max(session.burst_peak_bytes, resident)
    elif session.bursts_ended and resident > max(session.peaks_bytes, default=0):
        if session.peaks_bytes:
            session.peaks_bytes.pop()
        _learn(session, resident)


def _learn(session: Session, peak_bytes: int) -> None:
    before = max(session.peaks_bytes, default=0)
    session.peaks_bytes.append(peak_bytes)
    growth_bytes = max(0, peak_bytes - before)
    session.expected_bytes = max(session.peaks_bytes) + growth_bytes
