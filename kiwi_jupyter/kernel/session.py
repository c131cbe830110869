"""This kernel's connection to the daemon of its GPU. It is made when first needed, and kept."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.config import gpu_possible, socket_dir
from kiwi_core.errors import CallerError, KiwiError, SilentDaemonError, is_full
from kiwi_core.states import Notice
from kiwi_core.units import format_duration_s
from kiwi_core.wire.words import DAEMON_ENDED
from kiwi_jupyter.kernel.driver_gate import DriverGate
from kiwi_jupyter.kernel.identity import kernel_id, notebook_folder, notebook_name
from kiwi_jupyter.kernel.words import SHOWN_AT_ONCE, SHOWN_NOTICES, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.client import Client
    from kiwi_core.client.directory import Signs
    from kiwi_core.wire.messages import Emulation, GpuStatus, UserNotice, Welcome
    from kiwi_jupyter.kernel.config import Kiwi

RETRY_S: Final = 30.0
"""Time after a failed attempt to connect in which no daemon is started or waited for."""

JOIN_EVERY_S: Final = 1.0
"""Interval of attempts while there is no daemon."""

AWAY: Final = "Waiting for the Kiwi daemon, which may be restarting"
UNGUARDED: Final = (
    "Until then cells of this notebook are never stopped in the middle, so others wait for them."
)

SILENT: Final = "Waiting for the Kiwi daemon, which runs but does not answer"
STARTING: Final = "Waiting for the Kiwi daemon, which is being started"

SHOW_EVERY_S: Final = 0.05
"""Interval at which a cell that waits for another thread's connection shows what that waits for."""

LOOK_AGAIN_S: Final = 5.0
"""How long the answer of ``possible`` is reused."""

NOTICES_MAX: Final = 32


class KernelSession:
    """``config`` are the kernel's settings, ``user_ns`` its namespace, ``say`` shows one line to
    the user. ``client`` may be called by any thread; one connects, the others wait for it."""

    def __init__(
        self,
        config: Kiwi,
        user_ns: Mapping[str, Any],
        say: Callable[[str], None],
        driver_gate: DriverGate | None = None,
    ) -> None:
        self._config = config
        self._driver_gate = driver_gate if driver_gate is not None else DriverGate()
        self._user_ns = user_ns
        self._say = say
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._pid = os.getpid()
        self._retry_at_s = 0.0
        self._refused = False
        self._possible_until_s = 0.0
        self._said: set[str] = set()
        self._absent = False
        """The last attempt found no daemon at all: the next one costs nothing."""
        self._in_vain: Signs = frozenset()
        """Signs of a daemon that an earlier wait has not found."""
        self._joiner: threading.Thread | None = None
        self._connector: threading.Thread | None = None
        self.wait = ""
        """The reason why ``client`` waits, in words; "" while it does not."""
        self.joined: Callable[[Client], None] = _nothing
        """Called in another thread when a daemon came that no cell had waited for."""
        self.mid_burst: Callable[[], bool] = bool
        """Return whether a cell that was granted the GPU is running."""
        self.suspended: Callable[[], None] = _nothing
        """Called in the reading thread when that cell is suspended."""
        self.unforeseen: Callable[[], None] = _nothing
        """Called in the reading thread when a call waits at the gate although no cell has requested
        the GPU.
        """
        self.lost = False
        """True if the contents of this process's GPU memory are gone for good."""
        self.problem = ""
        """Why there is no connection, in words; "" while there is one or none was tried."""
        self.notices: deque[UserNotice] = deque(maxlen=NOTICES_MAX)
        self._unshown: deque[UserNotice] = deque(maxlen=NOTICES_MAX)
        self._left_out_by: Welcome | None = None
        """The welcome of the daemon that has left this process's GPU memory in system RAM."""

    @property
    def directory(self) -> Path:
        return Path(self._config.socket_dir) if self._config.socket_dir else socket_dir()

    @property
    def connected_client(self) -> Client | None:
        """Return the client, if a connection was made."""
        return self._client

    def possible(self) -> bool:
        """Return whether a daemon is possible at all. Called before every cell; takes
        microseconds.
        """
        if self._client is not None:
            return True
        if self._refused:
            return False
        now_s = time.monotonic()
        if now_s >= self._possible_until_s and (self._may_start() or _signs(self.directory)):
            self._possible_until_s = now_s + LOOK_AGAIN_S
        return now_s < self._possible_until_s

    def _may_start(self) -> bool:
        return self._config.autostart and gpu_possible()

    def client(self, show: Callable[[str], None] | None = None) -> Client | None:
        """Return the connected client; ``None`` if the cell has to run without Kiwi (the reason is
        printed once).

        Blocks while it connects, while a daemon starts, or while an earlier one is expected back.
        ``show`` is then called several times a second with a text about it, which ``wait`` holds,
        too. A client whose daemon is away stays the client and reconnects by itself. Raises
        ``PeerError`` if the daemon is there and has no place for this kernel (``errors.is_full``):
        the cell waits and tries again.
        """
        client = self._client
        if client is not None and self._pid == os.getpid():
            return client
        show = show or _nothing
        while self._lock.locked():  # another thread is connecting
            if self.wait:
                show(self.wait)
            time.sleep(SHOW_EVERY_S)
        with self._lock:
            if self._client is None and not self._refused and self._pid == os.getpid():
                self._try(show)
            return self._client

    def connect_soon(self) -> None:
        """Connect in another thread, if there is a daemon or one can be started."""
        if self._client is None and (self._connector is None or not self._connector.is_alive()):
            self._connector = threading.Thread(
                target=self._connect_quietly, name="kiwi-connect", daemon=True
            )
            self._connector.start()

    def _connect_quietly(self) -> None:
        with suppress(KiwiError):  # printed already, and reported again to the next cell that waits
            self.client()

    def _try(self, show: Callable[[str], None]) -> None:
        again = time.monotonic() < self._retry_at_s
        if again and not self._absent:
            return
        try:
            self._client = self._connect(show)
            self.problem = ""
        except KiwiError as error:
            if again and error.code == "no-daemon":  # it was only looked for
                return
            none = error.code == "no-daemon"
            self._absent = none and not isinstance(error, SilentDaemonError)
            self.problem = str(error)
            if is_full(error):
                self.say_once(f"Kiwi: {error} This cell waits for that; interrupt it to give up.")
                raise
            self._retry_at_s = time.monotonic() + RETRY_S
            self.say_once(f"Kiwi: {error} Until then this notebook runs without Kiwi.")
            if none:
                self._join_later()
        finally:
            self.wait = ""

    def _connect(self, show: Callable[[str], None]) -> Client:
        try:
            return self._connect_to(self._choose())
        except KiwiError as error:
            if error.code != "no-daemon" or time.monotonic() < self._retry_at_s:
                raise
            if (client := self._expect_back(show, error)) is not None:
                return client
            if not self._may_start_here():
                raise
        from kiwi_core.client.autostart import autostart

        began_s = time.monotonic()
        autostart(
            self.directory,
            timeout_s=self._config.autostart_timeout_s,
            waiting=lambda: self._show_wait(show, STARTING, began_s),
        )
        return self._connect_to(self._choose())

    def _may_start_here(self) -> bool:
        from kiwi_core.client.directory import may_start_in

        return self._may_start() and may_start_in(self.directory)

    def _expect_back(self, show: Callable[[str], None], failed: KiwiError) -> Client | None:
        """Wait for a daemon that was here, because it may be restarting now. Code that uses the GPU
        meanwhile would do so without the daemon, or without its emulated driver. Return ``None`` if
        there was no daemon, or it has not come back. Raise ``SilentDaemonError`` if it is there and
        hangs. Do not wait for it a second time.
        """
        from kiwi_core.client.asking import REVIVED_WITHIN_S, await_return

        within_s = self._config.daemon_grace_s
        if self._may_start_here():
            within_s = min(within_s, REVIVED_WITHIN_S)
        began_s = time.monotonic()
        try:
            client = await_return(
                self.directory,
                lambda: self._connect_to(self._choose()),
                failed,
                within_s=within_s,
                waiting=lambda _, there: self._show_wait(show, SILENT if there else AWAY, began_s),
                in_vain=self._in_vain,
            )
        except SilentDaemonError:
            self._in_vain = _signs(self.directory)
            raise
        if client is None:
            self._in_vain = _signs(self.directory)
        return client

    def _show_wait(self, show: Callable[[str], None], words: str, began_s: float) -> None:
        self.wait = f"{words} ({format_duration_s(time.monotonic() - began_s)})"
        show(self.wait)

    def _join_later(self) -> None:
        """Start looking for a daemon, also in the middle of a cell that began without one."""
        if self._joiner is None or not self._joiner.is_alive():
            self._joiner = threading.Thread(target=self._join, name="kiwi-join", daemon=True)
            self._joiner.start()

    def _join(self) -> None:
        while self._is_alone():
            time.sleep(JOIN_EVERY_S)
            with self._lock:
                client = self._join_now() if self._is_alone() and _signs(self.directory) else None
            if client is not None:
                self.joined(client)

    def _is_alone(self) -> bool:
        return self._client is None and not self._refused and self._config.enabled

    def _join_now(self) -> Client | None:
        try:
            self._client = self._connect_to(self._choose())
        except KiwiError as error:
            # A daemon that cannot be reached is reported only once.
            self.problem = str(error)
            return None
        self.problem = ""
        return self._client

    def _connect_to(self, path: Path) -> Client:
        from kiwi_core.client import Client

        client = Client(
            path,
            name=notebook_name(self._user_ns),
            folder=notebook_folder(self._user_ns),
            kernel_id=kernel_id(),
            client="kernel",
            ungated=lambda: self._driver_gate.why,
            on_notice=self._noticed,
            on_unforeseen=lambda: self.unforeseen(),
            on_state=lambda connected: None if connected else self._daemon_away(path),
            daemon_grace_s=self._config.daemon_grace_s,
        )
        try:
            welcome = client.connect()
            _show_only(welcome)
            if welcome.emulation is not None:
                self._emulate(welcome.emulation)
            if why := self._driver_gate.why:
                self.say_once(f"Kiwi: {why} {UNGUARDED}")
        except BaseException:
            client.close()
            raise
        return client

    def _daemon_away(self, path: Path) -> None:
        """Handle the loss of the daemon, in the reading thread. A daemon that ends removes its
        socket; one that was killed leaves it. If nobody restarts a killed daemon, and this user's
        daemons are started by kernels, this kernel restarts it, because its own memory may be paged
        out.
        """
        if self._may_start() and self._pid == os.getpid() and _is_own(self.directory):
            threading.Thread(
                target=self._revive, args=(path,), name="kiwi-revive", daemon=True
            ).start()

    def _revive(self, path: Path) -> None:
        from kiwi_core.client.asking import REVIVED_WITHIN_S
        from kiwi_core.client.autostart import autostart

        time.sleep(REVIVED_WITHIN_S)
        client = self._client
        if client is None or client.connected or not path.exists():
            return
        try:
            autostart(self.directory, timeout_s=self._config.autostart_timeout_s)
        except KiwiError as error:
            self.say_once(f"Kiwi: the daemon is gone and cannot be started again: {error}")

    def _choose(self) -> Path:
        """Return the socket to connect to: of the GPU that the user named, else of this process's
        first GPU.
        """
        from kiwi_core.client import discover, own_gpus

        if named := self._config.named_gpu():
            sockets = discover(self.directory, named)
        else:
            sockets = own_gpus.own_sockets(self.directory)
        if not sockets:
            raise own_gpus.no_daemon(self.directory, named)
        return sockets[0]

    def _emulate(self, emulation: Emulation) -> None:
        """Use the daemon's emulated driver, if no other one is loaded yet. A kernel that was
        started where it is found by name reaches it as it would a real one: nothing is loaded.
        """
        from kiwi_core.client.connection import loaded_cuda_library

        loaded = loaded_cuda_library()
        if loaded and not _same_file(loaded, emulation.libcuda):
            self._refused = True
            raise CallerError(
                "mixed-drivers",
                f"This kernel has loaded the CUDA driver {loaded}, but the daemon emulates GPUs:"
                " the two cannot be mixed.",
                "Restart the kernel, or stop the emulating daemon.",
            )
        from kiwi_core import emulator

        os.environ.update(emulation.env)
        # Children (`!python train.py`) load it by name.
        os.environ["LD_LIBRARY_PATH"] = emulator.library_path(
            emulation.libcuda, emulation.libnvml, before=os.environ.get("LD_LIBRARY_PATH", "")
        )
        try:
            if not _same_file(self._driver_gate.real, emulation.libcuda):
                gated = self._driver_gate.before_driver(emulation.libcuda)
                emulator.load(None if gated else emulation.libcuda, emulation.libnvml)
        except OSError as error:
            raise CallerError(
                "no-emulator",
                f"The emulated driver could not be loaded: {error}.",
                "Restart the daemon; `kiwi doctor` says what this machine lacks.",
            ) from error

    def look(self) -> GpuStatus:
        """Return the GPU's status, for a kernel that has no session. Raises ``KiwiError``."""
        from kiwi_core.client import Client
        from kiwi_core.wire.messages import Role

        path = self._choose()
        with Client(path, role=Role.OBSERVER, client="kernel", reconnect=False) as observer:
            observer.connect()
            return observer.status()

    # --- words to the user

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _noticed(self, notice: UserNotice) -> None:
        """Keep a notice for a cell to show; called in the reading thread. During a burst, show it
        at once, because that cell may block in a driver call, perhaps for ever. Do the same if the
        kernel may be ended before there is another cell.
        """
        self.notices.append(notice)
        if notice.text.startswith(DAEMON_ENDED):
            self._left_out_by = self._client.welcome if self._client is not None else None
        self.lost = self.lost or notice.notice is Notice.LOST
        if notice.notice in (Notice.SUSPENDED, Notice.KEPT_OUT):
            self.suspended()
        if notice.notice in SHOWN_NOTICES:
            self._unshown.append(notice)
            if self.mid_burst() or notice.notice in SHOWN_AT_ONCE:
                self.show_notices()

    def show_notices(self) -> None:
        """Print the notices into the output of this thread's cell, or of the last cell."""
        with suppress(IndexError):  # two threads may do this at once
            while True:
                self._say(told(self._unshown.popleft()))

    def failed(self, error: KiwiError) -> None:
        """Tell the user that a wait failed for good and the cell runs without Kiwi. If a daemon has
        left its memory in system RAM, its user has been told what its calls wait for."""
        if not (error.code == "no-daemon" and self._left_out()):
            self._say(f"Kiwi: {error} This cell runs without waiting for the GPU.")

    def _left_out(self) -> bool:
        """Return whether no daemon has come since one left this memory in system RAM."""
        client = self._client
        return client is not None and client.welcome is self._left_out_by is not None

    # --- the end

    def leave(self, timeout_s: float) -> None:
        """Bring all memory back and leave Kiwi (``%kiwi off``). Raise ``KiwiError`` on a
        time-out.
        """
        client, self._client = self._client, None
        self._retry_at_s = 0.0
        if client is not None:
            client.goodbye(timeout_s)

    def forget_after_fork(self) -> None:
        """Forget lease and connection in a forked child: they are the parent's."""
        self._refused = True
        self._client = None
        self._lock = threading.Lock()


def _signs(directory: Path) -> Signs:
    from kiwi_core.client.directory import signs_of_a_daemon

    return signs_of_a_daemon(directory)


def _nothing(*_: object) -> None:
    pass


def _is_own(directory: Path) -> bool:
    try:
        return os.stat(directory).st_uid == os.getuid()
    except OSError:
        return False


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _show_only(welcome: Welcome) -> None:
    """Let CUDA see only the GPU that this kernel shares, since it would use the first one. Do
    nothing if the user has set the variable to several GPUs or to none, or if CUDA is loaded: it
    has read the variable then."""
    from kiwi_core.client.connection import loaded_cuda_library
    from kiwi_core.client.own_gpus import ENV_VISIBLE, only_visible

    theirs = ENV_VISIBLE in os.environ and not only_visible(os.environ)
    if not theirs and not loaded_cuda_library():
        os.environ[ENV_VISIBLE] = welcome.gpu_uuid


def say_on_stderr(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr)  # noqa: T201 - the user's own screen
