"""Colour, tables and redrawing for terminals, and plain text for pipes."""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Style:
    """Wraps text in SGR codes if ``colour`` is on; otherwise returns it unchanged."""

    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Use colour only on a terminal, and not with NO_COLOR (no-color.org) or TERM=dumb."""
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(wanted and stream.isatty())

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def red(self, text: str) -> str:
        return self._wrap("31", text)

    def green(self, text: str) -> str:
        return self._wrap("32", text)

    def yellow(self, text: str) -> str:
        return self._wrap("33", text)

    def loud(self, text: str) -> str:
        """Mark what nobody may overlook in reversed yellow, or in capitals where there is no
        colour.
        """
        return self._wrap("1;7;33", f" {text} ") if self.colour else text

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def printable(text: str) -> str:
    """Return ``text`` without control characters: a notebook's name must not steer the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Return ``rows`` as lines with columns two spaces apart; those in ``right`` align right."""
    aligned_right = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if index in aligned_right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


_SGR = re.compile(r"(\x1b\[[0-9;]*m)")


def fit(line: str, width: int) -> str:
    """Return ``line`` cut off at ``width`` characters, not counting codes for colour."""
    if len(_SGR.sub("", line)) <= width:
        return line
    left, kept = width - 1, []
    for part in _SGR.split(line):
        if part.startswith("\x1b"):
            kept.append(part)  # also after the cut, so that colour is switched off again
            continue
        if left >= 0:
            kept.append(part[:left] + ("…" if left < len(part) else ""))
        left = left - len(part) if left >= len(part) else -1
    return "".join(kept)


class Keys:
    """Reads keys pressed at the terminal, without Enter and echo. It reads none if there is no
    terminal, or this program runs in the background."""

    def __init__(self) -> None:
        self._terminal: int | None = None

    def __enter__(self) -> Keys:
        import termios
        import tty

        if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
            self._terminal = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)  # Ctrl-C still interrupts
        return self

    def __exit__(self, *_exc: object) -> None:
        import termios

        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def pressed(self) -> str:
        """Return the keys pressed since the last call."""
        if self._terminal is None or not select.select([self._terminal], [], [], 0)[0]:
            return ""
        return os.read(self._terminal, 64).decode("ascii", "ignore")


class Screen:
    """Redraws a whole picture on the terminal's alternate screen, which leaves the user's own
    screen unchanged."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def __enter__(self) -> Screen:
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_exc: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    def draw(self, lines: Sequence[str], foot: str) -> None:
        """Replace the picture. Lines are cut at the window's width; those below its height are
        counted; ``foot`` stays at the bottom."""
        size = shutil.get_terminal_size()
        room = size.lines - 2  # less the foot and the cursor's line
        shown = list(lines)
        if len(shown) > room:
            hidden = len(shown) - room + 1
            shown = [*shown[: room - 1], f"… and {hidden} more lines (make the window higher)"]
        shown = [fit(line, size.columns) for line in (*shown, foot)]
        # Go home, erase each line to its end, then all below: a cleared screen would flicker.
        self._write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
