"""Waiting for a daemon that was here and is not at this moment: it may be restarting."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.client.directory import Signs, signs_of_a_daemon
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_EVERY_S: Final = 0.1
"""A look at a socket that nobody serves costs microseconds."""

RESTARTED_WITHIN_S: Final = 10.0
"""A supervisor starts a daemon again within seconds, the system a supervisor."""

REVIVED_WITHIN_S: Final = 3.0
"""A supervisor that lives has started its daemon again by then; else whoever may starts one."""

T = TypeVar("T")


def await_return(
    directory: Path,
    connect: Callable[[], T],
    *,
    within_s: float = RESTARTED_WITHIN_S,
    waiting: Callable[[float], None],
    in_vain: Signs = frozenset(),
) -> T | None:
    """Return what ``connect`` returns, once it does not raise "no-daemon" any more; ``None`` after
    ``within_s``, or where nothing says that a daemon was in ``directory``.

    ``waiting`` is called before each attempt, with the seconds so far. ``in_vain`` are the signs
    that were there when an earlier wait found nobody: they are not waited for again.
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
