"""What ends a wait in a cell: an interrupt, or that its GPU memory is lost."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kiwi_jupyter.kernel.words import INTERRUPTED, LOST

if TYPE_CHECKING:
    from collections.abc import Iterator


class Interrupted(KeyboardInterrupt):
    """Shown as one line. The class is renamed to ``KeyboardInterrupt``, because front ends look at
    the name.
    """

    def _render_traceback_(self) -> list[str]:
        return [INTERRUPTED]


class GpuMemoryLostError(RuntimeError):
    """Raised in place of the cell, whose CUDA calls could only fail, or never return."""

    def _render_traceback_(self) -> list[str]:
        return [LOST]


GpuMemoryLostError.__name__ = GpuMemoryLostError.__qualname__ = "GpuMemoryLost"
Interrupted.__name__ = Interrupted.__qualname__ = "KeyboardInterrupt"


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise ``KeyboardInterrupt``, whatever handler the kernel has installed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
