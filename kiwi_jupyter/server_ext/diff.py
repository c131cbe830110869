"""Find out what changed between two states of a GPU. Pure: no clock, no I/O.

A change that only the passing of time makes does not count: nothing is sent about an idle machine.
Such fields (``RELATIVE``) are sent when another field of the object changed. Readers count from the
absolute times, and those count as changed only when they moved by more than ``STEADY_S``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kiwi_jupyter.server_ext.model import Gpu, GpuDelta, Session, Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_jupyter.server_ext.model import History

RELATIVE: Final = frozenset(
    {
        "held_s",
        "waited_s",
        "time_left_s",
        "keeps_s",
        "ago_s",
        "uptime_s",
        "expected_wait_s",
        "expected_low_s",
        "expected_high_s",
    }
)
"""Fields that are relative to the moment at which the daemon sent them."""

WAITS: Final = ("waiting_since", "expected_at", "expected_low_at", "expected_high_at")

STEADY_S: Final = 0.3
"""A smaller change is rounding, transmission time or noise of the estimate, not news."""

SEPARATE: Final = frozenset({"sessions", "history"})
"""Fields of a GPU that a delta sends in parts."""

_Record = TypeVar("_Record", Session, Waiter)


def same(a: object, b: object) -> bool:
    """Return whether both are equal except for changes that time alone makes."""
    if a == b:
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Struct) and type(a) is type(b):
        return all(
            name in RELATIVE or same(getattr(a, name), getattr(b, name))
            for name in a.__struct_fields__
        )
    return False


# --- keeping times steady -----------------------------------------------------------------------


def steadied(new: Gpu, old: Gpu) -> Gpu:
    """Return ``new`` with the times of ``old`` where they hardly moved, and sessions in the order
    of their first appearance. ``gpu_record.py`` keeps the times of the history steady."""
    places = {session.id: index for index, session in enumerate(old.sessions)}
    before = {session.id: session for session in old.sessions}
    sessions = [
        _steady(one, before.get(one.id), "turn_ends_at", "keeps_until") for one in new.sessions
    ]
    sessions.sort(key=lambda session: places.get(session.id, len(places)))  # stable
    waited = {entry.session: entry for entry in old.queue}
    return replace(
        new,
        sessions=sessions,
        queue=[_steady(one, waited.get(one.session), *WAITS) for one in new.queue],
    )


def _steady(new: _Record, old: _Record | None, *names: str) -> _Record:
    if old is None or new is old:
        return new
    kept = {}
    for name in names:
        now, before = getattr(new, name), getattr(old, name)
        if now != before and hardly_moved(now, before):
            kept[name] = before
    return replace(new, **kept) if kept else new


def hardly_moved(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and abs(now - before) <= STEADY_S


# --- changes ------------------------------------------------------------------------------------


def changes(old: Gpu | None, new: Gpu) -> GpuDelta | None:
    """Return the change from ``old`` (``None``: nothing) to ``new``; ``None`` if there is none."""
    if old is new:
        return None
    fields = _fields(old, new)
    sessions = _sessions(old.sessions if old else [], new.sessions)
    gone = _gone(old.sessions, new.sessions) if old else []
    history = _history(old.history, new.history) if old else new.history
    if not (fields or sessions or gone or history):
        return None
    return GpuDelta(
        set=fields or None, sessions=sessions or None, gone=gone or None, history=history or None
    )


def _fields(old: Struct | None, new: Struct) -> dict[str, object]:
    """Return the fields of ``new`` that differ; none if only time has passed."""
    names = [name for name in new.__struct_fields__ if name not in SEPARATE]
    if old is None:
        return {name: getattr(new, name) for name in names}
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    if all(name in RELATIVE or same(a, b) for name, a, b in pairs):
        return {}
    return {name: b for name, a, b in pairs if a != b}


def _sessions(old: Iterable[Session], new: Iterable[Session]) -> dict[str, dict[str, object]]:
    before = {session.id: session for session in old}
    found = {}
    for session in new:
        known = before.get(session.id)
        if known != session and (fields := _fields(known, session)):
            found[session.id] = fields
    return found


def _gone(old: Iterable[Session], new: Iterable[Session]) -> list[str]:
    there = {session.id for session in new}
    return [session.id for session in old if session.id not in there]


def _history(old: list[History], new: list[History]) -> list[History]:
    if old is new:  # the usual case; there may be thousands
        return []
    known = {entry.id: entry for entry in old}
    return [entry for entry in new if known.get(entry.id) != entry]
