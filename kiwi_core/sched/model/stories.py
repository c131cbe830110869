"""The story of each session in short lines: bounded, and kept a while after the session left."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.units import NS_PER_S, format_bytes, format_duration_s

if TYPE_CHECKING:
    from kiwi_core.units import SessionId

DEPARTED_MAX: Final = 64
"""Stories kept of sessions that left: enough to ask "what happened to mine" minutes later."""


Story = deque[tuple[int, str, tuple[object, ...]]]
"""Lines as (time, template, arguments). They are formatted only when they are read
(``_LineFormatter``): they are written on the hot path and hardly ever read."""


@dataclass(frozen=True)
class StoryEntry:
    at_ns: int
    text: str


class _LineFormatter(Formatter):
    """Formats ``{!b}`` as a number of bytes and ``{!t}`` as a number of nanoseconds."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "b":
            return format_bytes(value)
        if conversion == "t":
            return format_duration_s(value / NS_PER_S)
        return value


_FORMATTER: Final = _LineFormatter()


class Stories:
    """The stories of all sessions."""

    def __init__(self, lines_max: int) -> None:
        self._lines_max = lines_max
        self._present: dict[SessionId, Story] = {}
        self._departed: OrderedDict[SessionId, tuple[StoryEntry, ...]] = OrderedDict()

    def begin(self, session: SessionId) -> Story:
        """Return the new story of ``session``, to which ``State.tell`` adds lines."""
        story = self._present[session] = deque(maxlen=self._lines_max)
        return story

    def end(self, session: SessionId) -> None:
        """Keep the story of a session that is forgotten; drop the oldest such story if there are
        too many."""
        self._departed[session] = self.lines(session)
        del self._present[session]
        if len(self._departed) > DEPARTED_MAX:
            self._departed.popitem(last=False)

    def lines(self, session: SessionId) -> tuple[StoryEntry, ...]:
        """Return the lines of ``session``, oldest first; empty if no story of it is kept."""
        if session not in self._present:
            return self._departed.get(session, ())
        return tuple(
            StoryEntry(at_ns, _FORMATTER.vformat(template, arguments, {}))
            for at_ns, template, arguments in self._present[session]
        )

    def present(self) -> frozenset[SessionId]:
        return frozenset(self._present)
