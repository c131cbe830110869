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

PATIENCE_S = 30.0
"""Time limit for what should take milliseconds: the machine may be busy."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``condition()``; fail saying that ``what`` did not come."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def die_with_the_test() -> None:
    """End this process with its parent; for ``preexec_fn``. A test that takes too long is ended
    without any clean-up, and the processes that it started must end, too."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
