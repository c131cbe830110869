"""What several commands share: the options that name daemons, and asking those daemons."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.client.directory import why_no_sockets
from kiwi_core.errors import KiwiError, PeerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus

CONNECT_TIMEOUT_S: Final = 5.0
"""A living daemon answers in milliseconds; past this it hangs and the command says so."""


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
    """An ``opener`` for files that people name: nobody else may write to a new one, whatever the
    umask says."""
    return os.open(path, flags, 0o644)


def directory_of(args: argparse.Namespace) -> Path:
    named: Path | None = args.socket_dir
    return named if named is not None else config.socket_dir()


def find_sockets(directory: Path, gpu: str | None) -> list[Path]:
    """The sockets of ``directory``'s daemons (of one GPU); a sentence if there is none."""
    from kiwi_core.client import discover

    found = discover(directory, gpu)
    if not found:
        raise no_daemon(directory, gpu)
    return found


def no_daemon(directory: Path, gpu: str | None = None) -> PeerError:
    which = f" for GPU {gpu}" if gpu else ""
    why = why_no_sockets(directory)
    return PeerError(
        "no-daemon",
        f"No Kiwi daemon{which} is running here (looked in {directory}).{why}",
        "Start one with: kiwi daemon   (without a GPU: kiwi daemon --emulate 1x512MiB). "
        "If one runs elsewhere, name its directory with --socket-dir.",
    )


def observer(socket: Path) -> Client:
    """A connection that only looks and steers; the caller connects and closes it."""
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
class Answer:
    """One daemon's status, or why there is none."""

    socket: Path
    status: GpuStatus | None
    error: KiwiError | None = None


def ask_all(sockets: Sequence[Path]) -> Iterator[Answer]:
    """Each daemon's status, one after the other."""
    for socket in sockets:
        client = observer(socket)
        try:
            client.connect()
            yield Answer(socket, client.status(CONNECT_TIMEOUT_S))
        except KiwiError as error:
            yield Answer(socket, None, error)
        finally:
            client.close()


def warn(text: str, remedy: str = "") -> None:
    """Something that does not stop the command, on standard error."""
    print(f"kiwi: {text}", file=sys.stderr)
    if remedy:
        print(f"      {remedy}", file=sys.stderr)
