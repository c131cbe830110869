"""Continue a program that Ctrl-Z has stopped while the pager suspends it or pages it out.

Only a program stopped by a plain SIGSTOP or SIGTSTP is continued, not one that a debugger or a
freezer has stopped. A driver call about a stopped process does not return, so a process that is
stopped in the middle of the operation is continued, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.gpu import processes
from kiwi_core.pager.stopped import BY_SIGNAL, why_halted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from kiwi_core.gpu.processes import ProcessRef

log = structlog.get_logger(__name__)


POLL_S: Final = 0.1
"""Interval of checks whether a process was stopped meanwhile."""


@asynccontextmanager
async def continued(refs: Iterable[ProcessRef]) -> AsyncIterator[None]:
    """Continue those of ``refs`` that are stopped, or will be during the block. Stop them again at
    the end, unless their user has brought them to the foreground of their terminal meanwhile
    (``fg``). A second SIGCONT to a process that runs already (``bg``, ``kill``) cannot be
    detected."""
    refs = list(refs)
    going: dict[ProcessRef, bool] = {}
    _continue(refs, going)
    watching = asyncio.ensure_future(_watch(refs, going))
    try:
        yield
    finally:
        watching.cancel()
        for ref, was_in_foreground in going.items():
            if was_in_foreground or not _in_foreground(ref):
                _send(ref, signal.SIGSTOP)


async def _watch(refs: list[ProcessRef], going: dict[ProcessRef, bool]) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        _continue(refs, going)


def _continue(refs: list[ProcessRef], going: dict[ProcessRef, bool]) -> None:
    """Continue the stopped ones; note in ``going`` whether each was in the foreground."""
    for ref in refs:
        if why_halted(ref) == BY_SIGNAL:
            foreground = _in_foreground(ref)
            if _send(ref, signal.SIGCONT):
                going[ref] = foreground
                log.info("continued to be held", pid=ref.pid)


def _in_foreground(ref: ProcessRef) -> bool:
    stat = processes.stat_of(ref.pid)
    return stat is not None and stat.in_foreground


def _send(ref: ProcessRef, number: signal.Signals) -> bool:
    """Return false if the signal is not permitted or the process has ended."""
    with suppress(OSError):
        descriptor = processes.open_pidfd(ref)
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
        return True
    return False
