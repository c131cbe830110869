"""Send waiters their position and watchers the changes, but not too often.

Changes are collected for a moment. The more a round costs, the longer the pause after it, so that
rounds take only a small share of the loop. While somebody waits, there is a round every second.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kiwi_core import clock
from kiwi_core.units import ns_to_seconds

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.base.peers import Owner
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.reports.status import Reporter

COLLECT_S = 0.05
"""Shortest pause between two rounds."""

SHARE = 10
"""A pause is at least this many times as long as the last round."""

REPEAT_S = 1.0
"""Pause between rounds while somebody waits or watches: waits get shorter without any change."""


class Announcer:
    def __init__(self, connections: Connections, reporter: Reporter) -> None:
        self._connections = connections
        self._reporter = reporter
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._pause_s = COLLECT_S

    def after(self, _step: Step) -> None:
        self.changed()

    def changed(self) -> None:
        """Schedule a round. Cheap: changes are collected."""
        if self._due is None:
            self._due = self._loop.call_later(self._pause_s, self._round)
        elif self._due.when() - self._loop.time() > self._pause_s:
            self._due.cancel()
            self._due = self._loop.call_later(self._pause_s, self._round)

    def _round(self) -> None:
        self._due = None
        began_ns = clock.now_ns()
        words = list(self._reporter.waiting(began_ns))
        for record, message in words:
            if record.connection is not None:
                record.connection.send(message)
        watchers = self._connections.watchers
        lines: dict[tuple[Owner, int], bytes] = {}  # the reader's rights make the only difference
        for connection in watchers:
            if connection.choked:
                continue  # the status would be old by the time the client reads it
            reader = connection.peer.identity, connection.peer.gid
            if reader not in lines:
                lines[reader] = self._reporter.status_line(connection.peer, began_ns)
            connection.send_line(lines[reader])
        self._pause_s = max(COLLECT_S, SHARE * ns_to_seconds(clock.now_ns() - began_ns))
        if words or watchers:
            self._due = self._loop.call_later(max(REPEAT_S, self._pause_s), self._round)
