"""Observe the memory of the GPU and of the sessions at intervals, and report it as events.

Looks are frequent while somebody runs or waits, immediate if a decision depends on them (a burst
ended, a process was suspended), and rare when all is quiet. NVML and the driver may be slow, and so
may the answer about one process. An answer that does not come in time is left out and shows up as
an error in the status; that process is not asked again before it has answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kiwi_core import clock
from kiwi_core.errors import KiwiError
from kiwi_core.sched import events as ev
from kiwi_core.states import Residency
from kiwi_core.units import MIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from kiwi_core.config import Config
    from kiwi_core.pager.api import Observation, Pager, Target

log = structlog.get_logger(__name__)

QUIET_INTERVAL_S = 5.0
"""Interval of looks at all sessions: programs outside Kiwi come and go, idle ones hardly change."""

LOOSE_INTERVAL_S = 0.1
"""Interval of looks at a process that must wait but cannot be suspended yet. Before the process can
allocate, the driver has to make its context, which takes about as long.
"""

HANGS_AFTER_S = 10.0
"""A look takes milliseconds; after this time it counts as hanging."""

AT_ONCE = 32
"""Sessions of a round that are observed together (a few milliseconds): a look that somebody begins
to wait for must not wait for a thousand others."""

BESIDE_A_WAIT = 1
"""Sessions of a round that are observed in a look that somebody waits for. At 200 such looks a
second, a round of 1,000 sessions still takes ``QUIET_INTERVAL_S``."""

BETWEEN_PARTS_S = 0.05
"""Pause between parts of a round. A round of 2,000 sessions takes ``QUIET_INTERVAL_S``."""

BUDGET_INTERVAL_S = 0.25
"""Interval of readings of RAM and control groups: one costs as much as observing a session."""

BUDGET_STEP_BYTES = 16 * MIB
"""Least change of the budget that is an event; free RAM changes all the time."""

GATHER_S = 0.02
"""Delay of looks that nobody waits for: the next cell of the same notebook may come at once, and a
look competes with it for the interpreter."""

PATIENCE_S = 1.0
"""Longest wait for a look; then the waiter goes on: old numbers are better than no progress."""


class Observer:
    """``everybody``, ``runners`` and ``only_recorded`` (called in the loop) return whom to observe;
    ``waiting`` returns whether any waits for the GPU; ``feed`` takes the events. ``found`` gets the
    place of each session that is not in the GPU or not free, and when that look began. ``seen``
    gets every observation, before the events that follow from it. A ``busy`` session (with an
    operation) is not observed: the driver would not answer."""

    def __init__(
        self,
        config: Config,
        pager: Pager,
        *,
        free_bytes: Callable[[], Awaitable[int]],
        host_budget_bytes: Callable[[], int],
        everybody: Callable[[], list[Target]],
        runners: Callable[[], list[Target]],
        only_recorded: Callable[[], list[Target]],
        waiting: Callable[[], bool],
        feed: Callable[[ev.Event], None],
        found: Callable[[ev.SessionJoined, int], None] = lambda _where, _began_ns: None,
        seen: Callable[[Target, Observation], None] = lambda _target, _seen: None,
        busy: Callable[[SessionId], bool] = lambda _session: False,
    ) -> None:
        self._interval_s = config.observe_interval_ns / NS_PER_S
        self._pager = pager
        self._free_bytes = free_bytes
        self._host_budget_bytes = host_budget_bytes
        self._everybody = everybody
        self._runners = runners
        self._only_recorded = only_recorded
        self._somebody_waits = waiting
        self._feed = feed
        self._found = found
        self._seen = seen
        self._busy = busy
        self._late: dict[SessionId, asyncio.Task[Observation]] = {}
        """Looks that were not answered in time; they go on."""
        self._wanted = asyncio.Event()
        self._round: deque[Target] = deque()
        """Sessions that are still to be observed in this round."""
        self._waiting: list[_Waiting] = []
        self._soon: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None
        """The timer that runs exactly while a look is delayed."""
        self._began_s: float | None = None
        self._error = ""
        self._blind = False
        self.without_driver: set[SessionId] = set()
        """Sessions of which the driver knew no process at their last look."""
        self.failures = 0
        """Looks in which something could not be read."""
        self._budget_bytes = -1
        self._budget_due_s = 0.0

    def look_soon(self) -> None:
        self._wanted.set()

    def somebody_runs(self) -> None:
        """Look soon after a grant, when the session has had time to allocate."""
        if self._soon is not None:
            return

        def look() -> None:
            self._soon = None
            self._wanted.set()

        self._soon = asyncio.get_running_loop().call_later(self._interval_s, look)

    def after_a_look(self, target: Target, go_on: Callable[[], None]) -> None:
        """Look at ``target`` soon (``hurry``: now), feed what was seen, and then call ``go_on``:
        once, in the loop, and after ``PATIENCE_S`` even if the look hangs."""
        self._waiting.append(_Waiting(target, go_on))
        if self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_S, self.hurry)

    def hurry(self) -> None:
        """Look now, because somebody waits for an event that follows the delayed looks."""
        if self._gathering is None:
            return
        self._gathering.cancel()
        self._gathering = None
        self._wanted.set()
        loop = asyncio.get_running_loop()
        loop.call_later(PATIENCE_S, _all_go_on, tuple(self._waiting))

    @property
    def error(self) -> str:
        """Return why the last look failed, or that it hangs; "" if all is well."""
        if self._hangs():
            return "Reading the GPU's memory hangs; the numbers shown are old."
        return self._error

    @property
    def is_blind(self) -> bool:
        """Return whether the GPU as a whole cannot be read: nobody should be placed on it."""
        return self._blind or self._hangs()

    def _hangs(self) -> bool:
        return self._began_s is not None and clock.now_s() - self._began_s > HANGS_AFTER_S

    async def run(self) -> None:
        """Look at intervals, until cancelled."""
        next_round_s = 0.0
        while True:
            self._wanted.clear()
            targets = {target.session: target for target in self._runners()}
            # A session may wait for memory that a program outside Kiwi holds, or holds no longer.
            often = bool(targets) or self._somebody_waits()
            interval_s = self._interval_s if often else QUIET_INTERVAL_S
            if only_recorded := self._only_recorded():
                targets |= {target.session: target for target in only_recorded}
                interval_s = min(interval_s, LOOSE_INTERVAL_S)
            if clock.now_s() >= next_round_s:
                self._round = deque(self._everybody())
                self.without_driver &= {target.session for target in self._round}
                next_round_s = clock.now_s() + QUIET_INTERVAL_S
            waiting, self._waiting = self._waiting, []
            for _ in range(min(BESIDE_A_WAIT if waiting else AT_ONCE, len(self._round))):
                target = self._round.popleft()
                targets[target.session] = target
            targets |= {w.target.session: w.target for w in waiting}
            await self._look(list(targets.values()))
            _all_go_on(waiting)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._wanted.wait(), BETWEEN_PARTS_S if self._round else interval_s
                )

    async def _look(self, targets: list[Target]) -> None:
        began_s = self._began_s = clock.now_s()
        try:
            # Side by side: a session that ends its burst waits for both.
            (looked, problem), free_bytes = await asyncio.gather(
                self._observe(targets), self._free_bytes()
            )
            event = _observed(looked, free_bytes, round(began_s * NS_PER_S))
            budget_bytes, now_s = self._budget_bytes, clock.now_s()
            if now_s >= self._budget_due_s:
                self._budget_due_s = now_s + BUDGET_INTERVAL_S
                budget_bytes = self._host_budget_bytes()
        except (KiwiError, OSError) as error:
            self._blind = True
            self._note(str(error))
            return
        finally:
            self._began_s = None
        self._blind = False
        self._note(problem)
        for target, one in looked.items():
            self._seen(target, one)
            without = one.alive and not one.processes
            (self.without_driver.add if without else self.without_driver.discard)(target.session)
        self._feed(event)
        first = self._budget_bytes < 0 <= budget_bytes
        if first or abs(budget_bytes - self._budget_bytes) >= BUDGET_STEP_BYTES:
            self._budget_bytes = budget_bytes
            self._feed(ev.HostBudgetObserved(budget_bytes=budget_bytes))
        for target, one in looked.items():
            if one.alive and one.residency is not Residency.RESIDENT:
                self._found(where_it_is(target, one), round(began_s * NS_PER_S))

    async def _observe(self, targets: list[Target]) -> tuple[dict[Target, Observation], str]:
        """Return the observations, and the last failure of one session; it must not hide others."""

        def answered(session: SessionId, look: asyncio.Task[Observation]) -> None:
            """Drop an answer that came too late: it is old."""
            del self._late[session]
            if not look.cancelled() and (error := look.exception()) is not None:
                log.info("looked at in vain", session=session, why=str(error))

        looks = {}
        for target in targets:
            if not self._busy(target.session) and target.session not in self._late:
                looks[target] = asyncio.ensure_future(self._pager.observe(target))
        if looks:
            await asyncio.wait(looks.values(), timeout=PATIENCE_S)
        seen: dict[Target, Observation] = {}
        problem = ""
        for target, look in looks.items():
            if not look.done():
                problem = f"{target.session}: the driver does not answer."
                self._late[target.session] = look
                look.add_done_callback(partial(answered, target.session))
            elif isinstance(error := look.exception(), (KiwiError, OSError)):
                problem = f"{target.session}: {error}"
            else:
                seen[target] = look.result()
        return seen, problem

    def _note(self, problem: str) -> None:
        self.failures += bool(problem)
        if problem and problem != self._error:
            log.error("cannot read the GPU's memory", why=problem)
        self._error = problem


def _observed(
    seen: Mapping[Target, Observation], free_bytes: int, began_ns: int
) -> ev.MemoryObserved:
    sessions = {target.session: one for target, one in seen.items() if one.alive}
    in_gpu = {s: one for s, one in sessions.items() if one.residency is Residency.RESIDENT}
    return ev.MemoryObserved(
        free_bytes=free_bytes,
        resident_bytes={session: one.resident_bytes for session, one in sessions.items()},
        busy={session: one.busy for session, one in sessions.items() if one.busy is not None},
        allocated=[session for session, one in sessions.items() if one.allocated],
        unsized=[session for session, one in sessions.items() if one.unsized],
        # In the GPU, and free to use it:
        at_large=[s for s, one in in_gpu.items() if one.resident_bytes > 0 and not one.stopped],
        owned=[session for session, one in sessions.items() if one.owned],
        nowhere=[s for s, one in in_gpu.items() if not (one.processes or one.paged_out_bytes)],
        taken={session: one.taken_bytes for session, one in sessions.items() if one.taken_bytes},
        began_ns=began_ns,
    )


def where_it_is(target: Target, seen: Observation) -> ev.SessionJoined:
    """Return where the driver and the libraries of a session report its memory. A session that is
    paged out certainly needs some memory, even if the amount is not known.
    """
    out = seen.residency is Residency.PAGED_OUT
    return ev.SessionJoined(
        session=target.session,
        residency=seen.residency,
        resident_bytes=seen.resident_bytes,
        paged_out_bytes=max(1, seen.paged_out_bytes) if out else seen.paged_out_bytes,
    )


class _Waiting:
    """A continuation that runs once, after a look at ``target`` or when patience ends."""

    def __init__(self, target: Target, go_on: Callable[[], None]) -> None:
        self.target = target
        self._go_on: Callable[[], None] | None = go_on

    def go_on(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()


def _all_go_on(waiting: Iterable[_Waiting]) -> None:
    for waiter in waiting:
        waiter.go_on()
