"""The messages that are legal in each state of a connection: a table, and checks of burst numbers.

The daemon checks each message before it obeys, the client before it sends. An illegal message
raises an error and changes nothing. The diagram in ``docs/protocol.md`` is made from the table.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from kiwi_core.errors import PeerError
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    BringBack,
    ClientMessage,
    DaemonMessage,
    EndBurst,
    GetHistory,
    GetMetrics,
    GetStatus,
    GetStory,
    GetUsage,
    Goodbye,
    Hello,
    HintReport,
    HistoryReport,
    MetricsReport,
    Ok,
    Ping,
    Pong,
    Release,
    Resume,
    Role,
    Set,
    StatusReport,
    StoryReport,
    Suspend,
    UsageReport,
    Welcome,
    Withdraw,
)
from kiwi_core.wire.pager import PagerDone, PagerState, WantLease, WantRoom


class State(Enum):
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
    CLOSED = "closed"


Move: TypeAlias = "type[ClientMessage] | Role"
"""What a client does: a message, or a hello in one of the roles."""

_LOOK: Final[tuple[type[ClientMessage], ...]] = (
    GetStatus, GetStory, GetHistory, GetMetrics, GetUsage, Ping,
)  # fmt: skip
_STEER: Final[tuple[type[ClientMessage], ...]] = (
    *_LOOK, Set, Release, Suspend, Resume, BringBack,
)  # fmt: skip
_BURST: Final[tuple[type[ClientMessage], ...]] = (Acquire, Withdraw, EndBurst)
_LINK: Final[tuple[type[ClientMessage], ...]] = (
    PagerState, PagerDone, WantLease, WantRoom, Ping,
)  # fmt: skip

TABLE: Final[dict[State, dict[Move, State]]] = {
    State.NEW: {
        Role.SESSION: State.SESSION,
        Role.OBSERVER: State.OBSERVER,
        Role.PAGER: State.PAGER,
    },
    State.SESSION: {
        **dict.fromkeys((*_BURST, *_STEER), State.SESSION),
        Goodbye: State.LEAVING,
    },
    State.OBSERVER: dict.fromkeys(_STEER, State.OBSERVER),
    State.PAGER: dict.fromkeys(_LINK, State.PAGER),
    State.LEAVING: dict.fromkeys((*_LOOK, EndBurst), State.LEAVING),
    State.CLOSED: {},
}

ANSWERS: Final[dict[type[ClientMessage], type[DaemonMessage]]] = {
    Hello: Welcome,
    Release: Ok,
    Suspend: Ok,
    Resume: Ok,
    BringBack: HintReport,
    Goodbye: Ok,
    GetStatus: StatusReport,
    Set: Ok,
    GetStory: StoryReport,
    GetHistory: HistoryReport,
    GetMetrics: MetricsReport,
    GetUsage: UsageReport,
    Ping: Pong,
}
"""Requests and the types of their answers, in the order of the requests; or ``error`` answers."""


class Conversation:
    """The past of one connection, as far as it decides which messages may come next."""

    def __init__(self) -> None:
        self.state = State.NEW
        self.burst = 0
        """The last burst that a hello or acquire named; 0 if none did."""
        self.in_burst = False
        """True if that burst was requested (or claimed by the hello) and has not ended."""
        self.asked = 0
        """The last burst that an acquire named on this connection; 0 if none did."""
        self.lingering = False
        """True if threads or tasks of that burst live on after its end."""

    def says(self, message: ClientMessage) -> None:
        """Take a message of the client.

        Raises ``PeerError`` and changes nothing: "protocol-version" for a hello of another version,
        "out-of-order" for anything else that may not come now.
        """
        if type(message) is Acquire and self.state is State.SESSION:
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
        if isinstance(message, Hello):
            self.burst, self.in_burst = message.burst, message.in_burst
        elif isinstance(message, (EndBurst, Withdraw)):
            self.in_burst = False
            self.lingering = isinstance(message, EndBurst) and message.lingering

    def copy(self) -> Conversation:
        """Return an independent conversation in the same state."""
        twin = Conversation.__new__(Conversation)
        twin.__dict__.update(self.__dict__)
        return twin

    def close(self) -> None:
        """Record that the connection ended, from whichever side."""
        self.state = State.CLOSED
        self.in_burst = self.lingering = False

    def _check_numbers(self, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._check_hello(message)
        elif isinstance(message, (EndBurst, Withdraw)) and message.burst != self.burst:
            raise _wrong_burst(message.burst, f"the last one is {self.burst}")

    def _check_hello(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise PeerError(
                "protocol-version",
                f"One end speaks version {hello.protocol} of the protocol,"
                f" the other version {PROTOCOL}.",
                "Use the same version of Kiwi on both ends, then restart the older one.",
            )
        if hello.in_burst and not hello.burst:
            raise _wrong_burst(0, "a burst that runs has a number")

    def _check_acquire(self, acquire: Acquire) -> None:
        # Asking again for the burst of the hello is how a client resumes its wait.
        if acquire.burst < self.burst or acquire.burst <= self.asked:
            raise _wrong_burst(acquire.burst, f"the next one is {self.burst + 1} or later")
        if self.in_burst and acquire.burst != self.burst:
            raise _wrong_burst(acquire.burst, f"burst {self.burst} has not ended")


def _move(message: ClientMessage) -> Move:
    return message.role if isinstance(message, Hello) else type(message)


def _wrong_burst(burst: int, why: str) -> PeerError:
    return PeerError("out-of-order", f"Burst {burst} may not be named now: {why}.")


def describe() -> str:
    """Return the table as a Mermaid state diagram, as ``docs/protocol.md`` holds it."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.NEW.value}"]
    for state, moves in TABLE.items():
        for target in State:
            labels = [_label(move) for move, following in moves.items() if following is target]
            if labels:
                lines.append(f"    {state.value} --> {target.value}: {', '.join(labels)}")
        if state is not State.CLOSED:
            lines.append(f"    {state.value} --> {State.CLOSED.value}: end of stream, fatal error")
    return "\n".join([*lines, f"    {State.CLOSED.value} --> [*]", ""])


def _label(move: Move) -> str:
    if isinstance(move, Role):
        return f"hello ({move.value})"
    return str(move.__struct_config__.tag)
