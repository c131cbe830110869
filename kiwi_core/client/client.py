"""The blocking client: one process's connection to the daemon of one GPU. Any thread may call it.

``channel`` sends, reads and reconnects; ``table`` keeps what the client knows of its burst.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kiwi_core.client.channel import Channel
from kiwi_core.client.daemon_socket import disconnected
from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.client.requests import LeaseCancelled, LeaseRequest, Request, RequestTable
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.messages import (
    PROTOCOL,
    BringBack,
    Expect,
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
    Ping,
    Release,
    Resume,
    Role,
    Set,
    StatusReport,
    StoryReport,
    Suspend,
    UsageBy,
    UsageReport,
)
from kiwi_core.wire.names import check_settings, clean_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kiwi_core.states import AntiThrash, Priority
    from kiwi_core.wire.messages import (
        GpuStatus,
        Granted,
        HistoryEntry,
        HistorySession,
        StoryLine,
        UserNotice,
        Waiting,
        Welcome,
    )
    from kiwi_core.wire.metrics import GpuMetrics

_WITHDRAWN_S: Final = 0.25
"""How long ``cancel`` waits for the daemon to confirm that the place in the queue is free."""


def loaded_cuda_library() -> str:
    """Return the path of the ``libcuda.so`` mapped into this process, or "".

    Loads nothing. The daemon needs the path: a real driver and an emulating daemon do not mix.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                if b"/libcuda.so" in line:
                    # address perms offset dev inode path; the path may hold spaces
                    path = line.split(None, 5)[5].rstrip(b"\n")
                    return path.decode(errors="replace")[:4096]
    except OSError:
        pass  # no /proc: the path cannot be known
    return ""


class Ticket:
    """One request for the GPU, made by ``Client.begin``. Any thread may use it."""

    def __init__(self, client: Client, lease: LeaseRequest) -> None:
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


class Client:
    """A connection to the daemon that listens at ``socket_path``.

    ``on_notice`` gets what the user must know, in the thread that reads it. ``on_unforeseen`` is
    called there for each message about a wait that nobody here asked for (``unforeseen``).
    ``on_state`` gets true and false as the connection comes and goes, in the client's own thread.
    These must be quick, and must not call the client's blocking functions. ``cuda_library`` is
    called before each hello, and so is ``ungated``, which says why this process has no gate ("":
    it has one). ``daemon_grace_s``: running time without a daemon after which a wait fails.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        role: Role = Role.SESSION,
        name: str = "",
        kernel_id: str = "",
        client: str = "kiwi",
        cuda_library: Callable[[], str] = loaded_cuda_library,
        ungated: Callable[[], str] = str,
        on_notice: Callable[[UserNotice], None] | None = None,
        on_unforeseen: Callable[[], None] | None = None,
        on_state: Callable[[bool], None] | None = None,
        reconnect: bool = True,
        connect_timeout_s: float = 5.0,
        daemon_grace_s: float = 10.0,
    ) -> None:
        self.socket_path = socket_path
        self._role = role
        self._name = clean_name(name)
        self._kernel_id = clean_name(kernel_id)
        self._client = clean_name(client)
        self._cuda_library = cuda_library
        self._ungated = ungated
        self._channel = Channel(
            socket_path,
            self._hello,
            on_notice=on_notice,
            on_unforeseen=on_unforeseen,
            on_state=on_state,
            reconnect=reconnect,
            connect_timeout_s=connect_timeout_s,
            grace_s=daemon_grace_s,
        )

    def _hello(self, table: RequestTable) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            role=self._role,
            client=self._client,
            name=self._name,
            kernel_id=self._kernel_id,
            burst=table.burst,
            in_burst=table.in_burst,
            cuda_library=self._cuda_library(),
            ungated=self._ungated(),
        )

    # --- opening and closing --------------------------------------------------------------------

    def connect(self) -> Welcome:
        """Connect, unless connected already, and stay connected until ``close``.

        Raises ``PeerError`` ("no-daemon", "protocol-version", or the daemon's error) and
        ``CallerError`` ("refused": no right to use the socket). In a forked child this opens a
        connection of its own, as another session.
        """
        return self._channel.connect()

    def close(self) -> None:
        """End the connection and the thread. Waits end with ``PeerError`` "disconnected"."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome | None:
        """The latest welcome; it stays valid while the daemon is away."""
        return self._channel.welcome

    @property
    def connected(self) -> bool:
        return self._channel.link is not None

    @property
    def unforeseen(self) -> Waiting | None:
        """Where a call at this program's gate waits, by the daemon's last message, although nobody
        here asked for the GPU; ``None``: the call has the GPU, or there is no such call."""
        return self._channel.table.unforeseen

    @property
    def pid(self) -> int:
        """The process that this client speaks for."""
        return self._channel.pid

    # --- the lease ------------------------------------------------------------------------------

    def acquire(
        self,
        *,
        on_waiting: Callable[[Waiting], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        poll_s: float = SLICE_S,
        timeout_s: float | None = None,
    ) -> Granted:
        """Wait until this process holds the GPU for a new burst. For programs that do nothing else
        meanwhile (``kiwi run``); kernels call ``begin`` and wait for the ``Ticket``.

        ``on_waiting`` is called in the caller's thread; ``cancelled`` is called at least every
        ``poll_s``. The wait goes on while the daemon restarts. Any exception ends the wait:
        ``LeaseCancelled``; that of a signal (``KeyboardInterrupt``); ``PeerError`` "no-daemon"
        after ``daemon_grace_s`` without a daemon, "timeout" after ``timeout_s``, or the daemon's
        error; ``CallerError`` ("in-burst", "not-connected").
        """
        before, me = self._channel.table.lease, threading.get_ident()
        begun: list[LeaseRequest] = []
        try:
            self._channel.talk(
                lambda: begun.append(self._begin(blocking=True)),
                lambda: bool(begun) and begun[0].over,
            )
            return self._await_grant(begun[0], on_waiting, cancelled, poll_s, timeout_s)
        except BaseException:
            # Read the table, not ``begun[0]``: the interrupt may have come before it was stored.
            # Call nothing before ``left`` is set: a second interrupt may come inside a call.
            lease = self._channel.table.lease
            if lease is not None and lease is not before and lease.owner == me:
                lease.left = True
                self.cancel(lease)
            raise

    def begin(self) -> Ticket:
        """Ask for the GPU and return at once. Raises ``CallerError`` ("in-burst": this process
        holds the GPU or waits for it; "not-connected")."""
        with self._channel.lock:
            return Ticket(self, self._begin(blocking=False))

    def _begin(self, *, blocking: bool) -> LeaseRequest:
        channel = self._channel
        channel.check_open()
        if self._role is not Role.SESSION:
            raise CallerError("observer", "An observer never holds the GPU.")
        lease = channel.table.begin(threading.get_ident(), blocking=blocking)
        lease.silence = Patience(channel.grace_s)
        lease.attempts = channel.attempts
        if channel.link is None:
            channel.hurry()
        channel.send_due()
        return lease

    def look(self, lease: LeaseRequest) -> Granted | None:
        """Do the work of ``Ticket.poll``."""
        if not lease.over:
            self._mind_silence(lease)
            self._mind_absence(lease)
        if lease.error is not None:
            raise lease.error
        return lease.granted

    def wait_for(self, lease: LeaseRequest, timeout_s: float | None) -> Granted | None:
        """Do the work of ``Ticket.wait``."""
        if not lease.over:
            self._channel.talk(_nothing, lambda: lease.over)
        patience = Patience(timeout_s)
        while (granted := self.look(lease)) is None:
            if not patience.tick():
                return None
            self._channel.changes.sleep(lambda: lease.over, patience.slice_s())
        return granted

    def _await_grant(
        self,
        lease: LeaseRequest,
        on_waiting: Callable[[Waiting], None] | None,
        cancelled: Callable[[], bool] | None,
        poll_s: float,
        timeout_s: float | None,
    ) -> Granted:
        if lease.over:  # the usual case
            granted = self.look(lease)
            assert granted is not None
            return granted
        channel = self._channel
        patience = Patience(timeout_s)
        shown: Waiting | None = None
        while (granted := self.look(lease)) is None:
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

    def _mind_silence(self, lease: LeaseRequest) -> None:
        """Ping a daemon that is silent, and drop the link if it does not answer. A live daemon
        sends something about every second to a client that waits."""
        channel, silence = self._channel, lease.silence
        if lease.heard != channel.heard or channel.link is None:
            lease.heard = channel.heard
            silence.restart()
            return
        asked = silence.spent_s * 2 > channel.grace_s
        patient = silence.tick() or channel.last_look(lambda: channel.heard != lease.heard)
        with channel.lock:
            if not patient:
                channel.away_s = max(channel.away_s, silence.spent_s)
                channel.drop(channel.link, disconnected("the daemon does not answer"))
            elif not asked and silence.spent_s * 2 > channel.grace_s:
                channel.say_request(Request(Ping()))

    def _mind_absence(self, lease: LeaseRequest) -> None:
        """Fail ``lease`` if the daemon has been away for too long, and an attempt to reconnect has
        failed since ``lease`` began."""
        channel = self._channel
        if channel.link is not None or channel.away_s < channel.grace_s:
            return
        with channel.lock:
            if lease.attempts < channel.attempts and not lease.over and channel.link is None:
                channel.table.give_up(lease, channel.why_away())

    def cancel(self, lease: LeaseRequest) -> None:
        """Do the work of ``Ticket.cancel``."""
        channel = self._channel
        expected = False

        def say() -> None:
            nonlocal expected
            channel.table.give_up(lease, LeaseCancelled())
            channel.send_due()
            channel.changes.tell()
            link = channel.link
            expected = link is not None and lease.granted is None and link.talk.asked == lease.burst

        def done() -> bool:
            return not expected or lease.withdrawn or channel.link is None

        channel.talk(say, done)
        patience = Patience(_WITHDRAWN_S)
        while not done() and patience.tick():
            channel.changes.sleep(done, patience.slice_s())

    def end_burst(self, *, lingering: bool = False, burst: int | None = None) -> None:
        """End the burst (``lingering``: threads or tasks that it left behind still use the GPU).

        Does nothing outside a burst, or if ``burst`` is given and is not the current one. Does not
        raise if the daemon is away: it is told when it is back.
        """
        with self._channel.lock:
            if burst is None or burst == self._channel.table.burst:
                self._channel.table.end(lingering=lingering)
                self._channel.send_due()

    # --- questions ------------------------------------------------------------------------------

    def release(self, session: str = "", timeout_s: float = 5.0) -> None:
        """Page out ``session`` (empty: this one); return when that is under way. Raises
        ``PeerError`` "no-such-session", "in-burst" (nothing is moved)."""
        self._channel.ask(Release(session=session), timeout_s)

    def suspend(self, session: str = "", timeout_s: float = 5.0) -> None:
        """Keep ``session`` (empty: this one) out of the GPU until ``resume``; return when that has
        begun. Raises ``PeerError`` "no-such-session", "unguarded" (nothing is done)."""
        self._channel.ask(Suspend(session=session), timeout_s)

    def resume(self, session: str = "", timeout_s: float = 5.0) -> None:
        """End the effect of ``suspend``. Raises ``PeerError`` "no-such-session", "not-allowed" (an
        admin keeps it out)."""
        self._channel.ask(Resume(session=session), timeout_s)

    def bring_back(self, session: str = "", timeout_s: float = 5.0) -> tuple[bool, str]:
        """Say that the program of ``session`` (empty: this one) is about to be used. Return
        whether its page-in has begun, and if not, why. Raises ``PeerError`` "no-such-session"."""
        answer = self._channel.ask(BringBack(session=session), timeout_s)
        assert isinstance(answer, HintReport)
        return answer.begun, answer.why

    def expect(self, key: str, for_s: float, timeout_s: float = 5.0) -> None:
        """Announce a session that will join here; see ``Expect``. Raises ``PeerError`` "busy"."""
        self._channel.ask(Expect(key=key, for_s=for_s), timeout_s)

    def goodbye(self, timeout_s: float) -> None:
        """Leave Kiwi: wait until all memory is back in the GPU, then close the client.

        Raises ``PeerError`` "timeout" if that takes longer; the daemon goes on as long as the
        client is not closed. Without a daemon, close at once.
        """
        self.end_burst()
        self._channel.leaving = True
        try:
            if self._channel.link is not None:
                self._channel.ask(Goodbye(), timeout_s)
        except PeerError as error:
            if error.code == "timeout":
                raise
        self.close()

    def status(self, timeout_s: float = 5.0) -> GpuStatus:
        answer = self._channel.ask(GetStatus(), timeout_s)
        assert isinstance(answer, StatusReport)
        return answer.gpu

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
        wanted = Set(
            tq_s=tq_s, anti_thrash=anti_thrash, policy=policy, session=session, priority=priority
        )
        check_settings(wanted)
        self._channel.ask(wanted, 5.0)

    def story(self, session: str) -> list[StoryLine]:
        """Return the last things that happened to ``session``, one of this user's."""
        answer = self._channel.ask(GetStory(session=session), 5.0)
        assert isinstance(answer, StoryReport)
        return answer.lines

    def history(self, since: int = 0, timeout_s: float = 5.0) -> HistoryReport:
        """Return all that changed in the GPU's history after the serial ``since``. The next call
        may go on from ``last``. A daemon that was restarted counts from 1 again."""
        entries: dict[int, HistoryEntry] = {}
        sessions: dict[str, HistorySession] = {}
        while True:
            part = self._channel.ask(GetHistory(since=since), timeout_s)
            assert isinstance(part, HistoryReport)
            for entry in part.entries:  # an entry may have ended between two parts
                entries.pop(entry.id, None)
                entries[entry.id] = entry
            sessions |= part.sessions
            since = part.last
            if not part.more:
                return HistoryReport(last=since, entries=[*entries.values()], sessions=sessions)

    def usage(
        self, by: UsageBy = UsageBy.USER, since_unix_s: float = 0.0, timeout_s: float = 10.0
    ) -> UsageReport:
        """Return the GPU's use by user or notebook. Raises ``PeerError`` "no-usage", "busy"."""
        answer = self._channel.ask(GetUsage(by=by, since_unix_s=since_unix_s), timeout_s)
        assert isinstance(answer, UsageReport)
        return answer

    def metrics(self, timeout_s: float = 5.0) -> GpuMetrics:
        """Return what the daemon has counted since it started; the same for every reader."""
        answer = self._channel.ask(GetMetrics(), timeout_s)
        assert isinstance(answer, MetricsReport)
        return answer.metrics

    def ping(self, timeout_s: float = 5.0) -> None:
        """Return when the daemon has answered."""
        self._channel.ask(Ping(), timeout_s)

    def watch(self) -> Iterator[GpuStatus]:
        """Yield the status now and after each change; a slow reader gets only the latest.

        Ends when the client is closed. Raises ``PeerError`` "no-daemon" after ``daemon_grace_s``
        without a daemon.
        """
        channel = self._channel
        channel.check_open()
        seen = self._start_watch()
        while channel.is_open:
            if channel.table.reports > seen:
                seen, latest = channel.table.reports, channel.table.latest
                assert latest is not None
                yield latest
            elif channel.link is None and channel.away_s >= channel.grace_s:
                raise channel.why_away()
            else:
                channel.changes.sleep(lambda at=seen: channel.table.reports > at, SLICE_S)  # type: ignore[misc]

    def _start_watch(self) -> int:
        """Start watching. Return the count of reports before the first one to yield."""
        channel = self._channel
        with channel.lock:
            table = channel.table
            if table.watching:
                return table.reports - (table.latest is not None)
            table.watching = True
            if channel.link is not None:
                channel.say_request(Request(GetStatus(watch=True)))
            return table.reports


def _nothing() -> None:
    pass
