"""Recovery after a crash: ask the driver for the state of each process in the old roster.

A remembered flag is not evidence. The roster only says whom to ask, and which burst a process was
in. What is suspended or paged out comes back in its turn, through the scheduler.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from kiwi_core.daemon.engine.observer import where_it_is
from kiwi_core.daemon.roster.registry import SessionRecord, session_id
from kiwi_core.daemon.roster.roster import RosterEntry
from kiwi_core.errors import KiwiError
from kiwi_core.gpu import processes
from kiwi_core.pager.api import ProcessRef, Target
from kiwi_core.states import Residency
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.roster.roster import Roster
    from kiwi_core.pager.api import Observation, Pager
    from kiwi_core.sched.events import SessionJoined

log = structlog.get_logger(__name__)

ANSWER_WITHIN_S = 30.0
"""Longest wait for an answer: a process left in the middle of a move needs time to settle."""


async def recover(
    roster: Roster,
    pager: Pager,
    registry: SessionRegistry,
    joined: Callable[[SessionRecord, SessionJoined], None],
) -> None:
    """Call ``joined`` for each process of ``roster`` that is still alive."""

    async def ask(entry: RosterEntry) -> Observation | None:
        target = Target(SessionId(entry.session), _ref(entry))
        try:
            return await asyncio.wait_for(pager.observe(target), ANSWER_WITHIN_S)
        except (asyncio.TimeoutError, KiwiError, OSError) as error:
            log.error("driver says nothing of a session", session=entry.session, why=str(error))
            return None

    # By process, not by the session's id in the roster: the roster may be damaged.
    living = {_ref(e): e for e in roster.sessions if processes.alive(_ref(e))}
    entries = [msgspec.structs.replace(e, session=session_id(ref)) for ref, e in living.items()]
    seen = await asyncio.gather(*(ask(entry) for entry in entries))
    found = [(e, o) for e, o in zip(entries, seen, strict=True) if o is not None and o.alive]
    # Those that run now come first: they have the GPU, the others wait for it.
    found.sort(key=lambda pair: pair[1].residency is not Residency.RESIDENT)
    for entry, observation in found:
        record = SessionRecord(
            id=SessionId(entry.session),
            ref=_ref(entry),
            uid=entry.uid,
            name=entry.name,
            folder=entry.folder,
            kernel_id=entry.kernel_id,
            client_burst=entry.burst if entry.client_burst is None else entry.client_burst,
            by_link=entry.by_link,
            priority=entry.priority,
        )
        try:
            registry.add(record)
        except KiwiError:
            continue  # it died just now
        # In mid-burst and still resident means that it runs now.
        event = msgspec.structs.replace(
            where_it_is(record.target, observation),
            mid_burst=entry.in_burst and observation.residency is not Residency.LOST,
            burst=entry.burst,
            guarded=None if entry.guarded else False,
            kept_out=entry.kept_out,
        )
        log.info(
            "session found again", session=record.id, pid=entry.pid,
            residency=observation.residency.value, in_burst=entry.in_burst,
        )  # fmt: skip
        joined(record, event)


def roster_entry(core: Core, record: SessionRecord) -> RosterEntry:
    """Return what a successor needs to know of ``record`` after a crash."""
    known = core.scheduler.session(record.id)
    return RosterEntry(
        session=record.id,
        pid=record.ref.pid,
        start_ticks=record.ref.start_ticks,
        uid=record.uid,
        name=record.name,
        folder=record.folder,
        kernel_id=record.kernel_id,
        burst=known.burst if known else 0,
        client_burst=record.client_burst,
        by_link=record.by_link,
        in_burst=core.in_burst(record),
        priority=record.priority,
        guarded=known is None or known.guarded,
        kept_out=known.kept_out if known else "",
    )


def _ref(entry: RosterEntry) -> ProcessRef:
    return ProcessRef(entry.pid, entry.start_ticks)
