"""End a command in order, with all that it has started, when it gets SIGTERM, or SIGHUP because its
terminal was closed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kiwi_core.gpu import processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from kiwi_core.gpu.processes import ProcessRef

_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
"""Numbers of prctl(2)."""

ENDS_WITHIN_S: Final = 10.0
"""Time for a process to end by itself before it is killed; browsers and kernels take a second."""

_LOOK_EVERY_S: Final = 0.05

_REPEAT_S: Final = 0.2


class Terminated(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Raise ``Terminated`` at SIGTERM and SIGHUP. A second signal does not cut short the clean-up
    after the first, but raises again if some code swallowed the first exception: Python itself does
    so in callbacks of weak references, of which each import has one. So the signal is repeated
    until the block ends, and Python does not report what it swallowed. An ignored signal (nohup)
    stays ignored. Main thread only."""
    left, got = threading.Event(), threading.Event()
    asked: list[int] = []

    def leave(number: int, _frame: FrameType | None) -> None:
        if not _is_leaving():
            asked.append(number)
            got.set()
            raise Terminated(number)

    def repeat() -> None:
        got.wait()
        while not left.wait(_REPEAT_S):
            os.kill(os.getpid(), asked[-1])

    def report(swallowed: sys.UnraisableHookArgs) -> None:
        if not isinstance(swallowed.exc_value, Terminated):
            hook_before(swallowed)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    hook_before, sys.unraisablehook = sys.unraisablehook, report
    before = {number: signal.signal(number, leave) for number in numbers}
    repeater = threading.Thread(target=repeat, name="kiwi-leaving", daemon=True)
    repeater.start()
    try:
        yield
    finally:
        left.set()
        got.set()
        repeater.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook_before


def _is_leaving() -> bool:
    """Return whether a ``finally`` runs because of ``Terminated``, or an error in such a block is
    being handled."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Terminated):
        error = error.__context__
    return error is not None


@contextmanager
def ending_descendants() -> Iterator[None]:
    """At the end of the block, end all processes that this process has started in it, and all that
    its children left behind. Until then this process adopts orphans, in place of init.
    """
    others = _descendants(frozenset())  # children of a shell that exec'ed this process
    before = _adopt(orphans=True)
    try:
        yield
    finally:
        # Ask them to end, then kill them. The wait is limited: a process of another user (a
        # browser's sandbox) may be out of reach.
        for number in (signal.SIGTERM, signal.SIGKILL):
            ends_s = time.monotonic() + ENDS_WITHIN_S
            signalled: set[ProcessRef] = set()
            while (left := _descendants(frozenset(others))) and time.monotonic() < ends_s:
                for ref in left:
                    if ref not in signalled:
                        signalled.add(ref)
                        _signal(ref, number)
                time.sleep(_LOOK_EVERY_S)
        _adopt(orphans=before)


def _adopt(*, orphans: bool) -> bool:
    """Set whether orphans become children of this process; return the old value. If the kernel has
    no such call, orphans are not found; they end by themselves."""
    prctl, was = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)
    return bool(was.value)


def _descendants(others: frozenset[ProcessRef]) -> list[ProcessRef]:
    own = processes.ref_of(os.getpid())
    if own is None:
        return []
    found = [ref for ref in processes.tree(own, others) if ref != own]
    for ref in found:
        with suppress(ChildProcessError):  # not a child of this process
            os.waitpid(ref.pid, os.WNOHANG)
    return [ref for ref in found if processes.alive(ref)]


def _signal(ref: ProcessRef, number: signal.Signals) -> None:
    descriptor = processes.open_pidfd(ref)
    if descriptor is None:
        return
    try:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
