"""The connection under a client: state that callers change, and one thread that does all the rest.

**The thread** (``kiwi-client``) dials, sends, reads, reconnects and calls the callbacks. A caller
never touches the socket. It changes the state, wakes the thread, and sleeps until the thread has
changed the state in turn::

    closed ──connect()──▶ away ──welcome──▶ connected ──the link breaks──▶ away ──▶ …
    no thread             thread, no link   thread and link

``close`` ends the thread from anywhere. The thread ends by itself when the link breaks and nobody
wants another one: without ``reconnect``, after a goodbye, or when another client of this process
took over.

**One lock**, ``_lock``, guards the state: the table and the fields below it. Nobody holds it during
input, output, a callback or a sleep (but ``connect`` starts the thread with it).

**Interrupts.** Python raises ``KeyboardInterrupt`` in the main thread, between any two steps. That
thread does no input or output, so no message is lost, cut in two, or sent twice. Each change of the
state that matters is a single assignment, or a single call into C; an interrupt finds it done or
not done. If the interrupt came before the wake-up, the thread finds the change after
``_LOOK_EVERY_S`` at the latest. Callers sleep in ``Changes``, which says why.

**Forks.** A child has copies of the state and of the socket, but not the thread. It closes the
copies and sends nothing: otherwise the daemon would not see the end of the parent while a child
lives. Then the client is closed; ``connect`` opens a connection of its own, as another session.

**Frozen processes.** Time without a daemon, and the silence of a daemon, count only while this
process could run (``Patience``). The thread reads before it judges a silence. A caller whose time
is over lets the thread read once more (``_last_look``).
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakSet

from msgspec.structs import replace

from kiwi_core.client.daemon_socket import dial, disconnected, no_daemon
from kiwi_core.client.patience import SLICE_S, Changes, Patience
from kiwi_core.client.requests import PENDING_MAX, Phase, Request, RequestTable
from kiwi_core.errors import CallerError, KiwiError, PeerError, is_full
from kiwi_core.wire import messages as m
from kiwi_core.wire.names import NAME_MAX_CHARS, clean_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.client.daemon_socket import DaemonSocket
    from kiwi_core.client.requests import Lease

_A = TypeVar("_A")

FULL: Final = "the Kiwi daemon is full; trying again"

_BACKOFF_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Waits between attempts; the last one repeats. A Unix socket refuses in microseconds, so attempts
cost nothing, and the client finds a restarted daemon before a person notices."""
_STABLE_S: Final = 2.0
"""A connection that lived this long restarts the back-off."""
_LOOK_EVERY_S: Final = 5.0
"""How often the thread looks for a change whose wake-up an interrupt has swallowed."""
_THREAD_S: Final = 1.0
"""Time for the thread to look or to end: it does so at once, unless the daemon hangs."""

_connections: WeakSet[ClientConnection] = WeakSet()


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


class ClientConnection:
    """A connection to the daemon that listens at ``socket_path``, made again when it breaks.

    ``on_notice`` gets notices for the user. ``on_unforeseen`` is called for each message about a
    wait that nobody here asked for (``unforeseen``). ``on_state`` gets true and false as the
    connection comes and goes. The client's thread calls all three. They must be quick, and must not
    call the client's blocking functions. It also calls ``cuda_library`` before each hello, and
    ``ungated``, which says why this process has no gate ("": it has one). ``daemon_grace_s``:
    running time without a daemon after which a wait fails.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        role: m.Role = m.Role.SESSION,
        name: str = "",
        folder: str = "",
        kernel_id: str = "",
        client: str = "kiwi",
        cuda_library: Callable[[], str] = loaded_cuda_library,
        ungated: Callable[[], str] = str,
        on_notice: Callable[[m.UserNotice], None] | None = None,
        on_unforeseen: Callable[[], None] | None = None,
        on_state: Callable[[bool], None] | None = None,
        reconnect: bool = True,
        connect_timeout_s: float = 5.0,
        daemon_grace_s: float = 10.0,
    ) -> None:
        self.socket_path = socket_path
        self._hello = m.Hello(
            protocol=m.PROTOCOL,
            role=role,
            client=clean_name(client),
            name=clean_name(name),
            folder=clean_name(folder[-NAME_MAX_CHARS:]),
            kernel_id=clean_name(kernel_id),
        )
        self._cuda_library = cuda_library
        self._ungated = ungated
        self._on_notice = on_notice
        self._on_unforeseen = on_unforeseen
        self._on_state = on_state
        self._reconnect = reconnect
        self._connect_timeout_s = connect_timeout_s
        self._daemon_grace_s = daemon_grace_s

        self.pid = os.getpid()
        """The process that this client speaks for."""
        self._lock = threading.Lock()
        self._changes = Changes()
        """Wakes callers after each change of what follows."""
        self._table = RequestTable(socket_path)
        self._thread: threading.Thread | None = None
        """``None``: the connection is closed."""
        self._wake_fd = -1
        """An ``eventfd`` that wakes the thread. The thread closes it."""
        self._link: DaemonSocket | None = None
        """``None``: there is no connection. Only the thread uses and closes it."""
        self.welcome: m.Welcome | None = None
        """The latest welcome; it stays valid while the daemon is away."""
        self._leaving = False
        """Whether the end of the link is wanted, so that nobody reconnects."""
        self._away_s = 0.0
        """Running time for which no daemon was there, in seconds."""
        self._attempts = 0
        """Number of failed attempts to connect."""
        self._refusal: KiwiError | None = None
        """Why the last attempt failed or the link broke; ``None`` while there is a link."""
        self._looks: list[list[bool]] = []
        """The calls of ``_last_look`` that wait. The thread puts true into each list."""
        _connections.add(self)

    # --- any thread -------------------------------------------------------------------------------

    def connect(self) -> m.Welcome:
        """Connect, unless connected already, and stay connected until ``close``.

        Raises ``PeerError`` ("no-daemon", "protocol-version", or the daemon's error) and
        ``CallerError`` ("refused": no right to use the socket). In a forked child this opens a
        connection of its own, as another session.
        """
        opened = False
        try:
            with self._lock:
                before, attempts = self.welcome, self._attempts
                if self._link is not None and before is not None:
                    return before
                if self._thread is None:
                    self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    self._thread = threading.Thread(
                        target=self._run, args=(self._wake_fd,), name="kiwi-client", daemon=True
                    )
                    opened = True
                    self._thread.start()

            def tried() -> bool:
                failed = self._attempts != attempts or self._thread is None
                return failed or self.welcome is not before

            while not tried():
                self._changes.sleep(tried, SLICE_S)
            if (welcome := self.welcome) is None or welcome is before:
                raise self._refusal or disconnected("it ended at once")
        except BaseException:
            if opened:
                self.close()
            raise
        return welcome

    def close(self) -> None:
        """End the connection and the thread. Waits end with ``PeerError`` "disconnected"."""
        thread, other = self._thread, False
        try:
            other = thread is not None and thread is not threading.current_thread()
            if other and self.connected:
                self._last_look(lambda: False)  # so that the end of a burst is sent
        finally:
            self._thread = None  # before any call: from now on the thread ends, whatever comes
            why = disconnected("it was closed here")
            with self._lock:
                self._drop(why)
                self._table.forget(why)
                self._wake()
                self._changes.tell()
        if thread is not None and other and thread.is_alive():
            thread.join(_THREAD_S)

    @property
    def connected(self) -> bool:
        return self._link is not None

    def _check_open(self) -> None:
        if self._thread is None:
            raise CallerError(
                "not-connected", "This client is not connected.", "Call connect() first."
            )

    def _ask(self, message: m.ClientMessage, answer: type[_A], timeout_s: float) -> _A:
        """Send a request and return its ``answer``. Raises ``PeerError`` ("timeout", "no-daemon",
        "disconnected", or the daemon's error) and ``CallerError`` ("not-connected", or that the
        protocol does not allow the request now)."""
        self._check_open()
        request = Request(message)
        with self._lock:
            self._request(request)
        patience = Patience(timeout_s)
        while (result := request.result) is None:
            if not patience.tick() and not self._last_look(lambda: request.result is not None):
                raise PeerError(
                    "timeout",
                    f"The Kiwi daemon did not answer within {timeout_s:g} s.",
                    "It may be busy; try again. If it hangs, look at its log.",
                )
            self._changes.sleep(lambda: request.result is not None, patience.slice_s())
        if isinstance(result, KiwiError):
            raise result
        assert isinstance(result, answer)
        return result

    def _last_look(self, done: Callable[[], bool]) -> bool:
        """Let the thread send and read once more, and return ``done()``. Called before a timeout:
        the answer may have come to a frozen process."""
        look: list[bool] = []
        patience = Patience(_THREAD_S)
        with self._lock:
            self._looks.append(look)
            self._wake()
        while self._link is not None and not look and not done() and patience.tick():
            self._changes.sleep(lambda: bool(look) or done(), SLICE_S)
        return done()

    def _why_away(self) -> KiwiError:
        if self._refusal is not None and self._refusal.code != "disconnected":
            return self._refusal
        return no_daemon(self.socket_path, "it went away")

    # --- any thread, with the lock held -----------------------------------------------------------

    def _wake(self) -> None:
        """Let the thread look at the state."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _request(self, request: Request) -> None:
        """Queue ``request``, or fail it if there is no connection."""
        if len(self._table.unsent) + len(self._table.open) >= PENDING_MAX:
            self._drop(disconnected("the daemon answers nothing"))
        if self._link is None:
            request.result = self._why_away()
        else:
            self._table.unsent.append(request)
        self._wake()

    def _drop(self, why: KiwiError) -> None:
        """Give the link up. The thread closes it, and may reconnect."""
        self._refusal = why
        self._table.lost(why)
        self._link = None  # last: after an interrupt all of this is done again
        self._changes.tell()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self, wake_fd: int) -> None:
        """Connect, serve the link until it breaks, wait a moment, and begin again."""
        me = threading.current_thread()
        pause_s, failures = 0.0, 0
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        try:
            while True:
                pause = Patience(pause_s)
                while pause.tick() and self._thread is me:
                    if poll.poll(pause.slice_s() * 1000):
                        os.eventfd_read(wake_fd)
                if self._thread is not me:
                    return
                about = {"cuda_library": self._cuda_library(), "ungated": self._ungated()}
                with self._lock:
                    lease, burst = self._table.lease, self._table.burst
                    in_burst = self._table.phase in (Phase.HELD, Phase.LINGERING)
                hello = replace(self._hello, burst=burst, in_burst=in_burst, **about)
                dialling = Patience(self._connect_timeout_s)
                try:
                    link, welcome = dial(self.socket_path, hello, dialling)
                except KiwiError as error:
                    failures += 1
                    dialling.tick()
                    self._count_failure(error, lease, pause.spent_s + dialling.spent_s)
                else:
                    since_s = time.monotonic()
                    self._serve(link, welcome, lease, wake_fd)
                    failures = 0 if time.monotonic() - since_s > _STABLE_S else failures + 1
                if not self._reconnect or self._leaving:
                    return
                pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
        finally:
            with self._lock:
                if self._thread in (me, None):
                    why = self._refusal or disconnected("it ended")
                    self._drop(why)
                    self._table.forget(why)
                    self._thread = None
                    self._changes.tell()
                if self._wake_fd == wake_fd:
                    self._wake_fd = -1
                os.close(wake_fd)

    def _count_failure(self, error: KiwiError, lease: Lease | None, spent_s: float) -> None:
        """Count a failed attempt to connect, which took ``spent_s``. ``lease`` was requested before
        it. It fails if the daemon has been away for too long; a full daemon is not away."""
        full = is_full(error)
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # closed meanwhile: another thread may have begun
            self._attempts += 1
            self._refusal = error
            self._away_s = 0.0 if full else self._away_s + spent_s
            if lease is not None and lease.phase is Phase.WAITING:
                if full:
                    lease.waiting = m.Waiting(burst=lease.burst, position=0, ahead=0, activity=FULL)
                elif self._away_s >= self._daemon_grace_s:
                    lease.error = self._why_away()
            self._changes.tell()

    def _serve(
        self, link: DaemonSocket, welcome: m.Welcome, lease: Lease | None, wake_fd: int
    ) -> None:
        """Send what is due and take what comes, until the link breaks or is given up. ``lease`` is
        the one that the hello named."""
        table, me = self._table, threading.current_thread()
        with self._lock:
            if self._thread is not me:
                link.close()
                return
            self._link, self.welcome, table.told = link, welcome, lease
            self._away_s, self._refusal, self._leaving = 0.0, None, False
            if table.watching:
                table.unsent.append(Request(m.GetStatus(watch=True)))
            self._changes.tell()
        _call(self._on_state, True)
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        poll.register(link, select.POLLIN)
        silence, pinged = Patience(self._daemon_grace_s), False
        try:
            for message in link.unread:
                self._take(link, message)
            while self._link is link and self._thread is me:
                with self._lock:
                    looks, self._looks = self._looks, []
                self._send_due(link)
                waits = table.phase is Phase.WAITING
                wait_s = 0.0 if looks else SLICE_S if waits else _LOOK_EVERY_S
                ready = [fd for fd, _ in poll.poll(wait_s * 1000)]
                if wake_fd in ready:
                    os.eventfd_read(wake_fd)
                if link.fileno() in ready:
                    for message in link.read():
                        self._take(link, message)
                if link.fileno() in ready or not waits:
                    silence, pinged = Patience(self._daemon_grace_s), False
                # A live daemon sends something about every second to a client that waits.
                elif not silence.tick():
                    raise disconnected("the daemon does not answer")
                elif not pinged and silence.spent_s * 2 > self._daemon_grace_s:
                    pinged = True
                    with self._lock:
                        self._request(Request(m.Ping()))
                for look in looks:
                    look.append(True)
                    self._changes.tell()
        except PeerError as error:
            with self._lock:
                if self._link is link:
                    self._leaving = self._leaving or error.code == "superseded"
                    self._away_s = silence.spent_s
                    self._drop(error)
        finally:
            link.close()
        _call(self._on_state, False)

    def _send_due(self, link: DaemonSocket) -> None:
        """Send what the daemon does not know yet."""
        while True:
            with self._lock:
                if self._link is not link:
                    return
                message, request = self._table.next_due(link.conversation)
                if message is None:
                    return
                try:
                    data = link.encode(message)
                except CallerError as error:
                    self._table.refuse(request, error)
                    self._changes.tell()
                    continue
            link.write(data)

    def _take(self, link: DaemonSocket, message: m.DaemonMessage) -> None:
        with self._lock:
            if self._link is not link:
                return
            self._table.take(message)
            self._changes.tell()
        if isinstance(message, m.UserNotice):
            _call(self._on_notice, message)
        elif isinstance(message, m.Waiting) and not message.burst:
            _call(self._on_unforeseen)


def _call(callback: Callable[..., None] | None, *args: object) -> None:
    """Run ``callback``. Its failure is shown like that of a thread, and breaks nothing here."""
    try:
        if callback is not None:
            callback(*args)
    except Exception as error:  # noqa: BLE001
        threading.excepthook(
            threading.ExceptHookArgs(
                (type(error), error, error.__traceback__, threading.current_thread())
            )
        )


def _close_in_child() -> None:
    """See "Forks" above. ``daemon_socket`` closes the copies of the sockets."""
    why = disconnected("this process was forked")
    for connection in tuple(_connections):
        if connection._wake_fd >= 0:
            os.close(connection._wake_fd)
            connection._wake_fd = -1
        connection._lock = threading.Lock()  # a thread that this process lacks may hold the old one
        connection._changes = Changes()
        connection._thread = connection.welcome = None
        connection._drop(why)
        connection._table.forget(why)
        connection._table = RequestTable(connection.socket_path)
        connection.pid = os.getpid()


os.register_at_fork(after_in_child=_close_in_child)
