"""What several commands share: the options that name daemons, and the requests to them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.client.directory import why_no_sockets, why_stopped
from kiwi_core.errors import CallerError, KiwiError, PeerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus, SessionStatus

CONNECT_TIMEOUT_S: Final = 5.0
"""A daemon that works answers in milliseconds; after this long the command says that it hangs."""


def add_socket_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket-dir",
        metavar="DIR",
        type=Path,
        help="where the daemons' sockets are (default: see kiwi --help)",
    )


def add_gpu(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help=f"{what}: its index, its UUID, or the beginning of its UUID",
    )


def for_others_to_read(path: str, flags: int) -> int:
    """Open a file that the user named (an ``opener``): others may read but not write a new one,
    even if the umask allows it."""
    return os.open(path, flags, 0o644)


def not_written(name: str, error: OSError) -> CallerError:
    return CallerError(
        "not-written",
        f"{name} cannot be written: {error.strerror}.",
        "Name a file in a directory that exists and that you may write to.",
    )


def directory_of(args: argparse.Namespace) -> Path:
    named: Path | None = args.socket_dir
    return named if named is not None else config.socket_dir()


def find_sockets(directory: Path, gpu: str | None) -> list[Path]:
    """Return the sockets of ``directory``'s daemons (of one GPU). Raises ``PeerError`` for none."""
    from kiwi_core.client import discover

    found = discover(directory, gpu)
    if not found:
        raise no_daemon(directory, gpu)
    return found


def no_daemon(directory: Path, gpu: str | None = None) -> PeerError:
    if (stopped := why_stopped(directory)) is not None:
        return stopped
    which = f" for GPU {gpu}" if gpu else ""
    why = why_no_sockets(directory)
    return PeerError(
        "no-daemon",
        f"No Kiwi daemon{which} is running here (looked in {directory}).{why}",
        "Start one with: kiwi daemon   (without a GPU: kiwi daemon --emulate 1x512MiB). "
        "If one runs elsewhere, name its directory with --socket-dir.",
    )


def observer(socket: Path) -> Client:
    """Return a client that never holds the GPU. The caller connects and closes it."""
    from kiwi_core.client import Client
    from kiwi_core.wire.messages import Role

    return Client(
        socket,
        role=Role.OBSERVER,
        client="kiwi",
        reconnect=False,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )


@dataclass(frozen=True)
class DaemonAnswer:
    """One daemon's status, or why there is none."""

    socket: Path
    status: GpuStatus | None
    error: KiwiError | None = None


def ask_all(sockets: Sequence[Path]) -> Iterator[DaemonAnswer]:
    """Yield each daemon's status, one after the other."""
    for socket in sockets:
        client = observer(socket)
        try:
            client.connect()
            yield DaemonAnswer(socket, client.status(CONNECT_TIMEOUT_S))
        except KiwiError as error:
            yield DaemonAnswer(socket, None, error)
        finally:
            client.close()


@dataclass(frozen=True)
class Sessions:
    """The sessions of all daemons that were asked. ``complete``: each one has answered."""

    there: list[tuple[Path, SessionStatus]]
    complete: bool

    def find(self, wanted: str) -> tuple[Path, SessionStatus]:
        """Return the session that a user means: the one with that id, else the only one with that
        name, the folders before it left out or not. Raises ``CallerError``."""
        found = [(socket, one) for socket, one in self.there if one.id == wanted]
        if found:
            return found[0]
        if not self.complete:
            raise CallerError(
                "not-asked",
                "A daemon did not answer, so nobody knows which session that is.",
                "Name it by its id, or its GPU with --gpu.",
            )
        found = [
            (socket, one)
            for socket, one in self.there
            if wanted in (one.name, one.name.rpartition("/")[2])
        ]
        if len(found) > 1:
            ids = ", ".join(f"{one.id} ({one.owner}, process {one.pid})" for _, one in found)
            raise CallerError(
                "several-sessions", f"Several sessions are called that: {ids}.", "Name its id."
            )
        if not found:
            raise CallerError(
                "no-such-session",
                f"No GPU has a session {wanted!r}.",
                "`kiwi status` lists their names, `kiwi status --json` their ids, too.",
            )
        return found[0]


def sessions_of(sockets: Sequence[Path]) -> Sessions:
    """Ask each daemon for its sessions; warn of one that does not answer."""
    there: list[tuple[Path, SessionStatus]] = []
    complete = True
    for answer in ask_all(sockets):
        if answer.status is None:
            complete = False
            assert answer.error is not None
            warn(f"{answer.socket.stem}: {answer.error.message}", answer.error.remedy)
        else:
            there += [(answer.socket, one) for one in answer.status.sessions]
    return Sessions(there, complete)


def warn(text: str, remedy: str = "") -> None:
    """Print a warning that does not stop the command on standard error."""
    print(f"kiwi: {text}", file=sys.stderr)
    if remedy:
        print(f"      {remedy}", file=sys.stderr)
