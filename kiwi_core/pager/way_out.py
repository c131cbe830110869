"""A page-out as seen by those that come in beside it, into the room that it makes.

Nobody waits for ever, and never for each other. One that comes in *follows* ways out: it takes what
they have freed, and waits for more until they have ended, one of them fails, or its own deadline.
A way out that fails says so first (``fail``), and waits a bounded time until nobody follows it any
more: whoever did has given back what it took, or was never going to. Only then does it bring its
own memory back. So followers wait for ways out that go on, ways out that have failed wait for
followers that give up, and no way out that goes on waits for anybody.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class WayOut:
    """Made by who orders the page-out, before it or any page-in beside it begins. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._failed = False
        self._ended = False
        self._followers = 0

    @property
    def failed(self) -> bool:
        """It makes no room after all."""
        return self._failed

    @property
    def ended(self) -> bool:
        """Its outcome has been reported."""
        return self._ended

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def end(self, *, made_room: bool) -> None:
        """Once it has been reported how it came out."""
        with self._changed:
            self._ended = True
            self._failed = self._failed or not made_room
            self._changed.notify_all()

    def wait_alone(self, until_ns: int) -> bool:
        """Until nobody follows; false: somebody still did at ``until_ns`` (monotonic)."""
        with self._changed:
            left_s = max(0.0, (until_ns - time.monotonic_ns()) / NS_PER_S)
            return self._changed.wait_for(lambda: not self._followers, left_s)

    def wait_changed(self, seconds: float) -> None:
        """Until it has failed or ended, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ended, seconds)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """The caller comes in beside it, or gives back what it took, for as long."""
        with self._changed:
            self._followers += 1
        try:
            yield
        finally:
            with self._changed:
                self._followers -= 1
                self._changed.notify_all()


@contextmanager
def following(ways: Sequence[WayOut]) -> Iterator[None]:
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way.followed())
        yield
