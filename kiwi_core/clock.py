"""The time for which the daemon of a GPU has run: a monotonic clock without the daemon's pauses.

A paused virtual machine, a frozen control group and SIGSTOP can stop the daemon together with its
clients. ``time.monotonic_ns()`` goes on meanwhile, although it stands still while a machine sleeps.
Nobody has held the GPU, waited for it, or missed a deadline in such a pause. So the daemon, its
event loop and its pager take the time from here.

A pause of single programs is another matter: the daemon sees which processes are stopped.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.units import NS_PER_S, ns_to_seconds, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_S: Final = 1.0
"""Interval at which a process that beats looks at the clock at least."""

PAUSE_NS: Final = 5 * NS_PER_S
"""A look at the clock that comes so long after the last one was kept from coming. A busy machine
delays it by less than a second."""


class RunningClock:
    """``read_ns`` is a monotonic clock that goes on in a pause. Use it in one thread only."""

    def __init__(self, read_ns: Callable[[], int] = lambda: time.monotonic_ns()) -> None:
        self._read_ns = read_ns
        self._seen_ns: int | None = None
        """The last reading; ``None`` while nobody beats, when a long gap says nothing."""
        self.paused_ns = 0
        """What was left out so far."""

    def now_ns(self) -> int:
        read_ns = self._read_ns()
        seen_ns = self._seen_ns
        if seen_ns is not None:
            if read_ns - seen_ns > PAUSE_NS:
                # Up to one beat of the gap, the process may have run.
                self.paused_ns += read_ns - seen_ns - seconds_to_ns(BEAT_S)
            self._seen_ns = read_ns
        return read_ns - self.paused_ns

    def now_s(self) -> float:
        return ns_to_seconds(self.now_ns())

    def begin(self) -> None:
        """Leave out pauses from now on. The caller reads the clock in each ``BEAT_S``."""
        self._seen_ns = self._read_ns()

    def end(self) -> None:
        self._seen_ns = None

    async def beat(self) -> None:
        """Leave out pauses until cancelled."""
        self.begin()
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self.now_ns()
        finally:
            self.end()


DAEMON: Final = RunningClock()
"""The clock of this process, if it is the daemon of a GPU. In others nobody beats, and it is
``time.monotonic_ns()``."""

now_ns = DAEMON.now_ns
now_s = DAEMON.now_s
