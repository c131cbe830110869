"""A wait for the GPU, as the caller sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from kiwi_core.client.client import Client
    from kiwi_core.client.request_table import Lease
    from kiwi_core.wire.messages import Granted, Waiting


class LeaseCancelled(CallerError):  # noqa: N818 - an outcome that was asked for
    """The caller has cancelled its wait. The place in the queue is free."""

    def __init__(self) -> None:
        super().__init__("cancelled", "The wait for the GPU was cancelled.")


class Ticket:
    """One request for the GPU, made by ``Client.begin``. Any thread may use it."""

    def __init__(self, client: Client, lease: Lease) -> None:
        self._client = client
        self._lease = lease

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
        return self._client.look(self._lease)

    def wait(self, timeout_s: float | None) -> Granted | None:
        """Do the same as ``poll``, but wait up to ``timeout_s`` for the grant.

        A grant within the first milliseconds costs no more than a round trip over the socket.
        """
        return self._client.wait_for(self._lease, timeout_s)

    def cancel(self) -> None:
        """Give up the wait (or the burst, if it was granted meanwhile), and wait shortly for the
        daemon to confirm. Does nothing when the wait is over."""
        self._client.cancel(self._lease)
