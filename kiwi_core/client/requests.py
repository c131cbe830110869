"""What a client knows about its burst and its open requests. No socket, no thread, no lock.

``handle_message`` takes each message from the daemon. ``next_message`` compares the state here with
what was sent on a connection and returns the message to send next. So nothing else sends
``Acquire`` or ``EndBurst``: a caller changes the state, and the message follows, also on a new
connection or after an interrupt. Each step that matters is a single assignment, or a single call
into C, so that an interrupt finds it done or not done.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.wire.legality import ANSWERS
from kiwi_core.wire.messages import (
    Acquire,
    EndBurst,
    Error,
    GetStatus,
    Granted,
    StatusReport,
    UserNotice,
    Waiting,
    Welcome,
    Withdraw,
    Withdrawn,
)

if TYPE_CHECKING:
    from kiwi_core.wire.legality import Conversation
    from kiwi_core.wire.messages import ClientMessage, DaemonMessage, GpuStatus

PENDING_MAX: Final = 256
"""Most requests without an answer; a daemon that owes more answers counts as hung."""

_ANSWERS: Final = frozenset(ANSWERS.values()) - {Welcome, StatusReport}
"""Messages that only answer a request: a welcome begins a connection, a status may be watched."""


class LeaseCancelled(CallerError):  # noqa: N818 - an outcome that was asked for
    """The caller has cancelled its wait. The place in the queue is free."""

    def __init__(self) -> None:
        super().__init__("cancelled", "The wait for the GPU was cancelled.")


class LeasePhase(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    HELD = "held"
    LINGERING = "lingering"
    """The cell is over, but threads or tasks that it left behind still use the GPU."""


# Under own names: see ``sched.model.memory``.
IDLE: Final = LeasePhase.IDLE
WAITING: Final = LeasePhase.WAITING
HELD: Final = LeasePhase.HELD
LINGERING: Final = LeasePhase.LINGERING


class LeaseRequest:
    """One request for the GPU. It is over when granted, failed or cancelled."""

    __slots__ = (
        "blocking",
        "burst",
        "ended",
        "error",
        "granted",
        "left",
        "owner",
        "waiting",
        "withdrawn",
    )  # fmt: skip

    def __init__(self, burst: int, owner: int, *, blocking: bool) -> None:
        self.burst = burst
        self.owner = owner
        """Ident of the thread that asked."""
        self.blocking = blocking
        """Whether that thread waits inside ``acquire``, so that nobody has a ticket."""
        self.left = False
        """Whether an exception has ended that ``acquire``, so that nobody wants this lease any
        more.
        """
        self.granted: Granted | None = None
        """The latest grant; a new one, with a fresh quantum, comes after each suspension."""
        self.waiting: Waiting | None = None
        """The latest place in the queue; after the first grant, set only while suspended."""
        self.error: KiwiError | None = None
        """Why it was not granted, or is no longer granted."""
        self.ended: LeasePhase | None = None
        """The phase after the burst, ``IDLE`` or ``LINGERING``; None before its end."""
        self.withdrawn = False
        """Whether the daemon has confirmed that the place in the queue is free."""

    @property
    def over(self) -> bool:
        return self.granted is not None or self.error is not None

    @property
    def phase(self) -> LeasePhase:
        if self.error is not None or self.left:
            return IDLE
        return self.ended or (WAITING if self.granted is None else HELD)


class Request:
    """A request to the daemon, which answers requests of one kind in the order of asking."""

    __slots__ = ("error", "message", "number", "replies")

    def __init__(self, message: ClientMessage) -> None:
        self.message = message
        self.number = 0
        """Its place among all requests of its table, from 1."""
        self.replies: list[DaemonMessage] = []
        """The answer; one at most."""
        self.error: KiwiError | None = None
        """Why there is no answer."""

    @property
    def over(self) -> bool:
        return bool(self.replies) or self.error is not None

    def result(self) -> DaemonMessage:
        """Return the answer, once ``over``. Raises ``KiwiError`` if there is none, or if the answer
        is an error.
        """
        if self.replies:
            if isinstance(reply := self.replies[0], Error):
                raise _failure(reply)
            return reply
        assert self.error is not None
        raise self.error


class BurstNumbers:
    """The number of the last burst that this process asked one daemon for, through any client."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0


class RequestTable:
    def __init__(self, numbers: BurstNumbers) -> None:
        self._numbers = numbers
        self._burst_before = numbers.last
        self.lease: LeaseRequest | None = None
        """The latest request for the GPU, over or not."""
        self._asked = 0
        self._pending: deque[Request] = deque()
        """Requests, sent or to be sent. After an interrupt it may still hold one that is over."""
        self.watching = False
        self.latest: GpuStatus | None = None
        self.reports = 0
        """Number of statuses received, so that watchers see which are new."""
        self.unforeseen: Waiting | None = None
        """Where a call at the gate waits for the GPU, although nobody here asked for it."""

    # --- the caller's side ----------------------------------------------------------------------

    def begin(self, owner: int, *, blocking: bool) -> LeaseRequest:
        """Ask for the next burst. Raises ``CallerError`` "in-burst"."""
        last = self.lease
        if last is not None and (phase := last.phase) in (WAITING, HELD):
            if phase is HELD or not (last.blocking and last.owner == owner):
                raise CallerError(
                    "in-burst",
                    f"This process already {'holds' if phase is HELD else 'waits for'} the GPU.",
                    "End that burst, or cancel that wait, first.",
                )
            # This thread is here again, so its earlier acquire has ended: a second interrupt came
            # while the first one was handled.
            last.error = LeaseCancelled()
        self._numbers.last += 1
        self.lease = lease = LeaseRequest(self._numbers.last, owner, blocking=blocking)
        return lease

    @property
    def phase(self) -> LeasePhase:
        return IDLE if self.lease is None else self.lease.phase

    @property
    def burst(self) -> int:
        """The number of the last burst asked for."""
        return self._burst_before if self.lease is None else self.lease.burst

    @property
    def in_burst(self) -> bool:
        return self.phase in (HELD, LINGERING)

    def end(self, *, lingering: bool) -> None:
        """End the burst, if there is one."""
        if self.lease is not None and self.in_burst:
            self.lease.ended = LINGERING if lingering else IDLE

    def give_up(self, lease: LeaseRequest, why: KiwiError) -> None:
        """End ``lease``, whether it waits or is held."""
        if lease.phase in (WAITING, HELD):
            lease.error = why

    def next_message(self, conversation: Conversation) -> ClientMessage | None:
        """Return what to send next about the burst, after ``conversation``; ``None``: nothing."""
        lease = self.lease
        phase = IDLE if lease is None else lease.phase
        same = lease is not None and lease.burst == conversation.burst
        if conversation.in_burst:
            if same and phase in (WAITING, HELD):
                return None
            if same and phase is LINGERING:
                return EndBurst(burst=conversation.burst, lingering=True)
            granted = same and lease is not None and lease.granted is not None
            if conversation.asked == conversation.burst and not granted:
                return Withdraw(burst=conversation.burst)
            return EndBurst(burst=conversation.burst)
        if conversation.lingering and same and phase is IDLE:
            return EndBurst(burst=conversation.burst)
        if lease is not None and phase is WAITING and conversation.asked < lease.burst:
            return Acquire(burst=lease.burst)
        return None

    def ask(self, request: Request) -> int:
        """Number ``request`` and queue it. Return how many requests are open."""
        while self._pending and self._pending[0].over:
            self._pending.popleft()
        self._asked += 1
        request.number = self._asked
        self._pending.append(request)
        return len(self._pending)

    def next_request(self, last: int) -> Request | None:
        """Return the request to send next on a connection where number ``last`` was the last."""
        if not self._pending or self._pending[-1].number <= last:
            return None
        unsaid = [request for request in self._pending if request.number > last]
        return unsaid[0]

    def refuse(self, request: Request, why: KiwiError) -> None:
        """Fail ``request``, which may not be sent."""
        request.error = why
        self._pending.remove(request)

    # --- the daemon's side ----------------------------------------------------------------------

    def handle_message(self, messages: deque[DaemonMessage]) -> UserNotice | Waiting | None:
        """Take the first of ``messages``. Return it if the user must see it: a notice, or where a
        call at the gate waits.

        Raises ``PeerError`` if it makes no sense now or is a fatal error. After an interrupt the
        same message is handled again. This does no harm, except for an answer; so an answer is
        moved to its request in one step.
        """
        message = messages[0]
        if isinstance(message, (Granted, Waiting, Withdrawn)):
            self._handle_burst_message(message)
            messages.popleft()
            return self.unforeseen if message is self.unforeseen else None
        if isinstance(message, Error):
            if self._handle_error(message, messages):
                return None
        elif isinstance(message, StatusReport):
            if self._handle_status(message, messages):
                return None
        elif type(message) in _ANSWERS:
            self._answer(message, messages)
            return None
        elif not isinstance(message, UserNotice):
            raise _unexpected(message)
        messages.popleft()
        return message if isinstance(message, UserNotice) else None

    def _handle_burst_message(self, message: Granted | Waiting | Withdrawn) -> None:
        lease = self.lease
        if lease is None or message.burst != lease.burst:
            if not message.burst:
                self.unforeseen = message if isinstance(message, Waiting) else None
            elif message.burst > self.burst:
                raise _unexpected(message)
            # else it is about a wait that was given up while the message was on its way
        elif isinstance(message, Withdrawn):
            lease.withdrawn = True
        elif isinstance(message, Waiting):
            lease.waiting = message
        elif lease.phase is not IDLE:
            if lease.granted is not None:
                lease.waiting = None  # the burst goes on after a suspension
            lease.granted = message

    def _handle_status(self, report: StatusReport, messages: deque[DaemonMessage]) -> bool:
        """Record the status. Return whether a request took it as its answer."""
        self.latest = report.gpu
        self.reports += 1
        if self.watching and not [r for r in self._open() if isinstance(r.message, GetStatus)]:
            return False
        self._answer(report, messages)
        return True

    def _answer(self, message: DaemonMessage, messages: deque[DaemonMessage]) -> None:
        """Give the answer to the oldest request that it fits. Requests of other kinds may overtake
        a slow one (a release, a goodbye)."""
        for request in self._open():
            if isinstance(message, ANSWERS[type(request.message)]):
                self._hand_over(request, messages)
                return
        raise _unexpected(message)

    def _open(self) -> list[Request]:
        return [request for request in self._pending if not request.over]

    def _hand_over(self, request: Request, messages: deque[DaemonMessage]) -> None:
        # map + extend: no bytecode, and so no interrupt, between taking the answer and storing it.
        request.replies.extend(map(deque.popleft, (messages,)))
        self._pending.remove(request)

    def _handle_error(self, error: Error, messages: deque[DaemonMessage]) -> bool:
        """Fail what the error is about. Return whether a request took the error."""
        if error.fatal:
            raise _failure(error)
        lease = self.lease
        asked = [r for r in self._open() if error.about in ("", _tag(r.message))]
        if error.about in ("acquire", "withdraw") or not (error.about or asked):
            if lease is not None and lease.phase is WAITING:
                lease.error = _failure(error)
        elif asked:
            self._hand_over(asked[0], messages)
            return True
        return False

    # --- connections come and go ----------------------------------------------------------------

    def lost(self, why: KiwiError) -> None:
        """Fail the requests, because the connection is gone; a wait or a burst goes on."""
        for request in self._pending:
            request.error = why
        self._pending.clear()
        self.unforeseen = None

    def daemon_full(self) -> None:
        """Tell the waiting caller that the daemon accepts no more connections now."""
        if self.lease is not None and self.lease.phase is WAITING:
            burst = self.lease.burst
            self.lease.waiting = Waiting(burst=burst, position=0, ahead=0, activity=FULL)

    def forget(self, why: KiwiError) -> None:
        """End this client's burst, wait and requests, because it leaves."""
        self.lost(why)
        if self.lease is not None:
            self.give_up(self.lease, why)
            self.end(lingering=False)
        self.watching = False


FULL: Final = "the Kiwi daemon is full; trying again"


def _tag(message: ClientMessage | DaemonMessage) -> str:
    return str(type(message).__struct_config__.tag)


def _failure(error: Error) -> PeerError:
    return PeerError(error.code, error.message, error.remedy)


def _unexpected(message: DaemonMessage) -> PeerError:
    return PeerError(
        "out-of-order",
        f"The daemon sent {_tag(message)!r}, which makes no sense now.",
        "Use the same version of Kiwi on both ends.",
    )
