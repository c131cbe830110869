"""The blocking client: one process's connection to the daemon of one GPU. Any thread may call it.

``channel`` sends, reads and reconnects; ``table`` keeps what the client knows of its burst;
``ticket`` waits for the GPU.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kiwi_core.client.channel import Channel
from kiwi_core.client.patience import SLICE_S
from kiwi_core.client.requests import LeaseRequest, Request, RequestTable
from kiwi_core.client.ticket import Ticket
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
    Rename,
    Resume,
    Role,
    Set,
    StatusReport,
    StoryReport,
    Suspend,
    UsageBy,
    UsageReport,
)
from kiwi_core.wire.names import NAME_MAX_CHARS, check_settings, clean_name

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


_SESSION: Final = Role.SESSION  # under an own name: see ``sched.model.memory``


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


class Client:
    """A connection to the daemon that listens at ``socket_path``.

    ``on_notice`` gets notices for the user, in the thread that reads them. ``on_unforeseen`` is
    called there for each message about a wait that nobody here asked for (``unforeseen``).
    ``on_state`` gets true and false as the connection comes and goes, in the client's own thread.
    These must be quick, and must not call the client's blocking functions. ``cuda_library`` is
    called before each hello, and so is ``ungated``, which says why this process has no gate ("": it
    has one). ``daemon_grace_s``: running time without a daemon after which a wait fails.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        role: Role = Role.SESSION,
        name: str = "",
        folder: str = "",
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
        self._folder = clean_name(folder[-NAME_MAX_CHARS:])
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
            folder=self._folder,
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
        """Return the daemon's last message about a call that waits at this program's gate although
        nobody here asked for the GPU. ``None``: the call has the GPU, or there is no such call.
        """
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
        channel = self._channel
        before, me = channel.table.lease, threading.get_ident()
        begun: list[LeaseRequest] = []
        try:
            channel.send_and_read(
                lambda: begun.append(self._begin(blocking=True)),
                lambda: bool(begun) and begun[0].over,
            )
            lease = begun[0]
            if lease.granted is not None and lease.error is None:  # the usual case
                return lease.granted
            return Ticket(channel, lease).await_grant(on_waiting, cancelled, poll_s, timeout_s)
        except BaseException:
            # Read the table, not ``begun[0]``: the interrupt may have come before it was stored.
            # Call nothing before ``left`` is set: a second interrupt may come inside a call.
            latest = channel.table.lease
            if latest is not None and latest is not before and latest.owner == me:
                latest.left = True
                Ticket(channel, latest).cancel()
            raise

    def begin(self) -> Ticket:
        """Ask for the GPU and return at once. Raises ``CallerError`` ("in-burst": this process
        holds the GPU or waits for it; "not-connected")."""
        with self._channel.lock:
            return Ticket(self._channel, self._begin(blocking=False))

    def _begin(self, *, blocking: bool) -> LeaseRequest:
        channel = self._channel
        channel.check_open()
        if self._role is not _SESSION:
            raise CallerError("observer", "An observer never holds the GPU.")
        lease = channel.table.begin(threading.get_ident(), blocking=blocking)
        if channel.link is None:
            channel.hurry()
        channel.send_due()
        return lease

    def end_burst(self, *, lingering: bool = False, burst: int | None = None) -> None:
        """End the burst (``lingering``: threads or tasks that it left behind still use the GPU).

        Does nothing outside a burst, or if ``burst`` is given and is not the current one. Does not
        raise if the daemon is away: the client reports the end when the daemon is back.
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

    def rename(self, session: str, name: str, folder: str, timeout_s: float = 5.0) -> None:
        """Give a session another name; see ``Rename``. Raises ``PeerError`` "no-such-session"."""
        renamed = Rename(
            session=session, name=clean_name(name), folder=clean_name(folder[-NAME_MAX_CHARS:])
        )
        self._channel.ask(renamed, timeout_s)

    def expect(
        self, key: str, for_s: float, timeout_s: float = 5.0, *, pid: int = 0, name: str = ""
    ) -> None:
        """Announce a session that will join here; see ``Expect``. Raises ``PeerError`` "busy"."""
        self._channel.ask(Expect(key=key, for_s=for_s, pid=pid, name=name), timeout_s)

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
        """Return all changes of the GPU's history after the serial ``since``. The next call may go
        on from ``last``. A restarted daemon counts from 1 again.
        """
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
                channel.send_request(Request(GetStatus(watch=True)))
            return table.reports
