"""The messages that are legal in each state of a connection: a table, and checks of burst numbers.

The daemon checks each message before it obeys, the client before it sends. An illegal message
raises an error and changes nothing. A test compares the diagram in ``docs/protocol.md``.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from kiwi_core.errors import PeerError
from kiwi_core.wire import messages as m
from kiwi_core.wire.pager import PagerDone, PagerState, WantLease, WantRoom


class ConnectionState(Enum):
    """The state of a connection."""

    NEW = "new"
    """Nothing was sent yet."""
    SESSION = "session"
    """Belongs to one process that may ask for the GPU."""
    OBSERVER = "observer"
    """Reads status and controls sessions; never holds the GPU."""
    PAGER = "pager"
    """The preloaded library of one process."""
    LEAVING = "leaving"
    """A session that said goodbye and gets its memory back into the GPU."""


_SESSION: Final = ConnectionState.SESSION  # under an own name: see ``sched.model.memory``

Move: TypeAlias = "type[m.ClientMessage] | m.Role"
"""What a client does: a message, or a hello in one of the roles."""

_LOOK: Final[tuple[type[m.ClientMessage], ...]] = (
    m.GetStatus, m.GetStory, m.GetHistory, m.GetMetrics, m.GetUsage, m.Ping,
)  # fmt: skip
_STEER: Final[tuple[type[m.ClientMessage], ...]] = (
    *_LOOK, m.Set, m.Release, m.Suspend, m.Resume, m.BringBack, m.Rename, m.Expect,
)  # fmt: skip
_BURST: Final[tuple[type[m.ClientMessage], ...]] = (m.Acquire, m.Withdraw, m.EndBurst)
_LINK: Final[tuple[type[m.ClientMessage], ...]] = (
    PagerState, PagerDone, WantLease, WantRoom, m.Ping,
)  # fmt: skip

TABLE: Final[dict[ConnectionState, dict[Move, ConnectionState]]] = {
    ConnectionState.NEW: {
        m.Role.SESSION: ConnectionState.SESSION,
        m.Role.OBSERVER: ConnectionState.OBSERVER,
        m.Role.PAGER: ConnectionState.PAGER,
    },
    ConnectionState.SESSION: {
        **dict.fromkeys((*_BURST, *_STEER), ConnectionState.SESSION),
        m.Goodbye: ConnectionState.LEAVING,
    },
    ConnectionState.OBSERVER: dict.fromkeys(_STEER, ConnectionState.OBSERVER),
    ConnectionState.PAGER: dict.fromkeys(_LINK, ConnectionState.PAGER),
    ConnectionState.LEAVING: dict.fromkeys((*_LOOK, m.EndBurst), ConnectionState.LEAVING),
}

ANSWERS: Final[dict[type[m.ClientMessage], type[m.DaemonMessage]]] = {
    m.Hello: m.Welcome,
    m.Release: m.Ok,
    m.Suspend: m.Ok,
    m.Resume: m.Ok,
    m.BringBack: m.HintReport,
    m.Rename: m.Ok,
    m.Expect: m.Ok,
    m.Goodbye: m.Ok,
    m.GetStatus: m.StatusReport,
    m.Set: m.Ok,
    m.GetStory: m.StoryReport,
    m.GetHistory: m.HistoryReport,
    m.GetMetrics: m.MetricsReport,
    m.GetUsage: m.UsageReport,
    m.Ping: m.Pong,
}
"""Requests and the types of their answers, in the order of the requests; or ``error`` answers."""


class Conversation:
    """The past of one connection, as far as it decides which messages may come next."""

    def __init__(self) -> None:
        self.state = ConnectionState.NEW
        self.burst = 0
        """The last burst that a hello or acquire named; 0 if none did."""
        self.in_burst = False
        """True if that burst was requested (or claimed by the hello) and has not ended."""
        self.asked = 0
        """The last burst that an acquire named on this connection; 0 if none did."""
        self.lingering = False
        """True if threads or tasks of that burst live on after its end."""

    def accept(self, message: m.ClientMessage) -> None:
        """Take a message of the client.

        Raises ``PeerError`` and changes nothing: "protocol-version" for a hello of another version,
        "out-of-order" for anything else that may not come now.
        """
        if type(message) is m.Acquire and self.state is _SESSION:
            # A shortcut with the same result as the table, because somebody waits for this grant.
            # The table allows an acquire in no other state.
            self._check_acquire(message)
            self.burst = self.asked = message.burst
            self.in_burst, self.lingering = True, False
            return
        following = TABLE[self.state].get(_move(message))
        if following is None:
            raise PeerError(
                "out-of-order",
                f"{type(message).__struct_config__.tag!r} may not come now"
                f" (the connection is {self.state.value}).",
            )
        self._check_numbers(message)
        self.state = following
        if isinstance(message, m.Hello):
            self.burst, self.in_burst = message.burst, message.in_burst
        elif isinstance(message, (m.EndBurst, m.Withdraw)):
            self.in_burst = False
            self.lingering = isinstance(message, m.EndBurst) and message.lingering

    def _check_numbers(self, message: m.ClientMessage) -> None:
        if isinstance(message, m.Hello):
            self._check_hello(message)
        elif isinstance(message, (m.EndBurst, m.Withdraw)) and message.burst != self.burst:
            raise _wrong_burst(message.burst, f"the last one is {self.burst}")

    def _check_hello(self, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise PeerError(
                "protocol-version",
                f"One end speaks version {hello.protocol} of the protocol,"
                f" the other version {m.PROTOCOL}.",
                "Use the same version of Kiwi on both ends, then restart the older one.",
            )
        if hello.in_burst and not hello.burst:
            raise _wrong_burst(0, "a burst that runs has a number")

    def _check_acquire(self, acquire: m.Acquire) -> None:
        # Asking again for the burst of the hello is how a client resumes its wait.
        if acquire.burst < self.burst or acquire.burst <= self.asked:
            raise _wrong_burst(acquire.burst, f"the next one is {self.burst + 1} or later")
        if self.in_burst and acquire.burst != self.burst:
            raise _wrong_burst(acquire.burst, f"burst {self.burst} has not ended")


def _move(message: m.ClientMessage) -> Move:
    return message.role if isinstance(message, m.Hello) else type(message)


def _wrong_burst(burst: int, why: str) -> PeerError:
    return PeerError("out-of-order", f"Burst {burst} may not be named now: {why}.")
