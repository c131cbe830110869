"""Everything that happened on one GPU, as NDJSON, for ``kiwi replay``.

Each daemon begins a new file, and begins another when that is full; earlier ones are kept as ``.1``
… A full disk costs the journal some lines (they are counted and the gap is marked), but never stops
the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import IO, TYPE_CHECKING

import msgspec
import structlog

from kiwi_core.sched.replay import JournalEntry, JournalHeader, encode_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event

log = structlog.get_logger(__name__)

DELAY_S = 0.005
"""Longest delay of a write; a killed daemon may lose as much. Operations wait for the journal."""

KEPT = 4
"""Number of earlier journals kept beside the current one."""

RETRY_S = 5.0
"""Pause after a failed write."""


class Journal:
    """The core calls ``record``, which only stores an event, before any subscriber gets the step.
    As a subscriber (``steps``) itself, the journal sees to it that the event is written soon."""

    def __init__(self, path: Path, header: JournalHeader, max_bytes: int) -> None:
        self._path = path
        self._header = header
        self._max_bytes = max_bytes
        self._pending: list[tuple[int, Event, Sequence[Action]]] = []
        self._size_bytes = 0
        self._gap = 0
        self._retry_at_s = 0.0
        self._file: IO[bytes] | None = None
        self._flush_due = False
        self.dropped = 0
        """Number of lines lost."""
        if not self._begin(header):
            self._failed(0)

    def after(self, _step: Step) -> None:
        if not self._flush_due:
            # Write after the grant has left, and after the next request of a client that loops
            # quickly: a waiting client must not wait for the journal.
            def flush() -> None:
                self._flush_due = False
                self.flush()

            self._flush_due = True
            asyncio.get_running_loop().call_later(DELAY_S, flush)

    def record(self, now_ns: int, event: Event, actions: Sequence[Action]) -> None:
        self._pending.append((now_ns, event, actions))

    def flush(self) -> None:
        entries, self._pending = self._pending, []
        if not entries:
            return
        if self._gap and not self._mend():
            self._lost(len(entries))
            return
        data = b"".join(
            encode_line(JournalEntry(now_ns=now_ns, event=event, actions=list(actions)))
            for now_ns, event, actions in entries
        )
        full = self._size_bytes + len(data) > self._max_bytes
        ready = self._begin(self._continued(0)) if full else True
        if not ready or not self._append(data):
            self._failed(len(entries))

    def begin_again(self) -> None:
        """Continue in a new file if the current one has lost its name."""
        if not self._path.exists() and not self._begin(self._continued(0)):
            self._failed(0)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    # --- files ----------------------------------------------------------------------------------

    def _begin(self, header: JournalHeader) -> bool:
        """Begin a new file with ``header``; rename the old ones."""
        try:
            if self._file is not None:
                self._file.close()
                self._file = None
            for number in range(KEPT, 0, -1):
                newer = self._path if number == 1 else self._numbered(number - 1)
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(self._numbered(number))
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            log.error("no journal", path=str(self._path), why=str(error))
            return False
        self._size_bytes = 0
        return self._append(encode_line(header))

    def _append(self, data: bytes) -> bool:
        """Write all of ``data`` or nothing: after half a line nothing would be readable."""
        if self._file is None:
            return False
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            log.error("journal not written", path=str(self._path), why=str(error))
            with contextlib.suppress(OSError):
                self._file.truncate(self._size_bytes)
                self._file.seek(self._size_bytes)
            return False
        self._size_bytes += len(data)
        return True

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    # --- gaps -----------------------------------------------------------------------------------

    def _continued(self, lost_entries: int) -> JournalHeader:
        return msgspec.structs.replace(
            self._header, continued=True, lost_entries=lost_entries, wall_time_s=time.time()
        )

    def _failed(self, entries: int) -> None:
        # At least one, so that a header that failed is written again, too.
        self._lost(max(1, entries))
        self._retry_at_s = time.monotonic() + RETRY_S

    def _lost(self, entries: int) -> None:
        self._gap += entries
        self.dropped += entries

    def _mend(self) -> bool:
        """Continue after a gap, marked by a header. Use the same file, if there is one, so that a
        full disk does not push out the old ones."""
        if time.monotonic() < self._retry_at_s:
            return False
        header = self._continued(self._gap)
        mended = self._begin(header) if self._file is None else self._append(encode_line(header))
        if mended:
            log.warning("journal goes on", lost_entries=self._gap)
            self._gap = 0
        else:
            self._retry_at_s = time.monotonic() + RETRY_S
        return mended
