"""Compute what a status would say now: the measured values plus the time since. Pure.

Daemons send a status when something changes, so the last status of a quiet GPU may be minutes old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from kiwi_jupyter.server_ext.model import Gpu, Session, Waiter


def aged(gpu: Gpu, now: float, elapsed_s: float) -> Gpu:
    """Return ``gpu`` as it is at ``now``, ``elapsed_s`` after its daemon's last status; unchanged
    if its daemon is away.
    """
    if not gpu.reachable or elapsed_s <= 0:
        return gpu
    waiting = {entry.session for entry in gpu.queue}
    holders = set(gpu.holders)
    return replace(
        gpu,
        uptime_s=gpu.uptime_s + elapsed_s,
        swaps=[replace(swap, ago_s=swap.ago_s + elapsed_s) for swap in gpu.swaps],
        queue=[_aged_waiter(entry, now) for entry in gpu.queue],
        sessions=[
            _aged_session(session, now, elapsed_s, session.id in holders, session.id in waiting)
            for session in gpu.sessions
        ],
    )


def _aged_waiter(entry: Waiter, now: float) -> Waiter:
    return replace(
        entry,
        waited_s=max(0.0, now - entry.waiting_since),
        expected_wait_s=_left(entry.expected_at, now),
        expected_low_s=_left(entry.expected_low_at, now),
        expected_high_s=_left(entry.expected_high_at, now),
    )


def _aged_session(
    session: Session, now: float, elapsed_s: float, holds: bool, waits: bool
) -> Session:
    if not (holds or waits or session.keeps_until is not None):
        return session
    return replace(
        session,
        held_s=session.held_s + elapsed_s * holds,
        waited_s=session.waited_s + elapsed_s * waits,
        time_left_s=_left(session.turn_ends_at, now),
        keeps_s=_left(session.keeps_until, now),
    )


def _left(ends_at: float | None, now: float) -> float | None:
    return None if ends_at is None else max(0.0, ends_at - now)
