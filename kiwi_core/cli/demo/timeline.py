"""Follow the daemon's journal and describe its decisions while they happen."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kiwi_core.cli.history import Historian, HistoryRun
from kiwi_core.errors import KiwiError
from kiwi_core.sched import actions as ac
from kiwi_core.sched import events as ev
from kiwi_core.sched.replay import JournalEntry, JournalHeader, Replay, decode_line, goes_on
from kiwi_core.states import Notice
from kiwi_core.units import NS_PER_S, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Timeline(threading.Thread):
    """A thread that passes each line to ``say(at_ns, text)``; ``name`` names a session."""

    def __init__(
        self, journal: Path, name: Callable[[str], str], say: Callable[[int, str], None]
    ) -> None:
        super().__init__(name="timeline", daemon=True)
        self.suspensions: Counter[str] = Counter()
        self._replay: Replay | None = None
        self._historian: Historian | None = None
        self._tq_ns = 0
        self._journal = journal
        self._name = name
        self._say = say
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Take what has been written so far, then end."""
        self._stopping.set()
        self.join(10)

    def run(self) -> None:
        rest = b""
        with self._journal.open("rb") as file:
            while True:
                stopping = self._stopping.is_set()
                rest = self._take(rest + file.read())
                if stopping:
                    return
                self._stopping.wait(0.02)

    def _take(self, data: bytes) -> bytes:
        *lines, rest = data.split(b"\n")
        for line in lines:
            try:
                record = decode_line(line)
            except KiwiError:
                continue
            if isinstance(record, JournalHeader):
                self._tq_ns = record.tq_ns
                if self._replay is None or not goes_on(record):
                    self._replay = Replay(record)
                    self._historian = Historian(record, self._replay.scheduler)
            elif self._replay is not None and self._historian is not None:
                self._replay.feed(record)
                self._historian.feed(record)
                for text in self._words(record):
                    self._say(record.now_ns, text)
        return rest

    def history(self) -> HistoryRun:
        """Return the history of leases, waits and moves. Call this once, after ``stop``."""
        if self._historian is None or self._replay is None:
            return HistoryRun(gpu_uuid="", began_at_unix_s=0.0)
        return self._historian.finish(self._replay.differences)

    def _words(self, entry: JournalEntry) -> Iterator[str]:
        event = entry.event
        if isinstance(event, ev.LeaseRequested):
            granted = any(isinstance(a, ac.Grant) and a.session == event.session
                          for a in entry.actions)  # fmt: skip
            if not granted:
                yield f"{self._name(event.session)} WAITS for the GPU"
        elif isinstance(event, ev.BurstEnded):
            yield f"{self._name(event.session)} is done and gives the GPU up"
        elif isinstance(event, (ev.PagedOut, ev.PagedIn)):
            way = "out to system RAM" if isinstance(event, ev.PagedOut) else "back in the GPU"
            seconds = max(event.elapsed_ns, 1) / NS_PER_S
            speed = event.moved_bytes / seconds / 1e9
            yield (f"  memory {way}: {format_bytes(event.moved_bytes)} in {seconds:.2f} s "
                   f"({speed:.1f} GB/s)")  # fmt: skip
        for action in entry.actions:
            name = self._name(action.session)
            if isinstance(action, ac.Grant):
                turn = f"{action.quantum_ns / NS_PER_S:.1f} s"
                if action.quantum_ns > self._tq_ns:
                    # By the policy (a cell that has run long) or by the cost of a swap.
                    usual = f"{self._tq_ns / NS_PER_S:.1f}"
                    turn += f" (not {usual}: longer turns, fewer moves of memory)"
                yield f"{name} HAS THE GPU, for {turn} if others wait"
            elif isinstance(action, ac.Notify) and action.notice is Notice.SUSPENDED:
                self.suspensions[action.session] += 1
                yield f"{name} is SUSPENDED in the middle of its cell; it is queued again by itself"
            elif isinstance(action, ac.PageOut):
                yield f"  {name}'s memory begins to move out"
            elif isinstance(action, ac.PageIn):
                yield f"  {name}'s memory begins to come back"
