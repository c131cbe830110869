"""The line that is shown while a cell waits for the GPU, and of which nothing stays.

In a notebook it is one output that is updated in place (never ``clear_output``, which would wipe
what the cell has printed) and emptied at the end; in a terminal, one line on stderr.
"""

from __future__ import annotations

import html
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.words import share_done, waiting_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.wire.messages import Waiting

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
"""Below each wait, so that who needs the override finds it."""

_BAR: Final = "height:100%;background:var(--jp-brand-color1,#2196f3)"


def as_html(text: str, share: float | None) -> str:
    bar = ""
    if share is not None:
        percent = round(100 * share)
        bar = (
            f'<div style="{_TRACK}" role="progressbar" aria-valuemin="0" aria-valuemax="100"'
            f' aria-valuenow="{percent}" aria-label="Wait for the GPU">'
            f'<div style="{_BAR};width:{percent}%"></div></div>'
        )
    hint = f'<div style="{_HINT}">{CPU_WORK}</div>'
    return f'<div role="status" style="{_STYLE}">{html.escape(text)}{bar}</div>{hint}'


class WaitingLine:
    """Shows nothing for the first ``delay_s``. ``publish(text, html)`` is the screen: called
    again and again, at last with two empty strings if anything was shown."""

    def __init__(
        self,
        publish: Callable[[str, str], None],
        *,
        delay_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self._delay_s = delay_s
        self._clock = clock
        self._began_s = clock()
        self._drawn_s: float | None = None
        self._shown = ""

    def due_in_s(self) -> float:
        """How long nothing is going to be shown yet."""
        return max(0.0, self._began_s + self._delay_s - self._clock())

    def show(self, waiting: Waiting | None) -> None:
        waited_s = self._clock() - self._began_s
        self.say(waiting_line(waiting, waited_s), share_done(waiting, waited_s))

    def say(self, text: str, share: float | None = None) -> None:
        now_s = self._clock()
        if now_s - self._began_s < self._delay_s:
            return
        if text == self._shown and self._drawn_s is not None and now_s - self._drawn_s < REDRAW_S:
            return
        self._shown, self._drawn_s = text, now_s
        self._publish(text, as_html(text, share))

    def close(self) -> None:
        if self._drawn_s is not None:
            self._drawn_s = None
            self._publish("", "")


def screen_for(shell: Any, *, silent: bool = False) -> Callable[[str, str], None]:
    """Where this shell shows the line."""
    if silent:
        return lambda _text, _html: None
    if getattr(shell, "kernel", None) is not None:
        return _NotebookScreen()
    return _terminal_screen


class _NotebookScreen:
    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, text: str, markup: str) -> None:
        from IPython.display import display

        bundle = {"text/plain": text}
        if markup:
            bundle["text/html"] = markup
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _terminal_screen(text: str, _markup: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
