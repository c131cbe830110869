"""Raise ``KeyboardInterrupt`` at each single place of some code, one after another.

The interpreter runs signal handlers when a function begins and when a call into C has returned. It
calls a profiler at the same places, so a profiler that raises acts like a signal handler.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kiwi_core.client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

CLIENT = kiwi_core.client.__path__[0]


@contextmanager
def interrupt_at(place: int, folders: tuple[str, ...] = (CLIENT,)) -> Iterator[list[bool]]:
    """Raise ``KeyboardInterrupt`` at the ``place``-th place of the code below ``folders`` that this
    thread passes; the yielded list is filled once it was raised.

    Garbage is not collected meanwhile: a collection that begins in the client's code runs
    destructors and weak references' callbacks, and the interpreter only prints what those raise.
    """
    struck: list[bool] = []
    left = place

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and _is_below(folders, frame):
            left -= 1
            if left < 0:
                struck.append(True)
                raise KeyboardInterrupt  # the interpreter removes the profiler

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(look)
    try:
        yield struck
    except KeyboardInterrupt:
        assert struck
    finally:
        sys.setprofile(before)
        gc.enable()


def _is_below(folders: tuple[str, ...], frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame is not None


def each_place(act: Callable[[], object], folders: tuple[str, ...] = (CLIENT,)) -> Iterator[int]:
    """Interrupt ``act`` at its first place, then at its second, until it ends without an
    interrupt."""
    for place in range(10_000):
        with interrupt_at(place, folders) as struck:
            act()
        if not struck:
            assert place > 5, "nearly nothing was interrupted"
            return
        yield place
    raise AssertionError("this has no end")
