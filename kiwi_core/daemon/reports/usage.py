"""The answer to ``get-usage``: the usage of users, notebooks and jobs, with the names that the
reader may see (``base.peers.Rights``)."""

from __future__ import annotations

import asyncio
import time
from functools import reduce
from typing import TYPE_CHECKING, Final, Literal

import structlog

from kiwi_core.daemon.base.peers import user_name
from kiwi_core.daemon.reports.filled import filled
from kiwi_core.daemon.reports.ledger import since_s
from kiwi_core.daemon.roster.registry import ANOTHER_USER
from kiwi_core.errors import CallerError
from kiwi_core.sched.model.accounts import Account
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.peers import Peer, Rights
    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.reports.bookkeeper import Bookkeeper
    from kiwi_core.daemon.reports.ledger import Ledger, Total

log = structlog.get_logger(__name__)

ROWS_MAX: Final = 500
"""Rows in one message, some 250 KB with the longest names; the others are summed."""

COLUMN: Final[Mapping[m.UsageBy, Literal["name", "job"] | None]] = {
    m.UsageBy.USER: None,
    m.UsageBy.NOTEBOOK: "name",
    m.UsageBy.JOB: "job",
}

ALL_OTHERS: Final = "all others"

ASKED_MAX: Final = 16
"""Requests of one connection that may wait: a Jupyter server asks for many readers."""

READ_WITHIN_S: Final = 4.0
"""A disk that takes longer counts as hanging, and the reader is told so."""


class UsageReporter:
    """``share`` counts the waiting requests of each user."""

    def __init__(
        self, bookkeeper: Bookkeeper, ledger: Ledger, rights: Rights, share: Share
    ) -> None:
        self._share = share
        self._bookkeeper = bookkeeper
        self._ledger = ledger
        self._rights = rights
        self._asking: dict[asyncio.Task[None], Connection] = {}
        self._reading = asyncio.Lock()

    def answer(self, connection: Connection, message: m.GetUsage) -> None:
        """Answer later: the disk is read in a thread."""
        asked = sum(asking is connection for asking in self._asking.values())
        uid = connection.peer.uid
        if asked >= ASKED_MAX or not self._share.may(uid):
            waits = "Your last questions about usage are still being answered."
            busy = CallerError("busy", waits, "Wait for those answers.")
            connection.send(m.Error.of(busy, about="get-usage"))
            return
        self._share.take(uid)

        async def read() -> None:
            try:
                async with self._reading:
                    connection.send(await self.report(connection.peer, message))
            except CallerError as error:
                connection.send(m.Error.of(error, about="get-usage"))

        def answered(task: asyncio.Task[None]) -> None:
            del self._asking[task]
            self._share.give_back(uid)

        task = asyncio.ensure_future(read())
        self._asking[task] = connection
        task.add_done_callback(answered)

    async def report(self, reader: Peer, message: m.GetUsage) -> m.UsageReport:
        """Return the report. Raise ``CallerError("no-usage")`` if the file cannot be read."""
        complete = await self._bookkeeper.up_to_date(READ_WITHIN_S)
        try:
            began_s, rows = await asyncio.wait_for(
                asyncio.to_thread(self._read, reader, message), READ_WITHIN_S
            )
        except Exception as error:  # a fault of that file must not harm the daemon
            log.error("usage not read", why=str(error) or type(error).__name__)
            raise CallerError(
                "no-usage",
                "The usage of this GPU cannot be read: its file, or its disk, does not answer.",
                "Is the disk of the daemon's state directory full or gone? Its log says more.",
            ) from error
        return m.UsageReport(began_unix_s=began_s, rows=rows, complete=complete)

    def _read(self, reader: Peer, message: m.GetUsage) -> tuple[float | None, list[m.UsageRow]]:
        """Read the file. Called in a thread: looking up user names may block, too."""
        since = since_s(message.since_unix_s, time.time())
        began_s, totals = self._ledger.totals(since, by=COLUMN[message.by])
        everybody = self._rights.may_see_usage(reader)
        # The file counts by uid, which several containers may have.
        own = reader.uid if self._rights.knows_uid_of(reader) else None
        seen = [total for total in totals if everybody or total.uid == own]
        rows = [
            _row(total.account, user_name(total.uid), total.name, mine=total.uid == own)
            for total in seen[:ROWS_MAX]
        ]
        if len(seen) > ROWS_MAX:
            rows.append(_row(_sum(seen[ROWS_MAX:]), ALL_OTHERS))
        if len(seen) < len(totals):
            others = [total for total in totals if total.uid != own]
            rows.append(_row(_sum(others), ANOTHER_USER))
        return began_s, rows


def _sum(totals: Iterable[Total]) -> Account:
    return reduce(Account.plus, (total.account for total in totals), Account())


def _row(account: Account, owner: str, name: str = "", *, mine: bool = False) -> m.UsageRow:
    return filled(
        m.UsageRow,
        account,
        owner=owner,
        name=name,
        mine=mine,
        waited_s=ns_to_seconds(account.waited_ns - account.suspended_ns),
    )
