"""Keep the accounts of one GPU: take the sums from the scheduler and put them into the ledger.

Each time, only the amounts since the last time are taken, so that nothing counts twice, however
often a daemon restarts. A daemon that is killed loses the last ``SAVE_EVERY_S`` at most.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.daemon.reports.ledger import UsageBucket, bucket_begin_s
from kiwi_core.sched.model.accounts import Account
from kiwi_core.sched.model.happenings import SessionForgotten

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.reports.ledger import Ledger
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

SAVE_EVERY_S: Final = 5.0
"""Interval of writes while anything happens: rare enough to cost the disk almost nothing."""

NAMES_MAX: Final = 100
"""Notebooks and jobs of one user with an own entry in one bucket: a user who invents names must not
fill the disk. Twenty times as many as people have open."""

THE_REST: Final = "(more notebooks)"
"""The name under which the other notebooks are counted."""

UNWRITTEN_MAX: Final = 4096
"""Sums kept while the disk is full; beyond it the oldest are lost. About a day of ten users."""


@dataclass(eq=False, repr=False)
class Bookkeeper:
    """Runs in the loop; accesses the disk in threads only, one at a time."""

    _scheduler: Scheduler
    _registry: SessionRegistry
    _ledger: Ledger
    wall_s: Callable[[], float] = time.time
    _counted: dict[SessionId, Account] = field(default_factory=dict)
    """The sums that are in the buckets already, of each session that the scheduler knows."""
    _unwritten: dict[UsageBucket, Account] = field(default_factory=dict)
    _names: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    _names_of_s: int = 0
    """The bucket that ``_names`` belongs to, in Unix seconds."""
    _due: asyncio.TimerHandle | None = None
    _writing: asyncio.Task[None] | None = None
    _closed: bool = False
    failing: bool = False
    """Whether the last write failed; it is tried again."""

    def after(self, step: Step) -> None:
        for happening in step.happenings:
            if isinstance(happening, SessionForgotten):
                self._count(happening.session, happening.account)
                self._counted.pop(happening.session, None)
        if self._due is None and not self._closed:

            def save() -> None:
                self._due = None
                self._take()
                self._write()

            self._due = asyncio.get_running_loop().call_later(SAVE_EVERY_S, save)

    async def up_to_date(self, within_s: float) -> bool:
        """Write all sums to the file, before it is read; return whether that succeeded in time."""
        ends_at_s = clock.now_s() + within_s
        while self._writing is not None:
            if not await self._written(ends_at_s):
                return False
        self._take()
        self._write()
        return await self._written(ends_at_s) and not self.failing

    async def close(self, within_s: float) -> None:
        """Write the last sums, if the disk takes them in time. Called when the daemon ends."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        if not await self.up_to_date(within_s):
            log.error("the last seconds of usage could not be written")

    # --- taking ---------------------------------------------------------------------------------

    def _take(self) -> None:
        for session, account in self._scheduler.accounts(clock.now_ns()).items():
            self._count(session, account)

    def _count(self, session: SessionId, account: Account) -> None:
        added = account.since(self._counted.get(session, Account()))
        who = self._registry.known(session)
        if who is None or not any(added):
            return
        self._counted[session] = account
        name, job = who.name, who.job
        begins_s = bucket_begin_s(self.wall_s())
        if begins_s != self._names_of_s:
            self._names_of_s = begins_s
            self._names.clear()
        names = self._names.setdefault(who.uid, set())
        if len(names) < NAMES_MAX:
            names.add((name, job))
        if (name, job) not in names:
            name, job = THE_REST, ""
        bucket = UsageBucket(begins_s, who.uid, name, job)
        self._unwritten[bucket] = self._unwritten.get(bucket, Account()).plus(added)

    # --- writing --------------------------------------------------------------------------------

    def _write(self) -> None:
        if self._writing is None and self._unwritten:
            batch, self._unwritten = self._unwritten, {}
            self._writing = asyncio.ensure_future(self._put(batch))

    async def _put(self, batch: dict[UsageBucket, Account]) -> None:
        """Write ``batch``. Never cancelled, because nobody could know then whether it was
        written.
        """
        try:
            await asyncio.to_thread(self._ledger.add, batch, self.wall_s())
            self.failing = False
        except Exception as error:  # noqa: BLE001  (whatever the file is: not the daemon's end)
            if not self.failing:
                log.error("usage not written; it is tried again", why=str(error))
            self.failing = True
            for bucket, added in self._unwritten.items():
                batch[bucket] = batch.get(bucket, Account()).plus(added)
            if len(batch) > UNWRITTEN_MAX:
                batch = dict(sorted(batch.items())[-UNWRITTEN_MAX:])
            self._unwritten = batch
        finally:
            self._writing = None

    async def _written(self, ends_at_s: float) -> bool:
        """Wait until the write in progress has ended. Return false at ``ends_at_s``."""
        if self._writing is None:
            return True
        done, _ = await asyncio.wait({self._writing}, timeout=ends_at_s - clock.now_s())
        return bool(done)
