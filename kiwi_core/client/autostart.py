"""Start ``kiwi daemon`` for the user where none runs.

Only one process starts it, however many notebooks open at once: a lock in the socket directory
decides which. The others wait and then connect.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core import interpreter
from kiwi_core.client.asking import ReportingPatience, answers
from kiwi_core.client.directory import why_stopped, why_unsafe
from kiwi_core.client.discovery import discover
from kiwi_core.config import DEFAULTS, ENV_DAEMON_ARGS
from kiwi_core.errors import CallerError, PeerError, SilentDaemonError
from kiwi_core.units import ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LOG_NAME: Final = "daemon.log"
"""File in the socket directory with the output of a daemon that was started here."""

START_TIMEOUT_S: Final = 60.0
"""The first use compiles the emulated driver, which takes half a minute on a slow machine."""

_LOOK_EVERY_S: Final = 0.05
_ASK_TIMEOUT_S: Final = 2.0
"""How long one daemon of several is asked before the next one. One that does not answer is asked
again, as long as there is time."""
_LOG_MAX_BYTES: Final = 1 << 20
"""The next start empties a log that is longer than this."""
_LOG_LINES: Final = 10
"""Lines of the log that an error shows."""


def autostart(
    socket_dir: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    command: Sequence[str] | None = None,
    waiting: Callable[[], None] | None = None,
) -> list[Path]:
    """Return the sockets in ``socket_dir``; start a daemon first if there is none. One that is
    there and does not answer is waited for: another one could not start beside it.

    Kernels and ``kiwi run`` call this, in any thread. ``env`` is the daemon's environment (with
    ``KIWI_DAEMON_ARGS``), ``command`` another program than ``kiwi daemon``. ``waiting`` is called
    several times a second while this waits.

    Raises ``CallerError`` ("unsafe-directory": another user could have put sockets there) and
    ``PeerError`` "no-daemon" with the last lines of the daemon's log, or ``SilentDaemonError``. A
    daemon that is only slow goes on starting.
    """
    env = dict(os.environ if env is None else env)
    socket_dir = Path(os.path.abspath(socket_dir))  # a daemon runs in another directory
    make_private(socket_dir)
    until_s = time.monotonic() + timeout_s
    look = _Look(socket_dir, until_s, waiting)
    lock = os.open(
        socket_dir / "start.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        ticks = _ticks(until_s, waiting)
        while not _locked(lock):
            if next(ticks, None) is None:
                raise _failed(socket_dir, "somebody else has been starting it for too long", "")
        if found := look.answering():
            return found
        if (stopped := why_stopped(socket_dir)) is not None:
            raise stopped
        return _start(look, env, ticks, command)
    finally:
        os.close(lock)


def make_private(directory: Path) -> None:
    """Make ``directory`` for this user alone, or check the existing one. Raises ``CallerError``
    "unsafe-directory"."""
    try:
        for path in reversed(directory.parents):
            if not path.exists():
                path.mkdir(mode=0o755, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        raise _unsafe(directory, f"cannot be made: {error.strerror}") from error
    why = why_unsafe(directory)
    if why or found.st_uid != os.getuid():
        raise _unsafe(directory, why or "belongs to another user")


def _unsafe(directory: Path, why: str) -> CallerError:
    return CallerError(
        "unsafe-directory",
        f"No Kiwi daemon can be started in {directory}: it {why}.",
        "Name a directory of your own in KIWI_SOCKET_DIR, or ask who administers this machine"
        " to start the daemon.",
    )


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass
class _Look:
    """A look for daemons in ``socket_dir`` until ``until_s``; ``waiting`` as in ``autostart``."""

    socket_dir: Path
    until_s: float
    waiting: Callable[[], None] | None

    def answering(self) -> list[Path]:
        """Return all sockets once a daemon answers; none if no daemon is there (one that crashed
        leaves its socket). Raises ``SilentDaemonError`` if one is there and does not answer."""
        while True:
            sockets, silent = discover(self.socket_dir), None
            for path in sockets:
                try:
                    if answers(path, ReportingPatience(_ASK_TIMEOUT_S, self._tell)):
                        return sockets
                except SilentDaemonError as error:
                    silent = error
            if silent is None:
                return []
            if time.monotonic() >= self.until_s:
                raise silent

    def _tell(self, _spent_s: float) -> None:
        if self.waiting is not None:
            self.waiting()


def _start(
    look: _Look, env: dict[str, str], ticks: Iterator[int], command: Sequence[str] | None
) -> list[Path]:
    socket_dir = look.socket_dir
    launcher = interpreter.bare(Path(__file__).with_name("launch.py"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(socket_dir / LOG_NAME, flags, 0o600)
    if os.fstat(log).st_size > _LOG_MAX_BYTES:
        os.ftruncate(log, 0)
    began_at = os.fstat(log).st_size
    # One notebook's choice of GPUs is left out, because the daemon serves the whole machine.
    env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        starter = subprocess.Popen(
            [*launcher, *(command or _daemon_command(socket_dir, env))],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
            cwd=interpreter.DIRECTORY,
        )
    finally:
        os.close(log)
    with starter:  # closes its standard input at the end, which lets the launcher end
        for _ in ticks:
            # Before the look: it also ends when it finds a daemon that runs already, and that one
            # may answer between the look and the end.
            ended = starter.poll()
            if sockets := look.answering():
                return sockets
            if ended is not None:
                why = f"it ended at once with status {ended}"
                raise _failed(socket_dir, why, _tail(socket_dir, began_at))
    raise _failed(socket_dir, "it takes too long", _tail(socket_dir, began_at))


def _ticks(until_s: float, waiting: Callable[[], None] | None) -> Iterator[int]:
    for tick in count():
        if time.monotonic() >= until_s:
            return
        yield tick
        if waiting is not None:
            waiting()
        time.sleep(_LOOK_EVERY_S)


def _daemon_command(socket_dir: Path, env: Mapping[str, str]) -> list[str]:
    try:
        more = shlex.split(env.get(ENV_DAEMON_ARGS, ""))
    except ValueError as error:
        raise CallerError(
            "bad-setting",
            f"{ENV_DAEMON_ARGS} cannot be read: {error}.",
            "Write it as in a shell.",
        ) from error
    unused_s = ns_to_seconds(DEFAULTS.unused_ns)
    own = ["--socket-dir", str(socket_dir), "--end-unused-after", f"{unused_s:g}"]
    return interpreter.module("kiwi_core.cli", "daemon", *own, *more)


def _tail(socket_dir: Path, began_at: int) -> str:
    with open(socket_dir / LOG_NAME, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(began_at, size - 16_384))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])


def _failed(socket_dir: Path, why: str, said: str) -> PeerError:
    words = f" It said:\n{said}\n" if said else ""
    return PeerError(
        "no-daemon",
        f"The Kiwi daemon could not be started: {why}.{words}",
        f"Its log is {socket_dir / LOG_NAME}; try `kiwi doctor`, or `kiwi daemon` by hand.",
    )
