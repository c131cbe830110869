"""Wait for a daemon that ran and does not answer now: it may be restarting."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.client.directory import Signs, signs_of_a_daemon
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S: Final = 0.1
"""Time between two attempts; one at a socket that nobody serves costs microseconds."""

RESTARTED_WITHIN_S: Final = 10.0
"""A supervisor restarts a daemon within seconds, and so does the system a supervisor."""

REVIVED_WITHIN_S: Final = 3.0
"""A supervisor that runs has restarted its daemon by then; else whoever may starts one."""

T = TypeVar("T")


def await_return(
    directory: Path,
    connect: Callable[[], T],
    *,
    within_s: float = RESTARTED_WITHIN_S,
    waiting: Callable[[float], None],
    in_vain: Signs = frozenset(),
) -> T | None:
    """Call ``connect`` until it does not raise "no-daemon" and return its result; ``None`` after
    ``within_s``, or if ``directory`` shows no sign of a daemon.

    ``waiting`` is called before each attempt, with the seconds so far. ``in_vain`` are the signs
    that an earlier wait found without a daemon; while they are the same, this does not wait.
    """
    began_s = time.monotonic()
    while (signs := signs_of_a_daemon(directory)) and signs != in_vain:
        spent_s = time.monotonic() - began_s
        if spent_s >= within_s:
            break
        waiting(spent_s)
        time.sleep(LOOK_EVERY_S)
        try:
            return connect()
        except KiwiError as error:
            if error.code != "no-daemon":
                raise
    return None
