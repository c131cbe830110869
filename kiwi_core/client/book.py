"""What a client knows about its burst and its open questions. No socket, no thread, no lock.

``hears`` takes each message of the daemon; ``resume`` says what to tell a daemon after a new
connection, so that a wait or a burst outlives a restart of the daemon.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.client.patience import Patience
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.wire.legality import ANSWERS
from kiwi_core.wire.messages import (
    BURST_LIMIT,
    Acquire,
    EndBurst,
    Error,
    GetStatus,
    Granted,
    Ok,
    Pong,
    StatusReport,
    StoryReport,
    Told,
    Waiting,
    Withdrawn,
)

if TYPE_CHECKING:
    from kiwi_core.wire.messages import ClientMessage, DaemonMessage, GpuStatus, Hello

PENDING_MAX: Final = 256
"""Questions without an answer; a daemon that owes more hangs."""


class Phase(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    HELD = "held"
    LINGERING = "lingering"
    """The cell is over; what it left behind still uses the GPU."""


class Lease:
    """One wish for the GPU. Over when granted, failed or cancelled."""

    __slots__ = (
        "attempts", "burst", "error", "granted", "heard", "owner", "silence", "waiting",
        "withdrawn",
    )  # fmt: skip

    def __init__(self, burst: int, owner: int) -> None:
        self.burst = burst
        self.owner = owner
        """Ident of the thread that asked."""
        self.granted: Granted | None = None
        """The latest grant: repeated, with a fresh quantum, after each suspension."""
        self.waiting: Waiting | None = None
        self.error: KiwiError | None = None
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


class Request:
    """A question that the daemon answers in the order of asking."""

    __slots__ = ("answer", "error", "message")

    def __init__(self, message: ClientMessage) -> None:
        self.message = message
        self.answer: DaemonMessage | None = None
        self.error: KiwiError | None = None

    @property
    def over(self) -> bool:
        return self.answer is not None or self.error is not None


class Book:
    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.burst = 0
        """The last burst asked for."""
        self.lease: Lease | None = None
        """The wish that ``burst`` numbers, over or not."""
        self.pending: deque[Request] = deque()
        self.watching = False
        self.latest: GpuStatus | None = None
        self.reports = 0
        """Counts the statuses received, so that watchers see which are new."""

    # --- the caller's side ----------------------------------------------------------------------

    def begin(self, owner: int) -> Lease:
        """Wish for the next burst. Raises ``CallerError`` "in-burst"."""
        if self.phase in (Phase.WAITING, Phase.HELD):
            raise CallerError(
                "in-burst",
                f"This process already {'holds' if self.phase is Phase.HELD else 'waits for'}"
                " the GPU.",
                "End that burst, or cancel that wait, first.",
            )
        if self.burst + 1 >= BURST_LIMIT:  # not in 200,000 years
            raise CallerError("in-burst", "The burst numbers are used up.", "Restart the kernel.")
        self.burst += 1
        self.phase = Phase.WAITING
        self.lease = Lease(self.burst, owner)
        return self.lease

    def end(self, *, lingering: bool) -> EndBurst | None:
        """The burst is over; what to tell the daemon, if anything."""
        wanted = Phase.LINGERING if lingering else Phase.IDLE
        if self.phase not in (Phase.HELD, Phase.LINGERING) or self.phase is wanted:
            return None
        self.phase = wanted
        return EndBurst(burst=self.burst, lingering=lingering)

    def give_up(self, lease: Lease, why: KiwiError) -> bool:
        """``lease`` shall be over; true where it was waiting or held till now. A wait ends here;
        a held burst is still to be ended."""
        if lease is not self.lease or self.phase in (Phase.IDLE, Phase.LINGERING):
            return False
        lease.error = why
        if self.phase is Phase.WAITING:
            self.phase = Phase.IDLE
        return True

    # --- the daemon's side ----------------------------------------------------------------------

    def hears(self, message: DaemonMessage) -> Told | None:
        """Take in ``message``; a notice comes back, for the user.

        Raises ``PeerError`` where it makes no sense now, or is the daemon's last word.
        """
        if isinstance(message, Told):
            return message
        if isinstance(message, Error):
            self._hears_error(message)
        elif isinstance(message, (Granted, Waiting, Withdrawn)):
            self._hears_of_burst(message)
        elif isinstance(message, StatusReport):
            self._hears_status(message)
        elif isinstance(message, (Ok, Pong, StoryReport)):
            self._answer(message)
        else:
            raise _unexpected(message)
        return None

    def _hears_of_burst(self, message: Granted | Waiting | Withdrawn) -> None:
        if message.burst > self.burst:
            raise _unexpected(message)
        lease = self.lease
        if lease is None or message.burst != lease.burst:
            return  # about a wait that was given up while this was on its way
        if isinstance(message, Withdrawn):
            lease.withdrawn = True
        elif isinstance(message, Waiting):
            lease.waiting = message
        elif self.phase is not Phase.IDLE:
            lease.granted = message
            if self.phase is Phase.WAITING:
                self.phase = Phase.HELD

    def _hears_status(self, report: StatusReport) -> None:
        self.latest = report.gpu
        self.reports += 1
        asked = bool(self.pending) and isinstance(self.pending[0].message, GetStatus)
        if asked or not self.watching:
            self._answer(report)

    def _answer(self, message: Ok | Pong | StoryReport | StatusReport) -> None:
        if not self.pending or not isinstance(message, ANSWERS[type(self.pending[0].message)]):
            raise _unexpected(message)
        self.pending.popleft().answer = message

    def _hears_error(self, error: Error) -> None:
        failure = PeerError(error.code, error.message, error.remedy)
        if error.fatal:
            raise failure
        lease = self.lease
        if error.about in ("acquire", "withdraw") or (not error.about and not self.pending):
            if lease is not None and self.phase is Phase.WAITING:
                self.phase = Phase.IDLE
                lease.error = failure
        elif self.pending and error.about in ("", _tag(self.pending[0].message)):
            self.pending.popleft().error = failure

    # --- connections come and go ----------------------------------------------------------------

    def lost(self, why: KiwiError) -> None:
        """The connection is gone: questions fail, a wait or a burst goes on."""
        while self.pending:
            self.pending.popleft().error = why

    @property
    def in_burst(self) -> bool:
        return self.phase in (Phase.HELD, Phase.LINGERING)

    def resume(self, hello: Hello) -> list[ClientMessage]:
        """What to say after the welcome that answered ``hello``, which may be a little old."""
        messages: list[ClientMessage] = []
        same = hello.burst == self.burst
        if hello.in_burst and not (same and self.phase is Phase.HELD):
            lingering = same and self.phase is Phase.LINGERING
            messages.append(EndBurst(burst=hello.burst, lingering=lingering))
        if self.phase is Phase.WAITING:
            messages.append(Acquire(burst=self.burst))
        return messages

    def forget(self, why: KiwiError) -> None:
        """This client leaves: nothing is held, waited for or asked any more."""
        self.lost(why)
        if self.lease is not None and self.phase is Phase.WAITING:
            self.lease.error = why
        self.phase = Phase.IDLE
        self.watching = False


def _tag(message: ClientMessage | DaemonMessage) -> str:
    return str(type(message).__struct_config__.tag)


def _unexpected(message: DaemonMessage) -> PeerError:
    return PeerError(
        "out-of-order",
        f"The daemon said {_tag(message)!r}, which makes no sense now.",
        "Use the same version of Kiwi on both ends.",
    )
