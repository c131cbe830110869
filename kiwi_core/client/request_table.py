"""What a client knows about its burst and its open questions. No socket, no thread, no lock.

``hears`` takes each message of the daemon. ``owes`` compares what is true here with what was said
on a connection, and says what to say next: after a wish, after its end, after a new connection,
and after an interrupt that came between the one and the other. Each step that matters is a single
assignment, or a single call into C, so that an interrupt finds it done or not done.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.client.lease import LeaseCancelled
from kiwi_core.client.patience import Patience
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
"""Questions without an answer; a daemon that owes more hangs."""

_ANSWERS: Final = frozenset(ANSWERS.values()) - {Welcome, StatusReport}
"""Those to questions, but for the two that mean more: a welcome begins, a status may be watched."""


class Phase(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    HELD = "held"
    LINGERING = "lingering"
    """The cell is over; what it left behind still uses the GPU."""


class Lease:
    """One wish for the GPU. Over when granted, failed or cancelled."""

    __slots__ = (
        "attempts", "blocking", "burst", "ended", "error", "granted", "heard", "left", "owner",
        "silence", "waiting", "withdrawn",
    )  # fmt: skip

    def __init__(self, burst: int, owner: int, *, blocking: bool) -> None:
        self.burst = burst
        self.owner = owner
        """Ident of the thread that asked."""
        self.blocking = blocking
        """Whether that thread waits inside ``acquire``, with no ticket in anybody's hand."""
        self.left = False
        """That ``acquire`` was left by an exception: nobody wants this any more."""
        self.granted: Granted | None = None
        """The latest grant: repeated, with a fresh quantum, after each suspension."""
        self.waiting: Waiting | None = None
        """Where it stands; after the first grant: while it is suspended."""
        self.error: KiwiError | None = None
        """Why it was not, or no longer, granted."""
        self.ended: Phase | None = None
        """What came after the burst: ``IDLE`` or ``LINGERING``."""
        self.withdrawn = False
        """The daemon has confirmed that the place in the queue is free."""
        self.attempts = 0
        """How many attempts to reconnect had failed before."""
        self.heard = 0
        self.silence = Patience(None)
        """How long the daemon has said nothing since message ``heard``."""

    @property
    def over(self) -> bool:
        return self.granted is not None or self.error is not None

    @property
    def phase(self) -> Phase:
        if self.error is not None or self.left:
            return Phase.IDLE
        return self.ended or (Phase.WAITING if self.granted is None else Phase.HELD)


class Request:
    """A question to the daemon; those of one kind are answered in the order of asking."""

    __slots__ = ("error", "message", "number", "replies")

    def __init__(self, message: ClientMessage) -> None:
        self.message = message
        self.number = 0
        """Its place among all questions of its book."""
        self.replies: list[DaemonMessage] = []
        """One at most: what answered it."""
        self.error: KiwiError | None = None
        """Why it gets no reply."""

    @property
    def over(self) -> bool:
        return bool(self.replies) or self.error is not None

    def result(self) -> DaemonMessage:
        """The answer, once ``over``; raises ``KiwiError`` if there is none, or it is an error."""
        if self.replies:
            if isinstance(reply := self.replies[0], Error):
                raise _failure(reply)
            return reply
        assert self.error is not None
        raise self.error


class BurstNumbers:
    """The last burst that this process asked a daemon for, by whichever client."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0


class RequestTable:
    def __init__(self, numbers: BurstNumbers) -> None:
        self._numbers = numbers
        self._burst_before = numbers.last
        self.lease: Lease | None = None
        """The latest wish, over or not."""
        self._questions = 0
        self._pending: deque[Request] = deque()
        """Questions, said or owed. One that is over may still be in it, after an interrupt."""
        self.watching = False
        self.latest: GpuStatus | None = None
        self.reports = 0
        """Counts the statuses received, so that watchers see which are new."""
        self.unforeseen: Waiting | None = None
        """Where a call at the gate waits, for which nobody asked here."""

    # --- the caller's side ----------------------------------------------------------------------

    def begin(self, owner: int, *, blocking: bool) -> Lease:
        """Wish for the next burst. Raises ``CallerError`` "in-burst"."""
        last = self.lease
        mine = last is not None and last.blocking and last.owner == owner
        if last is not None and mine and last.phase is Phase.WAITING:
            # That acquire has ended, or its thread were not here: a second interrupt came while
            # the first one was being dealt with.
            last.error = LeaseCancelled()
        if self.phase in (Phase.WAITING, Phase.HELD):
            raise CallerError(
                "in-burst",
                f"This process already {'holds' if self.phase is Phase.HELD else 'waits for'}"
                " the GPU.",
                "End that burst, or cancel that wait, first.",
            )
        self._numbers.last += 1
        self.lease = lease = Lease(self._numbers.last, owner, blocking=blocking)
        return lease

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self.lease is None else self.lease.phase

    @property
    def burst(self) -> int:
        """The last burst asked for."""
        return self._burst_before if self.lease is None else self.lease.burst

    @property
    def in_burst(self) -> bool:
        return self.phase in (Phase.HELD, Phase.LINGERING)

    def end(self, *, lingering: bool) -> None:
        """The burst is over, if there is one."""
        if self.lease is not None and self.in_burst:
            self.lease.ended = Phase.LINGERING if lingering else Phase.IDLE

    def give_up(self, lease: Lease, why: KiwiError) -> None:
        """``lease`` shall be over, whether it waits or is held."""
        if lease.phase in (Phase.WAITING, Phase.HELD):
            lease.error = why

    def owes(self, talk: Conversation) -> ClientMessage | None:
        """What to say next on a connection on which ``talk`` was said; ``None``: all is said."""
        phase, lease = self.phase, self.lease
        same = lease is not None and lease.burst == talk.burst
        if talk.in_burst:
            if same and phase in (Phase.WAITING, Phase.HELD):
                return None
            if same and phase is Phase.LINGERING:
                return EndBurst(burst=talk.burst, lingering=True)
            if talk.asked == talk.burst and not (same and lease is not None and lease.granted):
                return Withdraw(burst=talk.burst)
            return EndBurst(burst=talk.burst)
        if talk.lingering and same and phase is Phase.IDLE:
            return EndBurst(burst=talk.burst)
        if lease is not None and phase is Phase.WAITING and talk.asked < lease.burst:
            return Acquire(burst=lease.burst)
        return None

    def ask(self, request: Request) -> int:
        """Ask ``request``: it is owed from now on. Returns how many questions are open."""
        while self._pending and self._pending[0].over:
            self._pending.popleft()
        self._questions += 1
        request.number = self._questions
        self._pending.append(request)
        return len(self._pending)

    def owed_question(self, last: int) -> Request | None:
        """The next one to say on a connection on which ``last`` was the last one said."""
        if not self._pending or self._pending[-1].number <= last:
            return None
        unsaid = [request for request in self._pending if request.number > last]
        return unsaid[0]

    def refuse(self, request: Request, why: KiwiError) -> None:
        """``request`` may not be said."""
        request.error = why
        self._pending.remove(request)

    # --- the daemon's side ----------------------------------------------------------------------

    def hears(self, messages: deque[DaemonMessage]) -> UserNotice | Waiting | None:
        """Take the first of ``messages``. What the user must know comes back: a notice, or where a
        call at the gate waits.

        Raises ``PeerError`` where it makes no sense now, or is the daemon's last word. What an
        interrupt cuts short is done again with the same message: all but answers may be heard
        twice, and an answer goes over to its question in one step.
        """
        message = messages[0]
        if isinstance(message, (Granted, Waiting, Withdrawn)):
            self._hears_of_burst(message)
        elif isinstance(message, Error):
            if self._hears_error(message, messages):
                return None
        elif isinstance(message, StatusReport):
            if self._hears_status(message, messages):
                return None
        elif type(message) in _ANSWERS:
            self._answer(message, messages)
            return None
        elif not isinstance(message, UserNotice):
            raise _unexpected(message)
        messages.popleft()
        is_news = isinstance(message, UserNotice) or (message is self.unforeseen)
        return message if is_news else None  # type: ignore[return-value]  # one of these two

    def _hears_of_burst(self, message: Granted | Waiting | Withdrawn) -> None:
        if not message.burst:
            self.unforeseen = message if isinstance(message, Waiting) else None
            return
        if message.burst > self.burst:
            raise _unexpected(message)
        lease = self.lease
        if lease is None or message.burst != lease.burst:
            return  # about a wait that was given up while this was on its way
        if isinstance(message, Withdrawn):
            lease.withdrawn = True
        elif isinstance(message, Waiting):
            lease.waiting = message
        elif lease.phase is not Phase.IDLE:
            if lease.granted is not None:
                lease.waiting = None  # it goes on after a suspension
            lease.granted = message

    def _hears_status(self, report: StatusReport, messages: deque[DaemonMessage]) -> bool:
        """Whether it went to who asked."""
        self.latest = report.gpu
        self.reports += 1
        if self.watching and not [r for r in self._open() if isinstance(r.message, GetStatus)]:
            return False
        self._answer(report, messages)
        return True

    def _answer(self, message: DaemonMessage, messages: deque[DaemonMessage]) -> None:
        """Of the oldest request that it can answer: what takes its time (a release, a goodbye) is
        overtaken by what was asked after it."""
        for request in self._open():
            if isinstance(message, ANSWERS[type(request.message)]):
                self._hand_over(request, messages)
                return
        raise _unexpected(message)

    def _open(self) -> list[Request]:
        return [request for request in self._pending if not request.over]

    def _hand_over(self, request: Request, messages: deque[DaemonMessage]) -> None:
        # map + extend: no bytecode, and so no interrupt, between taking it and having it.
        request.replies.extend(map(deque.popleft, (messages,)))
        self._pending.remove(request)

    def _hears_error(self, error: Error, messages: deque[DaemonMessage]) -> bool:
        """Whether it went to who asked."""
        if error.fatal:
            raise _failure(error)
        lease = self.lease
        asked = [r for r in self._open() if error.about in ("", _tag(r.message))]
        if error.about in ("acquire", "withdraw") or not (error.about or asked):
            if lease is not None and lease.phase is Phase.WAITING:
                lease.error = _failure(error)
        elif asked:
            self._hand_over(asked[0], messages)
            return True
        return False

    # --- connections come and go ----------------------------------------------------------------

    def lost(self, why: KiwiError) -> None:
        """The connection is gone: questions fail, a wait or a burst goes on."""
        for request in self._pending:
            request.error = why
        self._pending.clear()
        self.unforeseen = None

    def daemon_full(self) -> None:
        """The daemon takes no more connections just now: who waits is told so."""
        if self.lease is not None and self.lease.phase is Phase.WAITING:
            burst = self.lease.burst
            self.lease.waiting = Waiting(burst=burst, position=0, ahead=0, activity=FULL)

    def forget(self, why: KiwiError) -> None:
        """This client leaves: nothing is held, waited for or asked any more."""
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
        f"The daemon said {_tag(message)!r}, which makes no sense now.",
        "Use the same version of Kiwi on both ends.",
    )
