"""The blocking client: what one process asks the daemon of one GPU. Any thread may call it.

``connection`` says how it works: threads, lock, interrupts, forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.client.connection import ClientConnection
from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.client.requests import Lease, LeaseCancelled, Phase, Request
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire import messages as m
from kiwi_core.wire.names import NAME_MAX_CHARS, check_settings, clean_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.states import AntiThrash, Priority
    from kiwi_core.wire.metrics import GpuMetrics

_WITHDRAWN_S: Final = 0.25
"""How long ``Ticket.cancel`` waits for the daemon to confirm that the place in the queue is
free."""

_LEFT: Final = LeaseCancelled()
"""Made ahead: where it is needed, a call could be interrupted."""


class Client(ClientConnection):
    """A connection to the daemon that listens at ``socket_path``, with the options of
    ``ClientConnection``. ``connect`` opens it; ``close``, or the end of a ``with`` block, closes
    it."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def unforeseen(self) -> m.Waiting | None:
        """Return the daemon's last message about a call that waits at this program's gate although
        nobody here asked for the GPU. ``None``: the call has the GPU, or there is no such call.
        """
        return self._table.unforeseen

    # --- the lease ------------------------------------------------------------------------------

    def acquire(
        self,
        *,
        on_waiting: Callable[[m.Waiting], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        poll_s: float = SLICE_S,
        timeout_s: float | None = None,
    ) -> m.Granted:
        """Wait until this process holds the GPU for a new burst. For programs that do nothing else
        meanwhile (``kiwi run``); kernels call ``begin`` and wait for the ``Ticket``.

        ``on_waiting`` is called in the caller's thread; ``cancelled`` is called at least every
        ``poll_s``. The wait goes on while the daemon restarts. Any exception ends the wait:
        ``LeaseCancelled``; that of a signal (``KeyboardInterrupt``); ``PeerError`` "no-daemon"
        after ``daemon_grace_s`` without a daemon, "timeout" after ``timeout_s``, or the daemon's
        error; ``CallerError`` ("in-burst", "not-connected").
        """
        ticket = Ticket(self, lease := Lease())
        patience, shown = Patience(timeout_s), None
        try:
            self._begin(lease)
            while (granted := ticket.poll()) is None:
                waiting = lease.waiting
                if on_waiting is not None and waiting is not None and waiting is not shown:
                    shown = waiting
                    on_waiting(waiting)
                if cancelled is not None and cancelled():
                    raise LeaseCancelled
                if not patience.tick() and not self._last_look(lambda: lease.over):
                    raise PeerError(
                        "timeout", f"The GPU was not free within {timeout_s} s.", "Try again later."
                    )
                self._changes.sleep(
                    lambda seen=waiting: lease.over or lease.waiting is not seen,  # type: ignore[misc]
                    patience.slice_s(min(poll_s, SLICE_S)),
                )
        except BaseException:
            # Call nothing before this: a second interrupt may come inside a call.
            lease.error = _LEFT
            ticket.cancel()
            raise
        return granted

    def begin(self) -> Ticket:
        """Ask for the GPU and return at once. Raises ``CallerError`` ("in-burst": this process
        holds the GPU or waits for it; "not-connected")."""
        ticket = Ticket(self, lease := Lease())
        try:
            self._begin(lease)
        except BaseException:
            lease.error = _LEFT  # nobody gets the ticket
            ticket.cancel()
            raise
        return ticket

    def _begin(self, lease: Lease) -> None:
        if self._hello.role is not m.Role.SESSION:
            raise CallerError("observer", "An observer never holds the GPU.")
        with self._lock:
            self._check_open()  # here: nobody would answer a lease of a closed client
            self._table.begin(lease)
            self._wake()

    def end_burst(self, *, lingering: bool = False, burst: int | None = None) -> None:
        """End the burst (``lingering``: threads or tasks that it left behind still use the GPU).

        Does nothing outside a burst, or if ``burst`` is given and is not the current one. Does not
        raise if the daemon is away: the client reports the end when the daemon is back.
        """
        with self._lock:
            lease = self._table.lease
            if lease is None or lease.phase not in (Phase.HELD, Phase.LINGERING):
                return
            if burst is None or burst == lease.burst:
                lease.ended = Phase.LINGERING if lingering else Phase.IDLE
                self._wake()

    # --- questions ------------------------------------------------------------------------------

    def release(self, session: str = "", timeout_s: float = 5.0) -> None:
        """Page out ``session`` (empty: this one); return when that is under way. Raises
        ``PeerError`` "no-such-session", "in-burst" (nothing is moved)."""
        self._ask(m.Release(session=session), m.Ok, timeout_s)

    def suspend(self, session: str = "", timeout_s: float = 5.0) -> None:
        """Keep ``session`` (empty: this one) out of the GPU until ``resume``; return when that has
        begun. Raises ``PeerError`` "no-such-session", "unguarded" (nothing is done)."""
        self._ask(m.Suspend(session=session), m.Ok, timeout_s)

    def resume(self, session: str = "", timeout_s: float = 5.0) -> None:
        """End the effect of ``suspend``. Raises ``PeerError`` "no-such-session", "not-allowed" (an
        admin keeps it out)."""
        self._ask(m.Resume(session=session), m.Ok, timeout_s)

    def bring_back(self, session: str = "", timeout_s: float = 5.0) -> tuple[bool, str]:
        """Say that the program of ``session`` (empty: this one) is about to be used. Return
        whether its page-in has begun, and if not, why. Raises ``PeerError`` "no-such-session"."""
        answer = self._ask(m.BringBack(session=session), m.HintReport, timeout_s)
        return answer.begun, answer.why

    def rename(self, session: str, name: str, folder: str, timeout_s: float = 5.0) -> None:
        """Give a session another name; see ``Rename``. Raises ``PeerError`` "no-such-session"."""
        name, folder = clean_name(name), clean_name(folder[-NAME_MAX_CHARS:])
        self._ask(m.Rename(session=session, name=name, folder=folder), m.Ok, timeout_s)

    def expect(
        self, key: str, for_s: float, timeout_s: float = 5.0, *, pid: int = 0, name: str = ""
    ) -> None:
        """Announce a session that will join here; see ``Expect``. Raises ``PeerError`` "busy"."""
        self._ask(m.Expect(key=key, for_s=for_s, pid=pid, name=name), m.Ok, timeout_s)

    def goodbye(self, timeout_s: float) -> None:
        """Leave Kiwi: wait until all memory is back in the GPU, then close the client.

        Raises ``PeerError`` "timeout" if that takes longer; the daemon goes on as long as the
        client is not closed. Without a daemon, close at once.
        """
        self.end_burst()
        self._leaving = True
        try:
            if self.connected:
                self._ask(m.Goodbye(), m.Ok, timeout_s)
        except PeerError as error:
            if error.code == "timeout":
                raise
        self.close()

    def status(self, timeout_s: float = 5.0) -> m.GpuStatus:
        return self._ask(m.GetStatus(), m.StatusReport, timeout_s).gpu

    def set(
        self,
        tq_s: float | None = None,
        anti_thrash: AntiThrash | None = None,
        policy: str | None = None,
        *,
        session: str = "",
        priority: Priority | None = None,
    ) -> None:
        """Change settings; ``priority`` is that of ``session``. Raises ``CallerError``
        "bad-setting", ``PeerError`` if not allowed, or if there is no such policy or session."""
        wanted = m.Set(
            tq_s=tq_s, anti_thrash=anti_thrash, policy=policy, session=session, priority=priority
        )
        check_settings(wanted)
        self._ask(wanted, m.Ok, 5.0)

    def story(self, session: str) -> list[m.StoryLine]:
        """Return the last things that happened to ``session``, one of this user's."""
        return self._ask(m.GetStory(session=session), m.StoryReport, 5.0).lines

    def history(self, since: int = 0, timeout_s: float = 5.0) -> m.HistoryReport:
        """Return all changes of the GPU's history after the serial ``since``. The next call may go
        on from ``last``. A restarted daemon counts from 1 again.
        """
        entries: dict[int, m.HistoryEntry] = {}
        sessions: dict[str, m.HistorySession] = {}
        while True:
            part = self._ask(m.GetHistory(since=since), m.HistoryReport, timeout_s)
            for entry in part.entries:  # an entry may have ended between two parts
                entries.pop(entry.id, None)
                entries[entry.id] = entry
            sessions |= part.sessions
            since = part.last
            if not part.more:
                return m.HistoryReport(last=since, entries=[*entries.values()], sessions=sessions)

    def usage(
        self, by: m.UsageBy = m.UsageBy.USER, since_unix_s: float = 0.0, timeout_s: float = 10.0
    ) -> m.UsageReport:
        """Return the GPU's use by user or notebook. Raises ``PeerError`` "no-usage", "busy"."""
        return self._ask(m.GetUsage(by=by, since_unix_s=since_unix_s), m.UsageReport, timeout_s)

    def metrics(self, timeout_s: float = 5.0) -> GpuMetrics:
        """Return what the daemon has counted since it started; the same for every reader."""
        return self._ask(m.GetMetrics(), m.MetricsReport, timeout_s).metrics

    def ping(self, timeout_s: float = 5.0) -> None:
        """Return when the daemon has answered."""
        self._ask(m.Ping(), m.Pong, timeout_s)

    def watch(self) -> Iterator[m.GpuStatus]:
        """Yield the status now and after each change; a slow reader gets only the latest.

        Ends when the client is closed. Raises ``PeerError`` "no-daemon" after ``daemon_grace_s``
        without a daemon.
        """
        self._check_open()
        table, seen = self._table, None
        with self._lock:
            if not table.watching:
                table.latest = None
                self._request(Request(m.GetStatus(watch=True)))
                table.watching = True  # last: after an interrupt the next call asks again
        while self._thread is not None:
            if table.latest is not None and table.latest is not seen:
                yield (seen := table.latest)
            elif self._link is None and self._away_s >= self._daemon_grace_s:
                raise self._why_away()
            else:
                self._changes.sleep(lambda at=seen: table.latest is not at, SLICE_S)  # type: ignore[misc]


class Ticket:
    """One request for the GPU, made by ``Client.begin``. Any thread may use it.

    A wait goes on while the daemon restarts, up to the client's ``daemon_grace_s``.
    """

    def __init__(self, client: Client, lease: Lease) -> None:
        self._client = client
        self._lease = lease

    @property
    def burst(self) -> int:
        return self._lease.burst

    @property
    def last_waiting(self) -> m.Waiting | None:
        """The place in the queue, by the daemon's last message."""
        return self._lease.waiting

    def poll(self) -> m.Granted | None:
        """Return the grant, or ``None`` while waiting. Never blocks.

        Raises ``LeaseCancelled`` after ``cancel``, and ``PeerError`` if the daemon refused, or
        ("no-daemon") has been away for the client's ``daemon_grace_s``.
        """
        error = self._lease.error
        if error is not None:
            raise LeaseCancelled if error is _LEFT else error
        return self._lease.granted

    def wait(self, timeout_s: float | None) -> m.Granted | None:
        """Do the same as ``poll``, but wait up to ``timeout_s`` for the grant."""
        patience = Patience(timeout_s)
        while (granted := self.poll()) is None and patience.tick():
            self._client._changes.sleep(lambda: self._lease.over, patience.slice_s())
        return granted

    def cancel(self) -> None:
        """Give up the wait (or the burst, if it was granted meanwhile), and wait shortly for the
        daemon to confirm. Does nothing when the wait is over."""
        client, lease = self._client, self._lease
        if lease.ended is None and lease.error is None:
            lease.error = _LEFT  # before any call, as in ``acquire``
        with client._lock:
            client._changes.tell()
            client._wake()
        patience = Patience(_WITHDRAWN_S)
        while lease.queued and patience.tick():
            client._changes.sleep(lambda: not lease.queued, patience.slice_s())
