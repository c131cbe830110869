"""Perform the scheduler's operations, each as a separate task, and watch their deadlines.

A driver call may hang for ever, and so may an operation: that costs a task, never the loop. A late
operation is first reported as overdue; its outcome counts whenever it comes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
from msgspec.structs import replace

from kiwi_core import clock
from kiwi_core.errors import KiwiError
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import (
    BringResidueBack,
    Operation,
    PageIn,
    PageOut,
    Resume,
    Suspend,
)
from kiwi_core.states import Reason, Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.pager.api import Outcome, Pager, Target
    from kiwi_core.units import OpId, SessionId

log = structlog.get_logger(__name__)

LOOK_EVERY_NS: Final = NS_PER_S
"""Interval of checks that the targets of operations run. A move of a few GB takes as long."""

_REFUSED: Final[dict[type[Operation], Callable[..., ev.Event]]] = {
    Suspend: ev.SuspendRefused,
    Resume: ev.ResumeFailed,
    PageOut: ev.PageOutRefused,
    PageIn: ev.PageInRefused,
    BringResidueBack: ev.ResidueRefused,
}


@dataclass
class _Running:
    action: Operation
    target: Target
    task: asyncio.Task[None]
    overdue: bool = False
    stopped: bool = False


class OperationRunner:
    """The running operations. ``post`` takes each outcome, as an event."""

    def __init__(self, pager: Pager, post: Callable[[ev.Event], None]) -> None:
        self._pager = pager
        self._post = post
        self._running: dict[OpId, _Running] = {}
        self._look_at_ns = 0

    @property
    def running(self) -> int:
        """Number of operations that have not reported, including overdue ones."""
        return len(self._running)

    @property
    def waiting_for(self) -> int:
        """Number of operations that have not reported and are not overdue."""
        return sum(not running.overdue for running in self._running.values())

    @property
    def sessions(self) -> set[SessionId]:
        """The sessions with an operation, overdue or not."""
        return {running.action.session for running in self._running.values()}

    def start(self, action: Operation, target: Target) -> None:
        if not self.waiting_for:
            self._look_at_ns = clock.now_ns() + LOOK_EVERY_NS
        task = asyncio.ensure_future(self._perform(action, target))
        self._running[action.op] = _Running(action, target, task)

    def finished(self, op: OpId) -> None:
        """Drop ``op``, whose outcome the loop has taken."""
        self._running.pop(op, None)

    def next_deadline_ns(self) -> int | None:
        deadlines = [r.action.deadline_ns for r in self._running.values() if not r.overdue]
        return min(deadlines, default=None)

    def next_look_ns(self) -> int | None:
        return self._look_at_ns if self.waiting_for else None

    def look(self, now_ns: int) -> dict[SessionId, str]:
        """Return the sessions whose process was stopped in the middle of their operation (by a
        debugger, or with its control group), and the reason. Nobody knows when it continues. Does
        nothing before ``next_look_ns``."""
        if now_ns < self._look_at_ns:
            return {}
        self._look_at_ns = now_ns + LOOK_EVERY_NS
        found: dict[SessionId, str] = {}
        for running in self._running.values():
            if not running.overdue and (why := self._pager.why_stopped(running.target)):
                running.stopped = True
                found[running.action.session] = why
        return found

    def take_overdue(self, now_ns: int) -> list[ev.OperationOverdue]:
        """Return the operations whose deadline has passed, or whose target ``look`` has found
        stopped. Each is returned once."""
        late = []
        for running in self._running.values():
            over = running.stopped or running.action.deadline_ns <= now_ns
            if over and not running.overdue:
                running.overdue = True
                late.append(ev.OperationOverdue(op=running.action.op))
        return late

    async def _perform(self, action: Operation, target: Target) -> None:
        try:
            event = outcome_event(action, await self._call(action, target))
            if isinstance(event, (ev.Suspended, ev.ResumeFailed)):
                event = await self._with_its_memory(event, target)
        except Exception as error:
            # An error in Kiwi must not leave the scheduler waiting for ever.
            log.exception("operation raised", op=action.op, session=action.session)
            refused = Refused(Reason.DRIVER, f"{type(error).__name__}: {error}")
            event = outcome_event(action, refused)
        # In the loop, not in this task: the loop must see what ``post`` raises.
        asyncio.get_running_loop().call_soon(self._post, event)

    async def _with_its_memory(
        self, event: ev.Suspended | ev.ResumeFailed, target: Target
    ) -> ev.Event:
        """Add the GPU memory of a suspended process, which cannot change; after a failure, whether
        the session is out. A daemon that is killed in the middle of a checkpoint call leaves the
        call under way. The next daemon sees a suspended process, and then the call takes effect:
        now the process is out, and no resume can succeed."""
        try:
            seen = await self._pager.observe(target)
        except KiwiError as error:
            log.warning("its memory cannot be read", after=type(event).__name__, why=str(error))
            return event
        if isinstance(event, ev.Suspended):
            return replace(event, resident_bytes=seen.resident_bytes)
        if seen.residency is not Residency.PAGED_OUT:
            return event
        return replace(event, paged_out_bytes=max(1, seen.paged_out_bytes))

    async def _call(self, action: Operation, target: Target) -> Outcome:
        pager = self._pager
        if isinstance(action, Suspend):
            return await pager.suspend(target, action.deadline_ns)
        if isinstance(action, Resume):
            return await pager.resume(target, action.deadline_ns)
        if isinstance(action, PageOut):
            return await pager.page_out(target, action.deadline_ns)
        if isinstance(action, BringResidueBack):
            return await pager.residue_in(target, action.deadline_ns)
        return await pager.page_in(target, action.deadline_ns)


def outcome_event(action: Operation, outcome: Outcome) -> ev.Event:
    """Return the event that tells the scheduler the outcome of ``action``."""
    if isinstance(outcome, Lost):
        outwards = isinstance(action, (Suspend, PageOut))
        lost = ev.PageOutLost if outwards else ev.PageInLost
        return lost(op=action.op, detail=outcome.detail)
    if isinstance(outcome, Refused):
        refused = _REFUSED[type(action)]
        return refused(op=action.op, reason=outcome.reason, detail=outcome.detail)
    if isinstance(action, Suspend):
        return ev.Suspended(op=action.op)
    if isinstance(action, Resume):
        return ev.Resumed(op=action.op)
    moved = {"moved_bytes": outcome.bytes_moved, "elapsed_ns": outcome.elapsed_ns}
    if isinstance(action, PageOut):
        return ev.PagedOut(op=action.op, stays_bytes=outcome.stays_bytes, **moved)
    if isinstance(action, BringResidueBack):
        return ev.ResidueBack(op=action.op, **moved)
    return ev.PagedIn(op=action.op, **moved)
