"""The wait for the GPU, from the request until it is granted or given up.

``Client`` makes the request. A wait goes on while the daemon restarts, up to the client's grace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.client.channel import nothing
from kiwi_core.client.daemon_socket import disconnected
from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.client.requests import LeaseCancelled, Request
from kiwi_core.errors import PeerError
from kiwi_core.wire.messages import Ping

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.client.channel import Channel
    from kiwi_core.client.requests import LeaseRequest
    from kiwi_core.wire.messages import Granted, Waiting

_WITHDRAWN_S: Final = 0.25
"""How long ``cancel`` waits for the daemon to confirm that the place in the queue is free."""


class Ticket:
    """One request for the GPU, made by ``Client.begin`` or ``acquire``. Any thread may use it."""

    def __init__(self, channel: Channel, lease: LeaseRequest) -> None:
        self._channel = channel
        self._lease = lease
        self._attempts = channel.attempts
        """The channel's count of failed attempts to reconnect when the wait began."""
        self._received = 0
        self._silence = Patience(channel.grace_s)
        """How long the daemon has sent nothing since message number ``_received``."""

    @property
    def burst(self) -> int:
        return self._lease.burst

    @property
    def last_waiting(self) -> Waiting | None:
        """The place in the queue, by the daemon's last message."""
        return self._lease.waiting

    def poll(self) -> Granted | None:
        """Return the grant, or ``None`` while waiting. Never blocks.

        Raises ``LeaseCancelled`` after ``cancel``, and ``PeerError`` if the daemon refused, or
        ("no-daemon") has been away for the client's ``daemon_grace_s``.
        """
        lease = self._lease
        if not lease.over:
            self._check_silence()
            self._check_absence()
        if lease.error is not None:
            raise lease.error
        return lease.granted

    def wait(self, timeout_s: float | None) -> Granted | None:
        """Do the same as ``poll``, but wait up to ``timeout_s`` for the grant.

        A grant within the first milliseconds costs no more than a round trip over the socket.
        """
        channel, lease = self._channel, self._lease
        if not lease.over:
            channel.send_and_read(nothing, lambda: lease.over)
        patience = Patience(timeout_s)
        while (granted := self.poll()) is None:
            if not patience.tick():
                return None
            channel.changes.sleep(lambda: lease.over, patience.slice_s())
        return granted

    def cancel(self) -> None:
        """Give up the wait (or the burst, if it was granted meanwhile), and wait shortly for the
        daemon to confirm. Does nothing when the wait is over."""
        channel, lease = self._channel, self._lease
        expected = False

        def send() -> None:
            nonlocal expected
            channel.table.give_up(lease, LeaseCancelled())
            channel.send_due()
            channel.changes.tell()
            link = channel.link
            expected = (
                link is not None
                and lease.granted is None
                and link.conversation.asked == lease.burst
            )

        def done() -> bool:
            return not expected or lease.withdrawn or channel.link is None

        channel.send_and_read(send, done)
        patience = Patience(_WITHDRAWN_S)
        while not done() and patience.tick():
            channel.changes.sleep(done, patience.slice_s())

    def await_grant(
        self,
        on_waiting: Callable[[Waiting], None] | None,
        cancelled: Callable[[], bool] | None,
        poll_s: float,
        timeout_s: float | None,
    ) -> Granted:
        """Wait for the grant, as ``Client.acquire`` says, if it does not come at once."""
        channel, lease = self._channel, self._lease
        patience = Patience(timeout_s)
        shown: Waiting | None = None
        while (granted := self.poll()) is None:
            waiting = lease.waiting
            if on_waiting is not None and waiting is not None and waiting is not shown:
                shown = waiting
                on_waiting(waiting)
            if cancelled is not None and cancelled():
                raise LeaseCancelled
            if not patience.tick() and not channel.last_look(lambda: lease.over):
                raise PeerError(
                    "timeout", f"The GPU was not free within {timeout_s} s.", "Try again later."
                )
            channel.changes.sleep(
                lambda seen=waiting: lease.over or lease.waiting is not seen,  # type: ignore[misc]
                patience.slice_s(min(poll_s, SLICE_S)),
            )
        return granted

    def _check_silence(self) -> None:
        """Ping a daemon that is silent, and drop the link if it does not answer. A live daemon
        sends something about every second to a client that waits."""
        channel = self._channel
        silence = self._silence
        if self._received != channel.received or channel.link is None:
            self._received = channel.received
            silence.restart()
            return
        asked = silence.spent_s * 2 > channel.grace_s
        patient = silence.tick() or channel.last_look(lambda: channel.received != self._received)
        with channel.lock:
            if not patient:
                channel.away_s = max(channel.away_s, silence.spent_s)
                channel.drop(channel.link, disconnected("the daemon does not answer"))
            elif not asked and silence.spent_s * 2 > channel.grace_s:
                channel.send_request(Request(Ping()))

    def _check_absence(self) -> None:
        """Fail the request if the daemon has been away for too long, and an attempt to reconnect
        has failed since it began."""
        channel, lease = self._channel, self._lease
        if channel.link is not None or channel.away_s < channel.grace_s:
            return
        with channel.lock:
            if self._attempts < channel.attempts and not lease.over and channel.link is None:
                channel.table.give_up(lease, channel.why_away())
