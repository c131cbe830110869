"""Find out whether the current thread is in the outermost cell, in a nested one, or in none.

Counting hook calls fails (an empty cell fires ``post_execute`` without ``pre_execute``, a silent
one skips half of them, ``run_cell_async`` may be called by hand); the stack does not.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell

if TYPE_CHECKING:
    from types import FrameType

_RUNS_A_CELL = InteractiveShell.run_cell_async.__code__
_PARSE = CachingCompiler.ast_parse


def cells_on_stack(stop_at: int = 2) -> int:
    """Return how many cells this thread is in the middle of running, counted up to ``stop_at``."""
    return len(_cells(stop_at))


def is_silent() -> bool:
    """Return whether the innermost running cell was asked to be silent."""
    frames = _cells(1)
    return bool(frames) and bool(frames[0].f_locals.get("silent"))


def parsed_from(node: object) -> str | None:
    """Return the text that IPython has just parsed into ``node``; ``None`` if that is not certain.

    The caller replaces ``transform_ast`` and has not called a transformer yet.
    """
    caller = sys._getframe(1).f_back
    if caller is None or caller.f_code is not _RUNS_A_CELL:
        return None  # the body of a magic, or another replacement in between
    names = caller.f_locals
    text, compiler = names.get("cell"), names.get("compiler")
    if names.get("code_ast") is not node or type(text) is not str:
        return None
    if getattr(getattr(compiler, "ast_parse", None), "__func__", None) is not _PARSE:
        return None  # another library's compiler
    return text


def _cells(stop_at: int) -> list[FrameType]:
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < stop_at:
        if frame.f_code is _RUNS_A_CELL:
            found.append(frame)
        frame = frame.f_back
    return found
