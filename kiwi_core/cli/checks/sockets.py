"""Checks of the socket directory, and of the daemons that answer in it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Final

from kiwi_core import __version__
from kiwi_core.cli.checks.finding import Finding, fail, ok, warn
from kiwi_core.cli.common import CONNECT_TIMEOUT_S, observer
from kiwi_core.client.directory import why_unsafe
from kiwi_core.daemon.base.sockets import NO_LOCKS_REMEDY, SOCKET_PATH_MAX
from kiwi_core.errors import KiwiError
from kiwi_core.units import format_bytes
from kiwi_core.wire.words import LEFT_REMEDY, outside_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus, Welcome

A_SOCKET: Final = "GPU-00000000-0000-0000-0000-000000000000.sock"
"""A name as long as any, because the GPU's UUID names a socket."""


def check(path: Path) -> Iterator[Finding]:
    yield from directory(path)
    yield from daemons(path)


def directory(path: Path) -> Iterator[Finding]:
    longest = len(os.fsencode((path / A_SOCKET).absolute()))
    if longest > SOCKET_PATH_MAX:
        yield fail(
            "sockets",
            f"The path {path} is too long: with a socket's name it has {longest} bytes, and Linux "
            f"takes {SOCKET_PATH_MAX}.",
            "Set KIWI_SOCKET_DIR to a shorter path.",
        )
    try:
        info = path.lstat()
    except FileNotFoundError:
        yield ok("sockets", f"{path} (does not exist yet; the first daemon creates it)")
        return
    except OSError as error:
        yield fail("sockets", f"{path} cannot be read: {error.strerror}.", "Mend its permissions.")
        return
    yield ownership(path, info)
    yield from locks(path)


def locks(path: Path) -> Iterator[Finding]:
    """Check that files there can be locked; nothing of the try is left. Where this user may not
    write, no daemon of theirs will."""
    if not os.access(path, os.W_OK | os.X_OK):
        return
    try:
        with TemporaryFile(dir=path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            text = f"Files in {path} cannot be locked ({error.strerror}): no daemon starts there."
            yield fail("sockets", text, NO_LOCKS_REMEDY)
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"No file can be made in {path}: {error.strerror}."
            yield fail("sockets", text, "Make room there, or set KIWI_SOCKET_DIR to another place.")
        elif error.errno == errno.EROFS:
            text = f"{path} is on a file system that is mounted read-only."
            yield fail("sockets", text, "Set KIWI_SOCKET_DIR to a directory that can be written.")
        else:
            text = f"No file can be made in {path}: {error.strerror}."
            yield fail("sockets", text, "Set KIWI_SOCKET_DIR to another directory of your own.")


def ownership(path: Path, info: os.stat_result) -> Finding:
    """Check whether others could pose as a daemon there."""
    if why := why_unsafe(path):
        return fail(
            "sockets",
            f"{path} {why}: others could pose as a daemon, so no program of yours uses it.",
            f"Set KIWI_SOCKET_DIR to a directory of your own, or run `chmod go-w {path}` if this "
            "one is.",
        )
    return ok("sockets", f"{path} (mode {stat.S_IMODE(info.st_mode):o})")


def daemons(path: Path) -> Iterator[Finding]:
    from kiwi_core.client import discover

    try:
        found = discover(path, None)
    except KiwiError as error:
        yield fail("daemon", error.message, error.remedy)
        return
    if not found:
        yield ok("daemon", "none is running (a notebook that uses a GPU starts one by itself)")
    for socket in found:
        yield from daemon(socket)


def daemon(socket: Path) -> Iterator[Finding]:
    client = observer(socket)
    try:
        welcome = client.connect()
        status = client.status(CONNECT_TIMEOUT_S)
    except KiwiError as error:
        yield fail(
            "daemon",
            f"The daemon at {socket} does not answer: {error.message}",
            error.remedy or "Restart it: stop that kiwi daemon and start it again.",
        )
        return
    finally:
        client.close()
    yield version(welcome, status)
    for text in status.errors:
        yield warn("daemon", text, "See the daemon's log.")
    for one in status.outside:
        if one.left:
            held = format_bytes(one.used_bytes)
            yield warn(
                f"GPU {status.index}", f"{held} are held by {outside_text(one)}.", LEFT_REMEDY
            )


def version(welcome: Welcome, status: GpuStatus) -> Finding:
    emulated = ", EMULATED" if status.emulated else ""
    text = f"GPU {status.index} ({status.name}, {format_bytes(status.memory.total_bytes)}"
    text += f"{emulated}): pid {status.daemon_pid}, protocol {welcome.protocol}"
    if status.daemon_version and status.daemon_version != __version__:
        return warn(
            "daemon",
            f"{text}, version {status.daemon_version} while this is {__version__}.",
            "It works, but restart the daemon to get this version.",
        )
    return ok("daemon", f"{text}, version {__version__}")
