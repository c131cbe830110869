"""Find out whether anybody needs this daemon: one that a notebook started ends when nobody does.

The time comes with ``--end-unused-after``. Where a notebook or ``kiwi run`` starts the daemon, it
is ``Config.unused_ns``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.daemon.supervised import UNUSED, USED

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.address import Address
    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.engine.operations import OperationRunner
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.sessions.orphans import Orphans

LOOK_EVERY_S: Final = 1.0
"""Interval of looks: each is a few comparisons, and a second more or less does not matter."""


@dataclass(eq=False, repr=False)
class Unused:
    """``after_s``: 0 means that the daemon never counts as unused. ``tell`` gets each change.

    Each connection restarts the time. So the daemon stays for at least ``after_s`` after a client
    has connected.
    """

    after_s: float
    _address: Address
    _connections: Connections
    _registry: SessionRegistry
    _links: Links
    _operations: OperationRunner
    _orphans: Orphans
    _tell: Callable[[str], None]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _since_s: float = 0.0
    _visits: int = -1
    _word: str = USED

    async def watch(self) -> None:
        """Look at intervals, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look()

    def end(self) -> bool:
        """Stop accepting connections if nobody needs this daemon, and return whether that is so.
        The next program that wants the GPU starts another daemon."""
        if not self._look():
            return False
        self._address.close(comes_back=False)
        return True

    def _look(self) -> bool:
        """Return whether nobody has needed the daemon for ``after_s``."""
        if self._is_needed():
            self._visits, self._since_s = self._connections.taken, self._loop.time()
        is_unused = self._loop.time() - self._since_s >= self.after_s > 0
        word = UNUSED if is_unused else USED
        if word != self._word:
            self._word = word
            self._tell(word)
        return is_unused

    def _is_needed(self) -> bool:
        """Return whether anybody needs the daemon, or came and went since the last look. Memory
        that is out belongs to a session, or to what one has left behind."""
        return bool(
            self._connections.taken != self._visits
            or self._connections.open
            or any(True for _ in self._registry)
            or self._links
            or self._operations.running
            or self._orphans.at_work
            or self._address.is_awaited()
        )
