"""Lines below code that runs without a turn, drawn by another thread while a call holds it."""

from __future__ import annotations

import contextvars
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kiwi_jupyter.kernel.display import CellWaitLine, screens_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_jupyter.kernel.config import Kiwi
    from kiwi_jupyter.kernel.display import Screen


class LinesBelow:
    """``bystander_begins`` and ``bystander_ends`` enclose a cell without a turn. The other methods
    may be called in any thread."""

    def __init__(self, shell: Any, config: Kiwi) -> None:
        self._shell = shell
        self._config = config
        self._lock = threading.RLock()
        self._bystander: contextvars.Context | None = None
        """The context variables of the cell that runs without a turn, copied in its own thread, so
        that another thread can draw below it."""
        self._below: CellWaitLine | None = None
        """The line below that cell while a driver call holds it."""

    def bystander_begins(self) -> None:
        self._bystander = contextvars.copy_context()

    def bystander_ends(self) -> None:
        with self._lock:
            self._bystander, below, self._below = None, self._below, None
        if below is not None:
            below.close()

    def unforeseen(self) -> CellWaitLine | None:
        """Return a line below the cell that runs without a turn. It ends with that cell."""
        with self._lock:
            if self._bystander is None:
                return None
            screens = self._bystander.run(screens_for, self._shell)
            self._below = self.held(screens())
            return self._below

    @contextmanager
    def callback(self, *, a_cell_has_the_gpu: bool) -> Iterator[None]:
        """Let a call show its wait that code makes which is not a cell: the callback of a widget.
        Its line is below the widget; below the cell if one runs."""
        with self._lock:
            alone = self._bystander is None and not a_cell_has_the_gpu
            if alone:
                self.bystander_begins()
        try:
            yield
        finally:
            if alone:
                self.bystander_ends()

    def here(self) -> CellWaitLine:
        """Return a line for code of this thread that is not a cell."""
        return self.held(screens_for(self._shell)())

    def held(self, screen: Screen) -> CellWaitLine:
        """Return a line for code that a driver call holds."""
        return CellWaitLine(screen, delay_s=self._config.waiting_line_delay_s, hint="")
