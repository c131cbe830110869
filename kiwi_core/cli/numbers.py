"""Numbers on the command line: each function returns a ``type`` for argparse, with its limits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def number(least: float, most: float, what: str = "a number") -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} to {most:g}")
        return value

    return parse


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """``most`` is ``None``: there is no upper limit."""
    limits = f"{least} on" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        said = text.strip()
        value = int(said) if said.isdecimal() else -1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {limits}")
        return value

    return parse
