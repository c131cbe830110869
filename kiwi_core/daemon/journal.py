"""Everything that happened on one GPU, as NDJSON: what ``kiwi replay`` reads.

Each daemon begins a new file and keeps the previous ones as ``.1`` … A disk that is full costs
the journal some lines (they are counted and the gap is marked), never the daemon.
"""

from __future__ import annotations

import contextlib
from typing import IO, TYPE_CHECKING

import structlog

from kiwi_core.sched.replay import JournalEntry, JournalHeader, encode_line

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event

log = structlog.get_logger(__name__)

KEPT = 4
"""Earlier journals kept beside the current one."""


class Journal:
    """``record`` only remembers; ``flush`` writes, and is called soon after by the loop."""

    def __init__(self, path: Path, header: JournalHeader, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._pending: list[JournalEntry] = []
        self._size_bytes = 0
        self.dropped = 0
        self.full = False
        self._file: IO[bytes] | None = self._begin(header)

    @property
    def path(self) -> Path:
        return self._path

    def record(self, now_ns: int, event: Event, actions: list[Action]) -> None:
        self._pending.append(JournalEntry(now_ns=now_ns, event=event, actions=actions))

    def flush(self) -> None:
        entries, self._pending = self._pending, []
        if self._file is None or self.full:
            self.dropped += len(entries)
            return
        data = b"".join(encode_line(entry) for entry in entries)
        if self._size_bytes + len(data) > self._max_bytes:
            self.full = True
            self.dropped += len(entries)
            log.warning("journal full; no more is recorded until the daemon restarts",
                        path=str(self._path), limit_bytes=self._max_bytes)  # fmt: skip
            return
        self._write(data, len(entries))

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, data: bytes, lines: int) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
            self._size_bytes += len(data)
        except OSError as error:
            if not self.dropped:
                log.error("journal not written", why=str(error))
            self.dropped += lines

    def _begin(self, header: JournalHeader) -> IO[bytes] | None:
        try:
            self._rotate()
            file = self._path.open("wb", buffering=0)
            file.write(encode_line(header))
        except OSError as error:
            log.error("no journal", path=str(self._path), why=str(error))
            return None
        return file

    def _rotate(self) -> None:
        for number in range(KEPT, 0, -1):
            newer = self._path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                newer.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
