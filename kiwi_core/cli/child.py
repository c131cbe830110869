"""A child process that behaves as if the shell had started it: it has the same terminal and process
group and gets the signals, and its exit code is returned."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.gpu.ownable import CRASHES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Ctrl-C and Ctrl-\\ reach the whole process group, so the child has them already."""

SEEN_WITHIN_S: Final = 0.2

IGNORED_BY_PYTHON: Final = tuple(
    getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ") if hasattr(signal, name)
)
"""Signals that Python ignores for itself; a program must not inherit that."""


def find(program: str) -> str | int:
    """Return the path that would be executed, or the exit code with which a shell gives up."""
    if (path := shutil.which(program)) is not None:
        return path
    exists = os.path.exists(program) and os.path.dirname(program)
    return exits.CANNOT_EXECUTE if exists else exits.NOT_FOUND


def run(path: str, command: list[str], env: Mapping[str, str]) -> int:
    """Run ``command`` to its end; return its exit code, or 128 + n if signal n ended it.

    Main thread only. Raises ``OSError`` if the program cannot be executed.
    """
    with _Forwarding() as forwarding:
        # Not fork: the client's thread may hold locks, and no Python code may run in the child.
        pid = os.posix_spawn(path, command, env, setsigmask=(), setsigdef=IGNORED_BY_PYTHON)
        forwarding.to(pid)
        forwarding.wait_for_end(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_code != os.CLD_EXITED and ended.si_status in CRASHES:
            # Give the daemon a moment to see the crash: only before the program is reaped does
            # ``/proc`` tell other processes how it ended.
            time.sleep(SEEN_WITHIN_S)
        _, status = os.waitpid(pid, 0)
        forwarding.stop()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else exits.of_signal(-code)


class _Forwarding:
    """Passes signals of this process on to the child. Those that come before the child starts wait
    for it. A signal that this process ignores (nohup) stays ignored in the child, too.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._ended = False
        self._early: list[int] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Forwarding:
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def to(self, pid: int) -> None:
        self._pid = pid
        while self._early:
            os.kill(pid, self._early.pop(0))

    def wait_for_end(self, pid: int) -> None:
        """Wait until ``pid`` can be reaped. ``waitpid`` alone would not pass on a signal that comes
        just before that call blocks until it returns. The wake-up pipe keeps the signal."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        ended = os.pidfd_open(pid)
        try:
            while ended not in select.select([ended, woken], [], [])[0]:
                os.read(woken, 4096)  # the handlers run before this loop goes round
        finally:
            signal.set_wakeup_fd(before)
            for descriptor in (woken, waker, ended):
                os.close(descriptor)

    def stop(self) -> None:
        """Stop after the child was reaped: another process may have its id now."""
        self._ended = True

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        if self._ended or (number in FROM_TERMINAL and _in_foreground()):
            return
        if self._pid is None:
            self._early.append(number)
        else:
            os.kill(self._pid, number)


def _in_foreground() -> bool:
    """Return whether this process group is in the foreground: then its keys reach the child too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
