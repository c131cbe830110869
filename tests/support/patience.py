"""How tests wait, and how what they start ends with them. Imports nothing of Kiwi."""

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
"""How long tests wait for what should take milliseconds: the machine may be busy."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition()``; ``AssertionError`` saying ``what`` did not come."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def die_with_the_test() -> None:
    """For ``preexec_fn``: a test that takes too long is ended without any clean-up; what it has
    started must end, too."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
