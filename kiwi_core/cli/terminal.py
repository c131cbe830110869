"""Colour, tables and redrawing, for terminals that can and pipes that cannot."""

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
    """Wraps text in SGR codes where ``colour`` is on; returns it as it is elsewhere."""

    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Colour only on a terminal, and never against NO_COLOR (no-color.org) or TERM=dumb."""
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
        """For what nobody may overlook: reversed yellow; capitals do it without colour."""
        return self._wrap("1;7;33", f" {text} ") if self.colour else text

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def printable(text: str) -> str:
    """``text`` without control characters: a notebook's name must not steer the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """``rows`` as aligned lines, two spaces apart; columns in ``right`` are aligned right."""
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
    """``line`` cut off at ``width`` characters, codes for colour not counted."""
    if len(_SGR.sub("", line)) <= width:
        return line
    left, kept = width - 1, []
    for part in _SGR.split(line):
        if part.startswith("\x1b"):
            kept.append(part)  # also behind the cut: what was switched on is switched off
            continue
        if left >= 0:
            kept.append(part[:left] + ("…" if left < len(part) else ""))
        left = left - len(part) if left >= len(part) else -1
    return "".join(kept)


class Keys:
    """Keys that are pressed at the terminal, without Enter and without an echo. None where there is
    no terminal, or where this program runs in its background."""

    def __init__(self) -> None:
        self._terminal: int | None = None

    def __enter__(self) -> Keys:
        import termios
        import tty

        if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
            self._terminal = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)  # Ctrl-C stays what it is
        return self

    def __exit__(self, *_exc: object) -> None:
        import termios

        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def pressed(self) -> str:
        """Return what has been pressed since the last call."""
        if self._terminal is None or not select.select([self._terminal], [], [], 0)[0]:
            return ""
        return os.read(self._terminal, 64).decode("ascii", "ignore")


class Screen:
    """Draws a whole picture again and again on the terminal's other screen, which leaves the
    user's own untouched when it closes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def __enter__(self) -> Screen:
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_exc: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    def draw(self, lines: Sequence[str], foot: str) -> None:
        """Replaces the picture. What does not fit in the window's width is cut off, what does not
        fit in its height is counted; ``foot`` stays below."""
        size = shutil.get_terminal_size()
        room = size.lines - 2  # for the foot, and the line that the cursor stands on
        shown = list(lines)
        if len(shown) > room:
            hidden = len(shown) - room + 1
            shown = [*shown[: room - 1], f"… and {hidden} more lines (make the window higher)"]
        shown = [fit(line, size.columns) for line in (*shown, foot)]
        # Home, each line erased to its end, then everything below: no flicker of a cleared screen.
        self._write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
