"""The answer to ``get-history``: the scheduler's, with names as far as the reader may know them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kiwi_core.daemon.members import ANOTHER_USER
from kiwi_core.errors import CallerError
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire import messages as m
from kiwi_core.wire.framing import encode

if TYPE_CHECKING:
    from kiwi_core.daemon.members import Members
    from kiwi_core.daemon.peers import Peer, Rights
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.sched.view import HistoryView

ENTRIES_MAX: Final = 1024
"""In one message, about 200 KiB: the loop has other things to do meanwhile."""


class HistoryReporter:
    def __init__(self, scheduler: Scheduler, members: Members, rights: Rights) -> None:
        self._scheduler = scheduler
        self._members = members
        self._rights = rights

    def line(self, reader: Peer, since: int) -> bytes:
        """As it goes over the wire. What one line cannot hold is left for the next question."""
        now_ns = time.monotonic_ns()
        changed = self._scheduler.history(since, now_ns)
        count = min(len(changed), ENTRIES_MAX)
        while True:
            more = count < len(changed)
            last = changed[count - 1].serial if more else self._scheduler.history_serial
            try:
                return encode(
                    m.HistoryReport(
                        last=last,
                        entries=[_entry(view, now_ns) for view in changed[:count]],
                        sessions=self._sessions(changed[:count], reader),
                        more=more,
                    )
                )
            except CallerError as error:  # very long names of very many sessions
                if error.code != "too-large" or count < 2:
                    raise
            count //= 2

    def _sessions(
        self, entries: tuple[HistoryView, ...], reader: Peer
    ) -> dict[str, m.HistorySession]:
        return {id_: self._session(id_, reader) for id_ in {entry.session for entry in entries}}

    def _session(self, id_: str, reader: Peer) -> m.HistorySession:
        who = self._members.known(id_)
        if who is None or not self._rights.may_see(reader, who.uid):
            return m.HistorySession(name=ANOTHER_USER, mine=False, kernel_id="")
        return m.HistorySession(name=who.name, mine=True, kernel_id=who.kernel_id)


def _entry(view: HistoryView, now_ns: int) -> m.HistoryEntry:
    ended_ns = view.ended_ns
    return m.HistoryEntry(
        id=view.id,
        serial=view.serial,
        session=view.session,
        kind=view.kind,
        began_ago_s=ns_to_seconds(now_ns - view.began_ns),
        ended_ago_s=None if ended_ns is None else ns_to_seconds(now_ns - ended_ns),
        bytes_moved=view.bytes_moved,
        ok=view.ok,
        hinted=view.hinted,
    )
