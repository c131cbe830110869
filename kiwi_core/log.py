"""Structured logs on standard error: key=value for people, JSON lines for machines."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

LINES_MOST: Final = 1000
"""Most lines of one kind (with the same event) in a row: a thousand notebooks may join at once."""

LINES_PER_S: Final = 10
"""Lines of one kind written in the long run. Peers cause some, and must not fill the disk; ordinary
use stays far below it."""

KINDS_MAX: Final = 1024
"""Most kinds that are told apart; the code has about a hundred."""


class Throttle:
    """Drops lines of a kind that comes too often; the next line of the kind says how many."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, float, int]] = {}
        """For each kind: the lines that it may write, as of what time, and the lines dropped."""
        self.dropped = 0

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        kind, now_s = str(event.get("event")), time.monotonic()
        stock, at_s, lost = self._kinds.get(kind, (float(LINES_MOST), now_s, 0))
        stock = min(LINES_MOST, stock + (now_s - at_s) * LINES_PER_S)
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        if stock < 1:
            self.dropped += 1
            self._kinds[kind] = (stock, now_s, lost + 1)
            raise structlog.DropEvent
        self._kinds[kind] = (stock - 1, now_s, 0)
        if lost:
            event["lines_like_this_dropped"] = lost
        return event


_throttle = Throttle()


def dropped() -> int:
    """Return how many lines were dropped since the daemon started."""
    return _throttle.dropped


def configure(*, as_json: bool) -> None:
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            _throttle,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.dict_tracebacks
            if as_json
            else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
