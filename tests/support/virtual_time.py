"""An event loop whose clock jumps to the next timer.

Tests of timers take no time, and the machine's speed does not change their results. The coroutines
may wait for timers only, not for other threads or processes.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from blocking import cancel_all

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Coroutine

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("This loop would wait for ever: there is no timer.")
        self.now_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


def advance(seconds: float) -> None:
    """Let time pass within a step of the running loop, as a call that blocks does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.selector.now_s += seconds


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of ``coroutine``. Meanwhile ``time.monotonic`` is the loop's clock, too."""
    loop = _Loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(time, "monotonic_ns", lambda: round(loop.time() * NS_PER_S))
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(cancel_all())
            loop.close()
