"""Which notebook runs on which kernel, of this server's own sessions.

Asking the session manager costs a query and a look at every kernel, so the answer is kept, and
renewed when the manager's table changed (a notebook was opened, renamed, moved, closed).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_core.utils import ensure_async

if TYPE_CHECKING:
    from collections.abc import Mapping

ANYWAY_S: Final = 10.0
"""The answer is renewed after this time in any case: a session manager may have no table whose
changes can be counted.
"""


class Documents:
    """The notebooks of this server. ``sessions`` is the server's session manager."""

    def __init__(self, sessions: Any) -> None:
        self._sessions = sessions
        self._stamp: int | None = None
        self._asked_s = -ANYWAY_S
        self.paths: Mapping[str, str] = {}
        """Documents by kernel id; a new object after each change."""

    async def refresh(self) -> bool:
        """Return whether a path changed. Called every second or so while somebody looks."""
        stamp, now_s = self._changes(), time.monotonic()
        if stamp == self._stamp and now_s - self._asked_s < ANYWAY_S:
            return False
        # Consoles have paths, too, but no file that can be opened.
        paths = {
            session["kernel"]["id"]: session["path"]
            for session in await ensure_async(self._sessions.list_sessions())
            if session.get("kernel") and session.get("path")
            if session.get("type", "notebook") == "notebook"
        }
        # After the question: listing drops sessions whose kernel is dead.
        self._stamp, self._asked_s = self._changes(), now_s
        if paths == self.paths:
            return False
        self.paths = paths
        return True

    def _changes(self) -> int | None:
        """Return the number of changes of the table; ``None`` if that cannot be known."""
        return getattr(getattr(self._sessions, "connection", None), "total_changes", None)
