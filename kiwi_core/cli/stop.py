"""``kiwi stop``: end the daemons of a directory, and keep notebooks from starting them again."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import (
    CONNECT_TIMEOUT_S,
    add_gpu,
    add_socket_dir,
    directory_of,
    find_sockets,
    warn,
)
from kiwi_core.client.autostart import STOPPED_NAME
from kiwi_core.client.directory import may_start_in, peer_of
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.gpu import processes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DESCRIPTION = (
    "Ends the daemons. Suspended notebooks are brought back first, and go on without Kiwi."
)
EPILOG = """\
examples:
  kiwi stop                  all daemons here; notebooks do not start them again
  kiwi stop --gpu 1          the daemon of one GPU; the others stay
  kiwi stop --undo           notebooks may start daemons again

kiwi daemon starts them again, too. One of systemd's is ended with: systemctl stop kiwi
"""

_PATIENCE_S: Final = 5.0
"""Time between two lines that say what the command waits for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--undo", action="store_true", help="let notebooks start daemons again; ends nothing"
    )
    add_gpu(parser, "only the daemon of this GPU")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    mark = directory / STOPPED_NAME
    if args.undo:
        mark.unlink(missing_ok=True)
        return exits.OK
    if args.gpu is None and may_start_in(directory):
        _put(mark)
    try:
        sockets = find_sockets(directory, args.gpu)
    except PeerError as error:
        if not mark.exists():
            raise
        print(f"{error.message} Notebooks start none until: kiwi stop --undo")
        return exits.OK
    return max(map(_end, sockets))


def _put(mark: Path) -> None:
    """Write the mark before the daemons end: a notebook that notices their end must find it."""
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileNotFoundError:
        pass  # no directory, so no daemon: the caller says so next
    except OSError as error:
        raise CallerError(
            "not-written",
            f"{mark} cannot be written ({error.strerror}), so notebooks would start it again.",
            "Check the permissions of the directory, and that the disk is not full.",
        ) from error


def _end(path: Path) -> int:
    """End a daemon, print what happened, and return an exit code."""
    gpu = path.stem
    try:
        ref = _listener(path)
        if ref is None:
            print(f"{gpu}: was not running (a crash has left its socket)")
            return exits.OK
        if unit := _unit(ref.pid):
            raise CallerError(
                "systemd", f"It is a service of systemd ({unit}).", f"systemctl stop {unit}"
            )
        _end_process(ref, gpu)
    except KiwiError as error:
        warn(f"{gpu}: {error.message}", error.remedy)
        return exits.FAILED
    print(f"{gpu}: stopped")
    return exits.OK


def _listener(path: Path) -> processes.ProcessRef | None:
    """Return the process that listens at ``path``; ``None``: nobody, the socket is from a crash."""
    with closing(socket.socket(socket.AF_UNIX)) as asker:
        asker.settimeout(CONNECT_TIMEOUT_S)
        try:
            asker.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise PeerError(
                "no-answer", f"The daemon cannot be asked ({error}).", "See kiwi doctor."
            ) from error
        pid, _uid = peer_of(asker)
    if pid == 0:
        raise CallerError(
            "elsewhere", "Its daemon runs in another container.", "Run kiwi stop in that one."
        )
    return processes.ref_of(pid)


def _unit(pid: int) -> str:
    """Return the systemd unit of Kiwi that ``pid`` belongs to, or "". A unit would restart it."""
    with suppress(OSError), open(f"/proc/{pid}/cgroup") as file:
        for word in file.read().replace("\n", "/").split("/"):
            if word.startswith("kiwi") and word.endswith(".service"):
                return word
    return ""


def _end_process(ref: processes.ProcessRef, gpu: str) -> None:
    descriptor = processes.open_pidfd(ref)
    if descriptor is None:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        began_s = time.monotonic()
        while not select.select([descriptor], [], [], _PATIENCE_S)[0]:
            spent_s = time.monotonic() - began_s
            print(
                f"{gpu}: is bringing back the notebooks that it had suspended ({spent_s:.0f} s)",
                flush=True,
            )
    except PermissionError:
        raise CallerError(
            "not-yours",
            f"Its daemon (process {ref.pid}) belongs to another user.",
            "Ask who administers this machine, or become that user (sudo).",
        ) from None
    finally:
        os.close(descriptor)
