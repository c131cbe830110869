"""The line that is shown while a cell waits for the GPU. No notebook file keeps any of it.

A kernel sends the line as ``comm_msg`` messages of a comm that nobody has opened. These are no
outputs, so nothing that saves outputs can keep them: whoever runs the cell (a browser, a server, a
script, an agent) ignores a comm that it does not know. Kiwi's JupyterLab extension draws the line
below the cell. A kernel never guesses who listens. In IPython's terminal, without a kernel, it is
one line on stderr. ``docs/internals/kernel.md`` has the reasons.
"""

from __future__ import annotations

import html
import re
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.words import share_done, waiting_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from kiwi_core.wire.messages import Waiting

    Screen: TypeAlias = Callable[[str, str], None]

REDRAW_S: Final = 1.0
"""The least time between two drawings of an unchanged state: the bar moves on."""

_STYLE: Final = (
    "font-family:var(--jp-ui-font-family,sans-serif);"
    "font-size:var(--jp-ui-font-size1,13px);"
    "color:var(--jp-ui-font-color1,inherit);max-width:36em"
)
_TRACK: Final = (
    "height:4px;margin-top:4px;border-radius:2px;overflow:hidden;"
    "background:var(--jp-border-color2,rgba(128,128,128,.3))"
)
_HINT: Final = (
    "margin-top:4px;font-family:var(--jp-ui-font-family,sans-serif);"
    "font-size:var(--jp-ui-font-size0,11px);color:var(--jp-ui-font-color2,inherit)"
)
CPU_WORK: Final = (
    "Is this CPU work? Interrupt the wait (■), write <code>%%kiwi cpu</code> above the cell, and"
    " run it again."
)
"""Text below each wait, so that users who need the override find it."""

_BAR: Final = "height:100%;background:var(--jp-brand-color1,#2196f3)"


def marked(text: str) -> str:
    """Return a text as HTML, with its `commands` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def as_html(text: str, share: float | None, hint: str = CPU_WORK) -> str:
    bar = ""
    if share is not None:
        percent = round(100 * share)
        bar = (
            f'<div style="{_TRACK}" role="progressbar" aria-valuemin="0" aria-valuemax="100"'
            f' aria-valuenow="{percent}" aria-label="Wait for the GPU">'
            f'<div style="{_BAR};width:{percent}%"></div></div>'
        )
    below = f'<div style="{_HINT}">{hint}</div>' if hint else ""
    return f'<div role="status" style="{_STYLE}">{marked(text)}{bar}</div>{below}'


class CellWaitLine:
    """The line of one wait. It shows nothing for the first ``delay_s``. ``publish(text, html)`` is
    the screen: it is called for each drawing, and at last with two empty strings if anything was
    shown. ``hint`` is HTML below the line.

    Any thread may call it: the thread that draws may be another than the one whose cell ends.
    """

    def __init__(
        self,
        publish: Callable[[str, str], None],
        *,
        delay_s: float,
        hint: str = CPU_WORK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self._delay_s = delay_s
        self._hint = hint
        self._clock = clock
        self._began_s = clock()
        self._drawn_s: float | None = None
        self._shown = ""
        self._lock = threading.Lock()
        self.closed = False

    def due_in_s(self) -> float:
        """Return the time until anything is shown."""
        return max(0.0, self._began_s + self._delay_s - self._clock())

    def show(self, waiting: Waiting | None) -> None:
        waited_s = self._clock() - self._began_s
        self.say(waiting_line(waiting, waited_s), share_done(waiting, waited_s))

    def say(self, text: str, share: float | None = None) -> None:
        with self._lock:
            now_s = self._clock()
            drawn_s = self._drawn_s
            if self.closed or now_s - self._began_s < self._delay_s:
                return
            if text == self._shown and drawn_s is not None and now_s - drawn_s < REDRAW_S:
                return
            self._shown, self._drawn_s = text, now_s
            self._publish(text, as_html(text, share, self._hint))

    def close(self) -> None:
        """Remove the line. Nothing is drawn after this."""
        with self._lock:
            if not self.closed and self._drawn_s is not None:
                self._publish("", "")
            self.closed = True


def nowhere(_text: str, _markup: str) -> None:
    """Show nothing."""


def on_no_screen() -> Screen:
    return nowhere


def screens_for(shell: Any, *, silent: bool = False) -> Callable[[], Screen]:
    """Return a function that makes a screen for each line of the cell that runs in this thread."""
    if silent:
        return on_no_screen
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return lambda: _terminal_screen
    request = kernel.get_parent()
    return lambda: _NotebookScreen(kernel, request)


WAIT_ID: Final = "kiwi-wait-"
"""Prefix of the comm ids of waiting lines; the labextension looks for it."""


class _NotebookScreen:
    """Draws the line of one wait. ``request`` is the message that started the cell, which names the
    cell only if JupyterLab's own page sent it, or the message to a widget.
    """

    def __init__(self, kernel: Any, request: Any) -> None:
        self._kernel = kernel
        self._request = request
        self._comm_id = WAIT_ID + uuid.uuid4().hex

    def __call__(self, text: str, markup: str) -> None:
        cell = (self._request.get("metadata") or {}).get("cellId")
        widget = (self._request.get("content") or {}).get("comm_id")
        content = {
            "comm_id": self._comm_id,
            "data": {"cell": cell, "widget": widget, "text": text, "html": markup},
        }
        kernel = self._kernel
        kernel.session.send(
            kernel.iopub_socket,
            "comm_msg",
            content,
            parent=self._request,
            ident=f"comm-{self._comm_id}".encode(),
        )


def _terminal_screen(text: str, _markup: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
