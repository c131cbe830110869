"""Compare what surfaces say about waits and turns: figures in words, and how they change with
time."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from patience import PATIENCE_S

from kiwi_core.errors import KiwiError
from kiwi_core.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import Daemon

    from kiwi_core.wire.status import GpuStatus, QueueEntry

SLACK_S: Final = 4.0
"""Tolerance between two surfaces: the time between the first and the last question, which takes
longer on a busy machine."""

COARSE: Final = 0.3
"""Tolerance for the rounding of ranges, at most."""

QUIET_S: Final = 1.6
"""The daemon sends news once a second: after this time every surface has the last change."""

SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


def seconds_of(words: str) -> float | None:
    """Return the highest figure in ``words``; ``None`` if there is none."""
    if "any moment" in words:
        return 0.0
    found = re.findall(r"([\d.]+) (s|min|h)\b", words)
    return max(float(number) * SECONDS[unit] for number, unit in found) if found else None


def agree(one: str, other: str, slack_s: float = SLACK_S) -> bool:
    """Return whether two surfaces name the same figure, or both none."""
    first, second = seconds_of(one), seconds_of(other)
    if first is None or second is None:
        return first is second
    return abs(first - second) <= slack_s + COARSE * max(first, second)


def unchanged(*statuses: GpuStatus) -> bool:
    """Return whether nothing but figures differs between ``statuses``, and no memory goes out."""
    moves = any(s.state is SessionState.PAGING_OUT for one in statuses for s in one.sessions)
    return not moves and len(set(map(_standing, statuses))) == 1


def _standing(status: GpuStatus) -> object:
    """Return what surfaces say besides figures. The history does not have all of it: not what holds
    a waiter up, nor whether there is a forecast."""
    queue = [
        (e.session, e.position, e.blocked, e.kept_out, e.expected_wait_s is None)
        for e in status.queue
    ]
    sessions = [
        (s.id, s.state, s.guarded, s.problem, s.time_left_s and s.time_left_s > 0)
        for s in status.sessions
    ]
    return status.history_serial, tuple(status.holders), tuple(queue), tuple(sessions)


def may_fall_s(before_s: float, passed_s: float) -> float:
    """Return how much a figure may fall within ``passed_s`` if nothing that explains it has
    changed: it runs down faster than the clock, but never jumps."""
    return (3 + before_s / 20) * (passed_s + 0.5)


def goes_on(before: GpuStatus, after: GpuStatus) -> bool:
    """Return whether the same turns continue: no holder has ended one and begun another in
    between."""
    was, now = ({s.id: s.time_left_s for s in status.sessions} for status in (before, after))
    lefts = [(was.get(id_), now.get(id_)) for id_ in after.holders]
    return before.holders == after.holders and all(
        then_s is not None and now_s is not None and now_s <= then_s for then_s, now_s in lefts
    )


def _settings(status: GpuStatus) -> tuple[object, ...]:
    return status.scheduler.tq_s, status.scheduler.policy, status.scheduler.anti_thrash


@dataclass
class Watch:
    """Everything that the daemon said to a watcher, in order; one list for each daemon."""

    received: list[list[GpuStatus]] = field(default_factory=list)

    @property
    def words(self) -> int:
        return sum(map(len, self.received))

    def contradictions(self) -> list[str]:
        """Return the statements that cannot be true, alone or after earlier ones."""
        found: list[str] = []
        for received in self.received:
            for status in received:
                found += _at_once(status)
            for before, after in pairwise(received):
                found += _in_a_row(before, after)
        return found


def _at_once(status: GpuStatus) -> list[str]:
    queued = [entry.session for entry in status.queue]
    found = [f"{id_} holds and waits" for id_ in set(queued) & set(status.holders)]
    if [e.position for e in status.queue] != [*range(1, len(set(queued)) + 1)]:
        found.append(f"places in the queue: {status.queue}")
    return found


def _in_a_row(before: GpuStatus, after: GpuStatus) -> list[str]:
    same = _settings(before) == _settings(after) and goes_on(before, after)
    was = {entry.session: entry for entry in before.queue}
    found: list[str] = []
    for entry in after.queue:
        then = was.get(entry.session)
        if then is not None and entry.waited_s >= then.waited_s:  # otherwise it is another wait
            found += _figures(then, entry, same and entry.position == then.position)
    return found


def _figures(then: QueueEntry, now: QueueEntry, same: bool) -> list[str]:
    passed_s = now.waited_s - then.waited_s  # on the daemon's clock: the watcher may hear late
    pairs = [
        (then.expected_wait_s, now.expected_wait_s),
        (then.expected_high_s, now.expected_high_s),
    ]
    found: list[str] = []
    for before_s, after_s in pairs:
        if before_s is None or after_s is None:
            continue
        if after_s > before_s + 0.5 and not now.expected_why:
            found.append(f"it rises without a reason: {then} {now}")
        if same and before_s - after_s > may_fall_s(before_s, passed_s):
            found.append(f"it falls at once, after {passed_s:.1f} s: {then} {now}")
    return found


@contextmanager
def watching(daemon: Daemon) -> Iterator[Watch]:
    """Watch the daemon, also across kills and restarts."""
    watch, enough = Watch(), threading.Event()

    def follow() -> None:
        while not enough.wait(0.2):
            received: list[GpuStatus] = []
            watch.received.append(received)
            try:
                with daemon.client() as client:
                    for status in client.watch():
                        received.append(status)
                        if enough.is_set():
                            return
            except (KiwiError, OSError, AssertionError):
                continue  # it has ended, or does not run yet

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        enough.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the watcher heard nothing more"
