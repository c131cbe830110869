"""The exit codes, as ``kiwi --help`` documents them."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
CANNOT_EXECUTE: Final = 126
"""``kiwi run``: the program exists but cannot be executed; shells use the same code."""
NOT_FOUND: Final = 127
"""``kiwi run``: there is no such program; shells use the same code."""
INTERRUPTED: Final = 130
"""128 + SIGINT."""
BROKEN_PIPE: Final = 141
"""128 + SIGPIPE: what a shell would report if Kiwi did not handle the signal."""


def of_signal(number: int) -> int:
    """Return the exit code that a shell reports for a program that a signal ended."""
    return 128 + number
