"""Waiting in tests, and ending the processes that they start. Imports nothing of Kiwi."""

from __future__ import annotations

import ctypes
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

PATIENCE_S = 60.0
"""Time limit for what should take milliseconds: the machine may be busy."""

SHORTEST_S, LONGEST_S = 0.01, 0.05
"""Pauses between two looks: a tenth of the wait so far, within these. What takes long is looked at
less often: the processes that are waited for need the processors."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``condition()``; fail saying that ``what`` did not come."""
    began_s = now_s = time.monotonic()
    while now_s < began_s + timeout_s:
        value = condition()
        if value:
            return value
        time.sleep(min(LONGEST_S, max(SHORTEST_S, (now_s - began_s) / 10)))
        now_s = time.monotonic()
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def die_with_the_test() -> None:
    """End this process with its parent; for ``preexec_fn``. A test that takes too long is ended
    without any clean-up, and the processes that it started must end, too."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
