"""The connection under a client: it sends, receives and reconnects.

One thread (``Watcher``) reads what the daemon sends unasked and reconnects after the connection
broke. A caller that asks something reads the socket itself for the first milliseconds, so that an
answer wakes no other thread. ``_reading`` is the right to read; while a caller has it, the socket
is not in the thread's ``epoll``.

Lock order: ``_dialling``, then ``_reading``, then ``lock``; never the other way.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

from kiwi_core.client.daemon_socket import BRIEFLY_S, DaemonSocket, dial, disconnected, no_daemon
from kiwi_core.client.patience import Changes, Patience
from kiwi_core.client.requests import PENDING_MAX, BurstNumbers, Request, RequestTable
from kiwi_core.client.watcher import Watcher
from kiwi_core.errors import CallerError, KiwiError, PeerError, is_full
from kiwi_core.wire.messages import GetStatus, UserNotice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, Hello, Waiting, Welcome


_numbers_of: dict[str, BurstNumbers] = {}
"""Burst numbers by socket. A daemon knows processes, not clients: a process's next client counts on
from here."""


_channels: WeakSet[Channel] = WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the sockets: otherwise the daemon would not see the end of
    the parent while a child lives."""
    for channel in tuple(_channels):
        channel.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """A connection that is made again when it breaks, with the table of its burst and requests.

    ``hello`` makes the first message from the table before each connection. ``table`` is read and
    changed only with ``lock`` held.
    """

    def __init__(
        self,
        socket_path: Path,
        hello: Callable[[RequestTable], Hello],
        *,
        on_notice: Callable[[UserNotice], None] | None,
        on_unforeseen: Callable[[], None] | None,
        on_state: Callable[[bool], None] | None,
        reconnect: bool,
        connect_timeout_s: float,
        grace_s: float,
    ) -> None:
        self._path = socket_path
        self._hello = hello
        self._on_notice = on_notice
        self._on_unforeseen = on_unforeseen
        self._on_state = on_state
        self._reconnect = reconnect
        self._connect_timeout_s = connect_timeout_s
        self.grace_s = grace_s
        self._make_locks()
        self._numbers = _numbers_of.setdefault(str(socket_path), BurstNumbers())
        self.table = RequestTable(self._numbers)
        self.link: DaemonSocket | None = None
        self.welcome: Welcome | None = None
        self._watcher: Watcher | None = None
        """The thread and what wakes it; ``None`` while the channel is not open."""
        self.pid = os.getpid()
        self.leaving = False
        """Whether the end of this connection is wanted, so that nobody reconnects."""
        self.received = 0
        """Number of messages received; the daemon is silent while it does not change."""
        self.away_s = 0.0
        """Running time since the daemon was last connected, in seconds."""
        self.attempts = 0
        """Number of failed attempts to reconnect."""
        self._refusal: KiwiError | None = None
        """Why the last attempt failed or the connection broke; ``None`` while it is connected."""
        _channels.add(self)

    def _make_locks(self) -> None:
        self._dialling = threading.Lock()
        self._reading = threading.Lock()
        self.lock = threading.Lock()
        self.changes = Changes()

    # --- opening and closing --------------------------------------------------------------------

    def connect(self) -> Welcome:
        was_open = self.is_open
        try:
            with self._dialling:
                if self.link is None:
                    self._dial(Patience(self._connect_timeout_s), None)
        except BaseException:
            if not was_open:
                self.close()
            raise
        if (welcome := self.welcome) is None:
            raise disconnected("it ended at once")
        return welcome

    def close(self) -> None:
        why = disconnected("it was closed here")
        with self.lock:
            watcher = self._watcher
            self.drop(self.link, why)
            self.table.forget(why)
            if watcher is not None:
                watcher.wake()
            self._watcher = None
            self.changes.tell()
        if watcher is not None:
            watcher.join()

    def close_in_child(self) -> None:
        """Close the copy of the parent's socket in a forked child, and send nothing."""
        self._make_locks()  # a thread that this process lacks may have held one
        if self.link is not None:
            self.link.close()
        if self._watcher is not None:
            self._watcher.release()
        self.link = self._watcher = self.welcome = None
        self.table.forget(disconnected("this process was forked"))
        self.table = RequestTable(self._numbers)
        self.pid = os.getpid()

    @property
    def is_open(self) -> bool:
        return self._watcher is not None

    def check_open(self) -> None:
        if self._watcher is None:
            raise CallerError(
                "not-connected", "This client is not connected.", "Call connect() first."
            )

    def _dial(self, patience: Patience, watcher: Watcher | None) -> None:
        """Connect and tell the daemon the state of the burst; ``_dialling`` is held.

        ``watcher`` is the calling watcher, if a watcher calls; it may have been retired meanwhile.
        """
        with self.lock:
            hello = self._hello(self.table)
        link, welcome = dial(self._path, hello, patience)
        with self._reading:
            with self.lock:
                if watcher is not None and watcher is not self._watcher:
                    link.close()
                    return
                self._install(link, welcome)
            self._take_in(link)  # what came together with the welcome

    def _install(self, link: DaemonSocket, welcome: Welcome) -> None:
        self.link, self.welcome = link, welcome
        self.away_s, self._refusal, self.leaving = 0.0, None, False
        if self._watcher is None:
            self._watcher = Watcher(self)
            self._watcher.start()
        self._watcher.add(link)
        self.send_due()
        if self.table.watching:
            self.send_request(Request(GetStatus(watch=True)))
        self._watcher.wake()
        self.changes.tell()

    # --- speaking -------------------------------------------------------------------------------

    def send_due(self) -> None:
        """Send what the daemon does not know yet about the burst, then the requests that are not
        sent yet; ``lock`` is held. If sending fails, drop the link."""
        while (link := self.link) is not None:
            try:
                if (message := self.table.next_message(link.conversation)) is not None:
                    link.send(message)
                elif (request := self.table.next_request(link.last_request)) is not None:
                    self._try_request(link, request)
                else:
                    return
            except PeerError as error:
                self.drop(link, error)

    def _try_request(self, link: DaemonSocket, request: Request) -> None:
        try:
            link.send(request.message, request.number)
        except CallerError as error:
            self.table.refuse(request, error)

    def send_request(self, request: Request) -> None:
        """Send ``request``, or fail it without a connection; ``lock`` is held."""
        if self.link is not None:
            if self.table.ask(request) > PENDING_MAX:
                self.drop(self.link, disconnected("the daemon answers nothing"))
            self.send_due()
        if self.link is None:
            request.error = self.why_away()

    def send_and_read(self, send: Callable[[], object], done: Callable[[], bool]) -> None:
        """Call ``send`` with ``lock`` held, then read until ``done()``, for ``BRIEFLY_S`` at most.

        If another thread is reading, do not read: that thread receives the answer.
        """
        mine: list[bool] = []
        try:
            # As in ``DaemonSocket.fetch``: no interrupt can come between taking the lock and
            # storing that.
            mine.extend(map(self._reading.acquire, (False,)))
            if mine[0]:
                self._send_and_read_alone(send, done)
            else:
                with self.lock:
                    send()
        finally:
            if mine and mine[0]:
                self._reading.release()

    def _send_and_read_alone(self, send: Callable[[], object], done: Callable[[], bool]) -> None:
        try:
            with self.lock:
                link = self.link
                if link is not None and self._watcher is not None:
                    self._watcher.pause(link)
                send()
            until_s = time.monotonic() + BRIEFLY_S
            while link is not None and link is self.link and not done():
                if not self._read(link, wait=True) or time.monotonic() > until_s:
                    break
        finally:
            with self.lock:
                self._put_right()

    def _put_right(self) -> None:
        """Give the link back to the watcher; ``_reading`` and ``lock`` are held. After an
        interrupt, send the rest of a message, and wake the watcher for messages not taken yet."""
        link = self.link
        if link is None or self._watcher is None:
            return
        self._watcher.add(link)
        try:
            link.flush()
        except PeerError as error:
            self.drop(link, error)
            return
        if not link.drained():
            self._watcher.wake()

    def mend(self) -> None:
        """Finish what an interrupt may have left undone: a link that nobody reads, messages not
        sent or not taken. The watcher's thread calls this when it was woken, and every few seconds.
        """
        with self._reading:
            if (link := self.link) is not None:
                self._take_in(link)
            with self.lock:
                self._put_right()
                self.send_due()

    # --- hearing (with _reading held) -----------------------------------------------------------

    def read_now(self, fd: int) -> bool:
        """Read what has arrived at ``fd``; false if that is not this channel's link. Called by the
        watcher's thread."""
        with self._reading:
            link = self.link
            if link is None or link.fileno() != fd:
                return False
            self._read(link, wait=False)
            return True

    def _read(self, link: DaemonSocket, *, wait: bool) -> bool:
        """Take what has arrived; false if nothing has, or if the link is gone."""
        try:
            if link.drained() and not link.fetch(wait=wait):
                return False
        except PeerError as error:
            with self.lock:
                self.drop(link, error)
            return False
        return self._take_in(link)

    def _take_in(self, link: DaemonSocket) -> bool:
        while True:
            news: UserNotice | Waiting | None = None
            with self.lock:
                if link is not self.link:
                    return False
                try:
                    messages = link.messages()
                    if not messages:
                        return True
                    news = self.table.handle_message(messages)
                except PeerError as error:
                    self.drop(link, error)
                    return False
                self.received += 1
                self.changes.tell()
                drained = link.drained()
            if news is not None:
                self._pass_on(news)
            elif drained:
                return True

    def _pass_on(self, news: UserNotice | Waiting) -> None:
        if isinstance(news, UserNotice):
            if self._on_notice is not None:
                _call(self._on_notice, news)
        elif self._on_unforeseen is not None:
            _call(self._on_unforeseen)

    def drop(self, link: DaemonSocket | None, why: KiwiError) -> None:
        """Close ``link``, if it is the current one; ``lock`` is held. The watcher reconnects."""
        if link is None or link is not self.link:
            return
        self._refusal = why
        if why.code == "superseded":
            self.leaving = True  # another client of this process took over: do not reconnect
        self.table.lost(why)
        if self._watcher is not None:
            self._watcher.remove(link)
        link.close()
        self.link = None  # last: after an interrupt all of this is done again
        if self._watcher is not None:
            self._watcher.wake()
        self.changes.tell()

    # --- the watcher's part: staying connected ---------------------------------------------------

    def try_again(self, watcher: Watcher) -> bool:
        """Try once to reconnect; true if there is a link again. Called by the watcher's thread."""
        patience = Patience(self._connect_timeout_s)
        with self._dialling:
            if watcher is not self._watcher or self.link is not None:
                return True
            try:
                self._dial(patience, watcher)
                return self.link is not None
            except KiwiError as error:
                patience.tick()
                self.count_away(patience.spent_s, error)
                return False

    @property
    def connected(self) -> bool:
        return self.link is not None

    def count_away(self, spent_s: float, error: KiwiError | None = None) -> None:
        """Count time without a daemon, and a failed attempt (``error``). A full daemon resets the
        count.
        """
        with self.lock:
            self.away_s += spent_s
            if error is not None:
                self.attempts += 1
                self._refusal = error
            if self._refusal is not None and is_full(self._refusal):
                self.away_s = 0.0
                self.table.daemon_full()
            self.changes.tell()

    def belongs_to(self, watcher: Watcher) -> bool:
        return self._watcher is watcher

    @property
    def reconnects(self) -> bool:
        return self._reconnect and not self.leaving

    def end_watch(self, watcher: Watcher) -> None:
        """Close the channel when its thread ends, for example after a lost connection without
        ``reconnect``.
        """
        with self.lock:
            if self._watcher is watcher:
                self._watcher = None
                self.table.forget(self._refusal or disconnected("it ended"))
                self.changes.tell()

    def hurry(self) -> None:
        """Try to reconnect now, because somebody waits; ``lock`` is held."""
        if self._watcher is not None:
            self._watcher.wake(hurry=True)

    def report_state(self, connected: bool) -> None:
        if self._on_state is not None:
            _call(self._on_state, connected)

    def why_away(self) -> KiwiError:
        if self._refusal is not None and self._refusal.code != "disconnected":
            return self._refusal
        return no_daemon(self._path, "it went away")

    # --- asking and waiting -----------------------------------------------------------------------

    def ask(self, message: ClientMessage, timeout_s: float) -> object:
        self.check_open()
        request = Request(message)
        self.send_and_read(lambda: self.send_request(request), lambda: request.over)
        patience = Patience(timeout_s)
        while not request.over:
            if not patience.tick() and not self.last_look(lambda: request.over):
                raise PeerError(
                    "timeout",
                    f"The Kiwi daemon did not answer within {timeout_s:g} s.",
                    "It may be busy; try again. If it hangs, look at its log.",
                )
            self.changes.sleep(lambda: request.over, patience.slice_s())
        return request.result()

    def last_look(self, done: Callable[[], bool]) -> bool:
        """Read once more before a timeout: the answer may have come to a frozen process."""
        self.send_and_read(nothing, done)
        if not done():
            self.changes.sleep(done, BRIEFLY_S)  # another thread may be reading it now
        return done()


def nothing() -> None:
    pass


def _call(callback: Callable[..., None], *args: object) -> None:
    """Run ``callback``. Its failure is shown like that of a thread, and breaks nothing here."""
    try:
        callback(*args)
    except Exception as error:  # noqa: BLE001
        threading.excepthook(
            threading.ExceptHookArgs(
                (type(error), error, error.__traceback__, threading.current_thread())
            )
        )
