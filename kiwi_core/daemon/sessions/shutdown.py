"""Page in what is suspended or out before a daemon ends, as far as there is room.

The driver says which sessions these are: the scheduler is not needed any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kiwi_core import clock
from kiwi_core.daemon.user_texts import reason
from kiwi_core.errors import KiwiError
from kiwi_core.pager.api import Lost, Moved
from kiwi_core.states import Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.pager.api import Pager, Target
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

LEAVE_WITHIN_S = 60.0
"""Longest time that a stopping daemon takes to page everybody in, in addition to the time that the
slowest believable driver needs for the bytes.
"""

FINISH_WITHIN_S = 5.0
"""Time for running moves when a daemon is stopped, before other sessions follow."""

LOOK_EVERY_S = 0.05
"""Interval of looks while waiting for operations to end."""

NEXT_AFTER_S = 2.0
"""Time after which a slow or hanging session no longer delays the next. (The pager lets no two
count on the same room.)"""

LOOKS_AT_ONCE = 32
"""Sessions that the driver is asked about side by side: nearly all have nothing to page in."""

NO_ANSWER = "the driver did not answer in time"


async def everybody_back(
    core: Core, pager: Pager, registry: SessionRegistry, config: Config
) -> dict[SessionId, str]:
    """Page in everybody who is suspended or out, as far as there is room. Return the sessions
    that had to stay out, with the reason."""
    core.wind_down()
    out_bytes = sum(pager.export_footprints().values())
    slowly_s = out_bytes / config.operation_deadline_bytes_per_s
    ends_at_s = clock.now_s() + LEAVE_WITHIN_S + slowly_s
    await _operations_end(core, min(ends_at_s, clock.now_s() + FINISH_WITHIN_S))
    moving = core.operations.sessions
    in_order = sorted(registry, key=lambda record: not core.in_burst(record))
    first = [record.target for record in in_order if record.id not in moving]
    left = await bring_back(pager, first, ends_at_s)
    if moving:
        await _operations_end(core, ends_at_s)
        rest = [record.target for record in in_order if record.id in moving]
        left |= await bring_back(pager, rest, clock.now_s() + FINISH_WITHIN_S)
    for session, why in left.items():
        record = registry.get(session)
        log.error(
            "session stays paged out; nothing is lost: start the daemon again to bring it back",
            session=session, name="" if record is None else record.name, why=why,
        )  # fmt: skip
    return left


async def _operations_end(core: Core, until_s: float) -> None:
    """Wait for running operations, but not for overdue ones: those hang."""
    operations = core.operations
    while operations.waiting_for and clock.now_s() < until_s:
        operations.take_overdue(clock.now_ns())
        await asyncio.sleep(LOOK_EVERY_S)


async def bring_back(pager: Pager, targets: list[Target], ends_at_s: float) -> dict[SessionId, str]:
    """Page in ``targets``, in order, until ``ends_at_s`` (monotonic); leave hanging calls behind.
    Return the sessions that had to stay out, with the reason."""
    tasks: dict[SessionId, asyncio.Task[str]] = {}
    places = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def needs_a_page_in(target: Target) -> bool:
        """Return false if it has ended, or neither the driver nor a library holds anything of
        it."""
        async with places:
            seen = await pager.observe(target)
        return seen.alive and (bool(seen.processes) or seen.residency is not Residency.RESIDENT)

    async def bring_one_back(target: Target, look: asyncio.Task[bool]) -> str:
        """Return why it had to stay out; "" if it is back, or there is nothing to page in."""
        if not await look:
            return ""
        outcome = await pager.page_in(target, round(ends_at_s * NS_PER_S))
        if isinstance(outcome, Moved):
            return ""
        if isinstance(outcome, Lost):
            log.error("contents lost", session=target.session, why=outcome.detail)
            return ""
        return reason(outcome.reason, outcome.detail)

    looks = [asyncio.ensure_future(needs_a_page_in(one)) for one in targets]
    for target, look in zip(targets, looks, strict=True):
        task = asyncio.ensure_future(bring_one_back(target, look))
        tasks[target.session] = task
        await asyncio.wait([task], timeout=max(0.0, min(NEXT_AFTER_S, ends_at_s - clock.now_s())))
    if tasks:
        await asyncio.wait(tasks.values(), timeout=max(0.1, ends_at_s - clock.now_s()))

    def why(task: asyncio.Task[str]) -> str:
        if not task.done():
            return NO_ANSWER  # it continues for as long as this process lives
        error = task.exception()
        if error is None:
            return task.result()
        if not isinstance(error, KiwiError):
            log.error("bringing a session back raised", exc_info=error)
        return f"{type(error).__name__}: {error}"

    outcomes = {session: why(task) for session, task in tasks.items()}
    return {session: why for session, why in outcomes.items() if why}
