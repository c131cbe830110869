"""Ask whether a daemon answers, and wait for one that is away for a moment, or does not answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.client.daemon_socket import dial
from kiwi_core.client.directory import signs_of_a_daemon
from kiwi_core.client.patience import Patience
from kiwi_core.errors import KiwiError, SilentDaemonError, is_full
from kiwi_core.wire.messages import PROTOCOL, Hello, Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.client.directory import Signs

LOOK_EVERY_S: Final = 0.1
"""Time between two attempts; one at a socket that nobody serves costs microseconds."""

RESTARTED_WITHIN_S: Final = 10.0
"""A supervisor restarts a daemon within seconds, and the system restarts a supervisor as fast."""

REVIVED_WITHIN_S: Final = 3.0
"""A running supervisor restarts its daemon within this time. After it, a client that may start a
daemon starts one.
"""

HANGS_AFTER_S: Final = 60.0
"""A daemon that is there and does not answer for this long hangs. One that is stopped for a moment,
or whose machine is busy, answers within seconds; a program that went on without it would use the
GPU beside the sessions that it serves."""

T = TypeVar("T")


class ReportingPatience(Patience):
    """Patience that calls ``waiting`` several times a second, with the seconds so far."""

    def __init__(self, limit_s: float, waiting: Callable[[float], None]) -> None:
        super().__init__(limit_s)
        self._waiting = waiting

    def tick(self) -> bool:
        self._waiting(self.spent_s)
        return super().tick()


def answers(path: Path, patience: Patience) -> bool:
    """Return whether a daemon answers at ``path``, be it that it is full; false: none is there, or
    it is not for this process. Raises ``SilentDaemonError`` when ``patience`` ends."""
    hello = Hello(protocol=PROTOCOL, role=Role.OBSERVER, client="kiwi")
    try:
        dial(path, hello, patience)[0].close()
    except SilentDaemonError:
        raise
    except KiwiError as error:
        return is_full(error)
    return True


def await_return(
    directory: Path,
    connect: Callable[[], T],
    failed: KiwiError,
    *,
    within_s: float = RESTARTED_WITHIN_S,
    waiting: Callable[[float, bool], None],
    in_vain: Signs = frozenset(),
) -> T | None:
    """Call ``connect``, which has ``failed`` with "no-daemon", until it does not, and return its
    result; ``None`` after ``within_s``, or if ``directory`` shows no sign of a daemon.

    A daemon that is there and does not answer is waited for longer. Raises ``SilentDaemonError``
    if it hangs.

    ``waiting`` is called several times a second, with the seconds so far, and with whether a daemon
    is there. ``in_vain`` are the signs that an earlier wait has found; while they are the same,
    this does not wait.
    """
    began_s = time.monotonic()
    silence = ReportingPatience(HANGS_AFTER_S, lambda spent_s: waiting(spent_s, True))
    while signs := signs_of_a_daemon(directory):
        spent_s = time.monotonic() - began_s
        if isinstance(failed, SilentDaemonError):
            if signs == in_vain:
                raise failed
            answers(failed.path, silence)
            began_s = time.monotonic()  # if it is gone now, it may be restarting
        elif signs == in_vain or spent_s >= within_s:
            break
        else:
            waiting(spent_s, False)
            time.sleep(LOOK_EVERY_S)
        try:
            return connect()
        except KiwiError as error:
            if error.code != "no-daemon":
                raise
            failed = error
    return None
