"""Continue a program that Ctrl-Z has stopped while the pager holds it and moves it out.

Only a program stopped by a plain SIGSTOP or SIGTSTP is continued, not one that a debugger or a
freezer has stopped.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import structlog

from kiwi_core.gpu import processes
from kiwi_core.pager.checkpoint.stopped import BY_SIGNAL, why_stopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from kiwi_core.gpu.processes import ProcessRef

log = structlog.get_logger(__name__)


@asynccontextmanager
async def continued(refs: Iterable[ProcessRef]) -> AsyncIterator[None]:
    """Continue those of ``refs`` that are stopped, and stop them again at the end, unless their
    user has brought them to the foreground of their terminal meanwhile (``fg``). A second SIGCONT
    to a process that runs already (``bg``, ``kill``) cannot be detected."""
    going = {}
    for ref in refs:
        if why_stopped(ref) == BY_SIGNAL:
            foreground = _in_foreground(ref)
            if _send(ref, signal.SIGCONT):
                going[ref] = foreground
    if going:
        log.info("continued to be held", pids=[ref.pid for ref in going])
    try:
        yield
    finally:
        for ref, was_in_foreground in going.items():
            if was_in_foreground or not _in_foreground(ref):
                _send(ref, signal.SIGSTOP)


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
