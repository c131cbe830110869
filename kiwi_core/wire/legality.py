"""Which message is legal when, on one connection: a table, and the two numbers beside it.

The daemon asks before it obeys a client's message, the client before it sends one. What is illegal
raises and changes nothing. The diagram in ``docs/protocol.md`` is made from the table.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from kiwi_core.errors import PeerError
from kiwi_core.wire import messages as m
from kiwi_core.wire.pager import PagerDone, PagerState, WantLease, WantRoom


class ConnectionState(Enum):
    """Where a connection stands."""

    NEW = "new"
    """Nothing said yet."""
    SESSION = "session"
    """Belongs to one process that may ask for the GPU."""
    OBSERVER = "observer"
    """Looks and steers; never holds the GPU."""
    PAGER = "pager"
    """The preloaded library of one process."""
    LEAVING = "leaving"
    """A session that said goodbye and gets its memory back."""
    CLOSED = "closed"


Move: TypeAlias = "type[m.ClientMessage] | m.Role"
"""What a client does: a message, or a hello in one of the roles."""

_LOOK: Final[tuple[type[m.ClientMessage], ...]] = (
    m.GetStatus, m.GetStory, m.GetHistory, m.GetMetrics, m.GetUsage, m.Ping,
)  # fmt: skip
_STEER: Final[tuple[type[m.ClientMessage], ...]] = (
    *_LOOK, m.Set, m.Release, m.Suspend, m.Resume, m.BringBack,
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
    ConnectionState.CLOSED: {},
}

ANSWERS: Final[dict[type[m.ClientMessage], type[m.DaemonMessage]]] = {
    m.Hello: m.Welcome,
    m.Release: m.Ok,
    m.Suspend: m.Ok,
    m.Resume: m.Ok,
    m.BringBack: m.HintReport,
    m.Goodbye: m.Ok,
    m.GetStatus: m.StatusReport,
    m.Set: m.Ok,
    m.GetStory: m.StoryReport,
    m.GetHistory: m.HistoryReport,
    m.GetMetrics: m.MetricsReport,
    m.GetUsage: m.UsageReport,
    m.Ping: m.Pong,
}
"""Requests and what answers them, in the order of the requests; ``error`` may stand for each."""


class Conversation:
    """One connection's past, as far as it decides what may come next."""

    def __init__(self) -> None:
        self.state = ConnectionState.NEW
        self.burst = 0
        """The last burst that hello or acquire named."""
        self.in_burst = False
        """Whether that burst was asked for (or claimed by hello) and not ended."""
        self.asked = 0
        """The last burst that acquire named on this connection."""
        self.lingering = False
        """Whether what that burst left behind goes on."""

    def says(self, message: m.ClientMessage) -> None:
        """The client says ``message``.

        Raises ``PeerError`` and changes nothing: "protocol-version" for a hello of another
        version, "out-of-order" for anything else that may not come now.
        """
        if type(message) is m.Acquire and self.state is ConnectionState.SESSION:
            # What the table says, without asking it: somebody waits for a grant. (In no other
            # state may it come.)
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

    def copy(self) -> Conversation:
        """As it stands now; what is said to either does not change the other."""
        twin = Conversation.__new__(Conversation)
        twin.__dict__.update(self.__dict__)
        return twin

    def close(self) -> None:
        """The connection ended, from whichever side."""
        self.state = ConnectionState.CLOSED
        self.in_burst = self.lingering = False

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


def describe() -> str:
    """The table as a Mermaid state diagram; ``docs/protocol.md`` holds exactly this text."""
    new, closed = ConnectionState.NEW.value, ConnectionState.CLOSED.value
    lines = ["stateDiagram-v2", f"    [*] --> {new}"]
    for state, moves in TABLE.items():
        for target in ConnectionState:
            labels = [_label(move) for move, following in moves.items() if following is target]
            if labels:
                lines.append(f"    {state.value} --> {target.value}: {', '.join(labels)}")
        if state is not ConnectionState.CLOSED:
            lines.append(f"    {state.value} --> {closed}: end of stream, fatal error")
    return "\n".join([*lines, f"    {closed} --> [*]", ""])


def _label(move: Move) -> str:
    if isinstance(move, m.Role):
        return f"hello ({move.value})"
    return str(move.__struct_config__.tag)
