"""Where in IPython the current thread is: in the outermost cell, in one nested in it, in none.

Counting hook calls fails (an empty cell fires ``post_execute`` without ``pre_execute``, a silent
one skips half of them, ``run_cell_async`` may be called by hand); the stack does not.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell

if TYPE_CHECKING:
    from types import FrameType

_RUNS_A_CELL = InteractiveShell.run_cell_async.__code__


def cells_on_stack(stop_at: int = 2) -> int:
    """How many cells this thread is in the middle of running, counted up to ``stop_at``."""
    return len(_cells(stop_at))


def is_silent() -> bool:
    """Whether the innermost running cell was asked to be silent."""
    frames = _cells(1)
    return bool(frames) and bool(frames[0].f_locals.get("silent"))


def _cells(stop_at: int) -> list[FrameType]:
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < stop_at:
        if frame.f_code is _RUNS_A_CELL:
            found.append(frame)
        frame = frame.f_back
    return found
