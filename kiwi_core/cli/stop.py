"""``kiwi stop``: end the daemons of a directory, and keep notebooks from starting them again."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import (
    add_gpu,
    add_socket_dir,
    ask_all,
    directory_of,
    find_sockets,
    warn,
)
from kiwi_core.cli.listening import listener, service_of
from kiwi_core.client.directory import LEFT_SUFFIX, STOPPED_NAME, may_start_in
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.gpu import processes
from kiwi_core.states import SessionState
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from kiwi_core.wire.messages import SessionStatus

DESCRIPTION = (
    "Ends the daemons. What is paged out is brought back first, and goes on without Kiwi. If "
    "there is no room for all of it, nothing is ended: the command says for whom, and what to do."
)
EPILOG = """\
examples:
  kiwi stop                  all daemons here; notebooks do not start them again
  kiwi stop --gpu 1          the daemon of one GPU; the others stay
  kiwi stop --wait           as soon as there is room for everybody on the GPU
  kiwi stop --leave          now; memory without room stays in system RAM, and nothing is lost
  kiwi stop --undo           notebooks may start daemons again

exit code: 0 all ended, and everything is back (or left, as asked); 1 otherwise

kiwi daemon starts them again, too. One of systemd's is ended with: systemctl stop kiwi
"""

_PATIENCE_S: Final = 5.0
"""Time between two lines that say what the command waits for."""

_LOOK_EVERY_S: Final = 0.5
"""Interval of questions whether there is room by now."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--undo", action="store_true", help="let notebooks start daemons again; ends nothing"
    )
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--wait", action="store_true", help="end them when there is room for what is paged out"
    )
    room.add_argument(
        "--leave", action="store_true", help="leave memory in system RAM for which there is no room"
    )
    add_gpu(parser, "only the daemon of this GPU")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    mark = directory / STOPPED_NAME
    if args.undo:
        mark.unlink(missing_ok=True)
        return exits.OK
    marks = args.gpu is None and may_start_in(directory)
    try:
        sockets = find_sockets(directory, args.gpu)
    except PeerError as error:
        if marks:
            _put(mark)
        if not mark.exists():
            raise
        print(f"{error.message} Notebooks start none until: kiwi stop --undo")
        return exits.OK
    refused = [path for path in sockets if not (args.leave or _has_room(path, waits=args.wait))]
    if refused:
        return exits.FAILED
    if marks:
        _put(mark)
    return max(_end(path, leaves=args.leave) for path in sockets)


# --- whether everybody can come back ------------------------------------------------------------


def _has_room(path: Path, *, waits: bool) -> bool:
    """Return whether all that a daemon has paged out fits beside what is in its GPU; say what does
    not. ``waits``: until it does."""
    said_s = -_PATIENCE_S
    while stay := _cannot_come_back(path):
        if not waits:
            _refuse(path.stem, stay)
            return False
        if time.monotonic() - said_s >= _PATIENCE_S:
            said_s = time.monotonic()
            print(f"{path.stem}: waits until there is room for {_named(stay)}", flush=True)
        time.sleep(_LOOK_EVERY_S)
    return True


def _cannot_come_back(path: Path) -> list[SessionStatus]:
    """Return the sessions whose memory has no room in the GPU, running ones last. A daemon that
    does not answer is asked nothing: see ``_end``."""
    (answer,) = ask_all([path])
    if answer.status is None:
        return []
    free_bytes = answer.status.memory.free_bytes
    stay = []
    out = [one for one in answer.status.sessions if one.paged_out_bytes > 0]
    for session in sorted(out, key=lambda one: one.state is not SessionState.SUSPENDED):
        if session.paged_out_bytes <= free_bytes:
            free_bytes -= session.paged_out_bytes
        else:
            stay.append(session)
    return stay


def _named(sessions: Sequence[SessionStatus]) -> str:
    return ", ".join(f"{one.name} ({format_bytes(one.paged_out_bytes)})" for one in sessions)


def _refuse(gpu: str, stay: Sequence[SessionStatus]) -> None:
    warn(
        f"{gpu}: not stopped. The GPU has no room for what is paged out of {_named(stay)}.",
        "End another notebook (or let `kiwi stop --wait` wait for that). Or leave it in system RAM "
        "with `kiwi stop --leave`: nothing is lost, and its calls to the GPU wait until there is "
        "room, or a daemon runs again.",
    )


# --- the end ------------------------------------------------------------------------------------


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


def _end(path: Path, *, leaves: bool) -> int:
    """End a daemon, print what happened, and return an exit code."""
    gpu = path.stem
    try:
        ref = listener(path)
        if ref is None:
            print(f"{gpu}: was not running (a crash has left its socket)")
            return exits.OK
        if unit := service_of(ref.pid):
            raise CallerError(
                "systemd", f"It is a service of systemd ({unit}).", f"systemctl stop {unit}"
            )
        _end_process(ref, gpu)
    except KiwiError as error:
        warn(f"{gpu}: {error.message}", error.remedy)
        return exits.FAILED
    left = _left_behind(path)
    print(f"{gpu}: stopped" + (", and left in system RAM: " if left else "") + "; ".join(left))
    return exits.OK if leaves or not left else exits.FAILED


def _left_behind(path: Path) -> list[str]:
    """Return what the daemon at ``path`` has written of memory that it could not bring back."""
    try:
        return path.with_suffix(LEFT_SUFFIX).read_text().splitlines()
    except OSError:
        return []


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
