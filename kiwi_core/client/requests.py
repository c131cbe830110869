"""What a client knows about its leases and its requests. No socket, no thread, no lock.

``take`` takes each message of the daemon. ``next_due`` returns each message to the daemon. Nobody
queues messages about bursts: ``next_due`` compares the latest lease with what a connection has said
until now, and returns the difference. So a cancelled wait, a restarted daemon and a burst that ends
during a hello need no code of their own.

Callers change a few fields here, where an interrupt may come between any two steps. Each change
that matters is a single assignment, or a single call into C, so it is done or not done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.wire import messages as m
from kiwi_core.wire.legality import ANSWERS

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.wire.legality import Conversation

PENDING_MAX: Final = 256
"""Most requests without an answer; a daemon that owes more answers counts as hung."""

_last_bursts: defaultdict[Path, int] = defaultdict(int)
"""The number of the last burst, by socket. A daemon knows processes, not clients: a process's next
client counts on from here."""


class LeaseCancelled(CallerError):  # noqa: N818 - an outcome that was asked for
    """The caller has cancelled its wait. The place in the queue is free."""

    def __init__(self) -> None:
        super().__init__("cancelled", "The wait for the GPU was cancelled.")


class Phase(Enum):
    """The phase of a lease: WAITING, then HELD, then IDLE, perhaps with LINGERING before it."""

    IDLE = "idle"
    WAITING = "waiting"
    HELD = "held"
    LINGERING = "lingering"
    """The cell is over, but threads or tasks that it left behind still use the GPU."""


class Lease:
    """One wait for the GPU and the burst after it. Callers set ``error`` and ``ended``."""

    __slots__ = ("burst", "ended", "error", "granted", "queued", "waiting")

    def __init__(self) -> None:
        self.burst = 0
        """Its number among this process's bursts; 0 until it is requested."""
        self.waiting: m.Waiting | None = None
        """The latest place in the queue; after the first grant, set only while suspended."""
        self.queued = False
        """Whether the daemon was asked, and has neither granted nor confirmed a withdrawal."""
        self.granted: m.Granted | None = None
        """The latest grant; a new one, with a fresh quantum, comes after each suspension."""
        self.error: KiwiError | None = None
        """Why it was not granted, or is no longer granted."""
        self.ended: Phase | None = None
        """The phase after the burst, ``IDLE`` or ``LINGERING``; ``None`` before its end."""

    @property
    def phase(self) -> Phase:
        if self.error is not None:
            return Phase.IDLE
        return self.ended or (Phase.WAITING if self.granted is None else Phase.HELD)

    @property
    def over(self) -> bool:
        """Whether the wait is over: granted, failed or cancelled."""
        return self.granted is not None or self.error is not None


class Request:
    """A request to the daemon, which answers requests of one kind in the order of asking."""

    __slots__ = ("message", "result")

    def __init__(self, message: m.ClientMessage) -> None:
        self.message = message
        self.result: m.DaemonMessage | KiwiError | None = None
        """The answer, or why there is none."""


class RequestTable:
    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.lease: Lease | None = None
        """The latest lease, over or not."""
        self.told: Lease | None = None
        """The lease that was named last on the present connection."""
        self.unsent: deque[Request] = deque()
        self.open: list[Request] = []
        """Requests that were sent and have no answer yet."""
        self.watching = False
        """Whether the daemon is to send each change of the status."""
        self.latest: m.GpuStatus | None = None
        self.unforeseen: m.Waiting | None = None
        """Where a call at the gate waits for the GPU, although nobody here asked for it."""

    # --- the caller's side ------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self.lease is None else self.lease.phase

    @property
    def burst(self) -> int:
        """The number of the last burst that was requested."""
        return _last_bursts[self._path] if self.lease is None else self.lease.burst

    def begin(self, lease: Lease) -> None:
        """Request ``lease``. Raises ``CallerError`` "in-burst"."""
        if (phase := self.phase) in (Phase.WAITING, Phase.HELD):
            raise CallerError(
                "in-burst",
                f"This process already {'holds' if phase is Phase.HELD else 'waits for'} the GPU.",
                "End that burst, or cancel that wait, first.",
            )
        lease.burst = _last_bursts[self._path] + 1
        _last_bursts[self._path] = lease.burst
        self.lease = lease

    # --- the daemon's side ------------------------------------------------------------------------

    def next_due(self, conversation: Conversation) -> tuple[m.ClientMessage | None, Request | None]:
        """Return what to send next, and the request that it belongs to, if there is one."""
        told, latest = self.told, self.lease
        if conversation.in_burst and told is not None:
            if told.phase is Phase.LINGERING:
                return m.EndBurst(burst=told.burst, lingering=True), None
            if told.phase is Phase.IDLE:
                if told.granted is None and conversation.asked == told.burst:
                    return m.Withdraw(burst=told.burst), None
                return m.EndBurst(burst=told.burst), None
        elif latest is not None:
            if latest.phase is Phase.WAITING and conversation.asked < latest.burst:
                latest.queued, self.told = True, latest
                return m.Acquire(burst=latest.burst), None
            if conversation.lingering and latest is told and latest.phase is Phase.IDLE:
                return m.EndBurst(burst=latest.burst), None
        if not self.unsent:
            return None, None
        request = self.unsent.popleft()
        self.open.append(request)
        return request.message, request

    def refuse(self, request: Request | None, why: CallerError) -> None:
        """Fail what ``next_due`` has returned and the protocol does not allow now: a request, or a
        word about a burst after a goodbye."""
        if request is not None:
            self.open.remove(request)
            request.result = why
            return
        self.told = None
        if self.lease is not None and self.phase is Phase.WAITING:
            self.lease.error = why
            self.lease.queued = False

    def take(self, message: m.DaemonMessage) -> None:
        """Take a message of the daemon. Raises ``PeerError`` if it is a fatal error, or makes no
        sense now."""
        match message:
            case m.Granted() | m.Waiting() | m.Withdrawn():
                self._take_about_burst(message)
            case m.Error():
                failure = PeerError(message.code, message.message, message.remedy)
                asked = [r for r in self.open if message.about in ("", _tag(r.message))]
                if message.fatal:
                    raise failure
                if message.about in ("acquire", "withdraw") or not (message.about or asked):
                    if self.lease is not None and self.phase is Phase.WAITING:
                        self.lease.error = failure
                elif asked:
                    self.open.remove(asked[0])
                    asked[0].result = failure
            case m.UserNotice():
                pass
            case _:
                pushed = isinstance(message, m.StatusReport) and self.watching
                if isinstance(message, m.StatusReport):
                    self.latest = message.gpu
                # Requests of other kinds may overtake a slow one (a release, a goodbye).
                fitting = [r for r in self.open if isinstance(message, ANSWERS[type(r.message)])]
                if fitting:
                    self.open.remove(fitting[0])
                    fitting[0].result = message
                elif not pushed:
                    raise _unexpected(message)

    def _take_about_burst(self, message: m.Granted | m.Waiting | m.Withdrawn) -> None:
        lease = self.lease
        if not message.burst:
            self.unforeseen = message if isinstance(message, m.Waiting) else None
        elif lease is None or message.burst != lease.burst:
            if message.burst > self.burst:
                raise _unexpected(message)
            # else it is about a wait that was given up while the message was on its way
        elif isinstance(message, m.Withdrawn):
            lease.queued = False
        elif isinstance(message, m.Waiting):
            lease.waiting = message
        elif lease.phase is not Phase.IDLE:
            if lease.granted is not None:
                lease.waiting = None  # the burst goes on after a suspension
            lease.granted = message
            lease.queued = False

    def lost(self, why: KiwiError) -> None:
        """Fail the requests, because the connection is gone; a wait or a burst goes on."""
        for request in (*self.unsent, *self.open):
            request.result = why
        self.unsent.clear()
        self.open.clear()
        if self.lease is not None:
            self.lease.queued = False
        self.unforeseen = None

    def forget(self, why: KiwiError) -> None:
        """End the wait or the burst, because the client leaves."""
        if self.lease is not None and self.phase is not Phase.IDLE:
            self.lease.error = why
        self.watching = False


def _tag(message: m.ClientMessage | m.DaemonMessage) -> str:
    return str(type(message).__struct_config__.tag)


def _unexpected(message: m.DaemonMessage) -> PeerError:
    return PeerError(
        "out-of-order",
        f"The daemon sent {_tag(message)!r}, which makes no sense now.",
        "Use the same version of Kiwi on both ends.",
    )
