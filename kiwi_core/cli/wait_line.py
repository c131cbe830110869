"""The line on standard error that shows the wait for the GPU."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

from kiwi_core.cli.terminal import printable
from kiwi_core.units import format_duration_s
from kiwi_core.wire.words import waiting_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.wire.messages import Waiting

QUIET_S: Final = 0.3
"""A shorter wait is not worth a line."""

REPEAT_S: Final = 10.0
"""Time between two plain lines in a log file."""


class TerminalWaitLine:
    """A line that is redrawn and removed on a terminal; elsewhere a plain line now and then."""

    def __init__(
        self, stream: TextIO | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock_s = clock_s
        self._live = self._stream.isatty()
        self._began_s = clock_s()
        self._due_s = self._began_s + QUIET_S
        self.shown = False

    def show(self, waiting: Waiting) -> None:
        now_s = self._clock_s()
        if now_s < self._due_s:
            return
        self.shown = True
        text = printable(waiting_text(waiting))
        if self._live:
            width = shutil.get_terminal_size().columns
            self._write(f"\r\x1b[K{text[: width - 1]}")
        else:
            self._due_s = now_s + REPEAT_S
            self._write(f"kiwi: {text}\n")

    def granted(self) -> None:
        """End the wait: clear the line on a terminal; in a log, say how long the wait was."""
        if self._live:
            self.clear()
        elif self.shown:
            waited_s = self._clock_s() - self._began_s
            self._write(f"kiwi: The GPU is yours, after {format_duration_s(waited_s)}.\n")

    def clear(self) -> None:
        if self._live and self.shown:
            self._write("\r\x1b[K")
            self.shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
