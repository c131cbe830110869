"""Judge from the journal whether the demo kept its promises: who held, who waited, what moved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.sched import actions as ac
from kiwi_core.sched import events as ev
from kiwi_core.states import Notice
from kiwi_core.units import NS_PER_S, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.replay import JournalEntry


@dataclass
class SessionRecord:
    """What the journal says of one session. ``held`` has pairs ``(from_ns, to_ns)``."""

    held: list[tuple[int, int]] = field(default_factory=list)
    waits_ns: list[int] = field(default_factory=list)
    suspensions: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


class Ledger:
    """Reads a journal's entries into one ``SessionRecord`` per session."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        self.records: dict[str, SessionRecord] = {}
        self._since: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._moving: dict[int, str] = {}
        self._last_ns = 0
        for entry in entries:
            self._last_ns = entry.now_ns
            self._event(entry)
            for action in entry.actions:
                self._action(entry.now_ns, action)
        for session in list(self._since):
            self._end_hold(session, self._last_ns)

    def overlaps(self) -> int:
        """Return how often two sessions held the GPU at the same time."""
        spans = sorted((a, b, s) for s, r in self.records.items() for a, b in r.held)
        pairs = itertools.pairwise(spans)
        return sum(one[1] > other[0] and one[2] != other[2] for one, other in pairs)

    def _record(self, session: str) -> SessionRecord:
        return self.records.setdefault(session, SessionRecord())

    def _event(self, entry: JournalEntry) -> None:
        event = entry.event
        if isinstance(event, ev.LeaseRequested):
            self._waiting.setdefault(event.session, entry.now_ns)
        elif isinstance(event, (ev.BurstEnded, ev.LeaseWithdrawn, ev.SessionLost)):
            self._waiting.pop(event.session, None)
            self._end_hold(event.session, entry.now_ns)
        elif isinstance(event, (ev.PagedOut, ev.PagedIn)):
            record = self._record(self._moving.pop(event.op, "?"))
            if isinstance(event, ev.PagedOut):
                record.bytes_out += event.moved_bytes
            else:
                record.bytes_in += event.moved_bytes

    def _action(self, now_ns: int, action: ac.Action) -> None:
        session = action.session
        if isinstance(action, ac.Grant):
            if session in self._waiting:
                self._record(session).waits_ns.append(now_ns - self._waiting.pop(session))
            self._since.setdefault(session, now_ns)
        elif isinstance(action, ac.Notify) and action.notice is Notice.SUSPENDED:
            self._record(session).suspensions += 1
            self._waiting[session] = now_ns
        elif isinstance(action, (ac.PageOut, ac.PageIn)):
            self._moving[action.op] = session
        if isinstance(action, (ac.Suspend, ac.PageOut)):
            self._end_hold(session, now_ns)

    def _end_hold(self, session: str, now_ns: int) -> None:
        since = self._since.pop(session, None)
        if since is not None:
            self._record(session).held.append((since, now_ns))


def verdict(
    entries: list[JournalEntry], letters: dict[str, str], intact: dict[str, bool]
) -> tuple[bool, list[str]]:
    """Return whether all promises were kept, and lines with each promise and its numbers."""
    ledger = Ledger(entries)
    start_ns = entries[0].now_ns if entries else 0
    lines: list[str] = []
    for session, letter in sorted(letters.items(), key=lambda item: item[1]):
        lines += _of_one(ledger.records.get(session, SessionRecord()), letter, start_ns)
    overlaps = ledger.overlaps()
    suspended = sum(ledger.records.get(s, SessionRecord()).suspensions for s in letters)
    moved = sum(r.bytes_out for r in ledger.records.values())
    checks = [
        (all(intact.values()) and len(intact) == len(letters), "every byte intact in both"),
        (overlaps == 0, f"at most one holder at any moment ({overlaps} overlaps)"),
        (suspended > 0, f"a cell was suspended in its middle and went on ({suspended} times)"),
        (moved > 0, f"memory moved out to system RAM and back ({format_bytes(moved)} out)"),
    ]
    lines += [f"  {'ok  ' if good else 'FAIL'}  {text}" for good, text in checks]
    return all(good for good, _ in checks), lines


def _of_one(record: SessionRecord, letter: str, start_ns: int) -> list[str]:
    spans = ", ".join(
        f"{(a - start_ns) / NS_PER_S:.1f}–{(b - start_ns) / NS_PER_S:.1f}" for a, b in record.held
    )
    waits = ", ".join(f"{w / NS_PER_S:.1f}" for w in record.waits_ns if w > NS_PER_S // 20)
    return [
        f"  {letter} held the GPU (s): {spans or 'never'}",
        (
            f"  {letter} waited (s): {waits or 'never'}; suspended {record.suspensions} times; "
            f"{format_bytes(record.bytes_out)} out, {format_bytes(record.bytes_in)} in"
        ),
    ]
