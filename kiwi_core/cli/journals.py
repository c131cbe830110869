"""Read a daemon's journal from a file or standard input."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kiwi_core.cli.common import warn
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from kiwi_core.sched.replay import JournalEntry, JournalHeader


def opened(name: str) -> AbstractContextManager[IO[bytes]]:
    """Open a journal; ``-`` is standard input. Raises ``CallerError("no-journal")``."""
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise CallerError(
            "no-journal",
            f"{name} cannot be read: {error.strerror}.",
            "Journals are in the daemon's state directory: see kiwi replay --help.",
        ) from error


def records(file: IO[bytes]) -> Iterator[JournalHeader | JournalEntry]:
    """Yield the journal's records. Leave out a last line cut short by a crash, with a warning."""
    from kiwi_core.sched.replay import decode_line

    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = decode_line(line)
        except CallerError as error:
            if not line.endswith(b"\n"):
                warn(f"Line {number}, the last one, was cut short and is left out.")
                return
            raise CallerError(
                error.code, f"Line {number}: {error.message}", error.remedy
            ) from error
        yield record
