"""``kiwi stop``: end the daemons of a directory, and keep notebooks from starting them again."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
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
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.gpu import processes
from kiwi_core.states import MovedBy, SessionState
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

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

_MARGIN_BYTES: Final = DEFAULTS.restore_margin_fixed_bytes
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
        try:
            mark.unlink(missing_ok=True)
        except OSError as error:
            raise CallerError(
                "not-written",
                f"{mark} cannot be removed ({error.strerror}).",
                "Ask who administers this machine.",
            ) from error
        return exits.OK
    marks = args.gpu is None and may_start_in(directory)
    try:
        sockets = find_sockets(directory, args.gpu)
    except PeerError as error:
        if marks:
            _put(mark)
        if not os.path.exists(mark):
            raise
        print(f"{error.message} Notebooks start none until: kiwi stop --undo")
        return exits.OK
    found = {path: _target(path) for path in sockets}
    code = exits.FAILED if _Refused in map(type, found.values()) else exits.OK
    targets = {path: one for path, one in found.items() if not isinstance(one, _Refused)}
    living = [path for path, ref in targets.items() if ref is not None]
    if not (args.leave or _have_room(living, waits=args.wait)):
        return exits.FAILED
    if marks and targets:
        _put(mark)
    ended = [_end(path, ref, leaves=args.leave) for path, ref in targets.items()]
    return max([code, *ended])


class _Refused:
    """A daemon that this command may not end; it was said why."""


def _target(path: Path) -> processes.ProcessRef | _Refused | None:
    """Return the process to end; ``None``: there is none any more."""
    try:
        ref = listener(path)
        if ref is not None:
            _check(ref)
    except KiwiError as error:
        warn(f"{path.stem}: {error.message}", error.remedy)
        return _Refused()
    return ref


def _check(ref: processes.ProcessRef) -> None:
    if unit := service_of(ref.pid):
        raise CallerError(
            "systemd", f"It is a service of systemd ({unit}).", f"systemctl stop {unit}"
        )
    try:
        os.kill(ref.pid, 0)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise _not_yours(ref) from None


def _not_yours(ref: processes.ProcessRef) -> CallerError:
    return CallerError(
        "not-yours",
        f"Its daemon (process {ref.pid}) belongs to another user.",
        "Ask who administers this machine, or become that user (sudo).",
    )


# --- whether everybody can come back ------------------------------------------------------------


def _have_room(paths: Sequence[Path], *, waits: bool) -> bool:
    """Return whether all that the daemons have paged out fits beside what is in their GPUs; say
    what does not. ``waits``: until it does, everywhere at the same time."""
    said_s = -_PATIENCE_S
    while obstacles := {path: why for path in paths if (why := _obstacle(path))}:
        if not waits:
            for path, why in obstacles.items():
                _refuse(path.stem, why)
            return False
        if time.monotonic() - said_s >= _PATIENCE_S:
            said_s = time.monotonic()
            for path, why in obstacles.items():
                print(f"{path.stem}: waits. {why}", flush=True)
        time.sleep(_LOOK_EVERY_S)
    return True


def _obstacle(path: Path) -> str:
    """Return why not everybody of a daemon can come back, as a sentence; "": everybody can."""
    (answer,) = ask_all([path])
    if answer.status is None:
        if listener(path) is None:
            return ""  # it has just ended
        return "It does not answer, so nobody knows who could come back."
    stay = _without_room(answer.status)
    held = [one for one in answer.status.sessions if one.paged_out_bytes > 0 and one.stopped]
    if held:
        return f"{_named(held)} cannot come back while the program is stopped."
    return f"The GPU has no room for what is paged out of {_named(stay)}." if stay else ""


def _without_room(status: GpuStatus) -> list[SessionStatus]:
    """Return the sessions whose memory has no room in the GPU; suspended ones come back first."""
    free_bytes, stay = status.memory.free_bytes, []
    others_bytes = status.memory.outside_bytes + sum(one.resident_bytes for one in status.sessions)
    out = [one for one in status.sessions if one.paged_out_bytes > 0]
    for session in sorted(out, key=lambda one: one.state is not SessionState.SUSPENDED):
        needs_bytes = session.paged_out_bytes
        if session.pager is not MovedBy.INPROCESS and others_bytes:
            needs_bytes += _MARGIN_BYTES + needs_bytes // 100  # the driver needs more than fits
        if needs_bytes <= free_bytes:
            free_bytes -= needs_bytes
            others_bytes += needs_bytes
        else:
            stay.append(session)
    return stay


def _named(sessions: Sequence[SessionStatus]) -> str:
    return ", ".join(f"{one.name} ({format_bytes(one.paged_out_bytes)})" for one in sessions)


def _refuse(gpu: str, why: str) -> None:
    warn(
        f"{gpu}: not stopped. {why}",
        "End another notebook (or let `kiwi stop --wait` wait for that). Or leave the memory in "
        "system RAM with `kiwi stop --leave`: nothing is lost, and calls to the GPU wait until a "
        "daemon runs again or, where the program's own library has moved it, there is room.",
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


def _end(path: Path, ref: processes.ProcessRef | None, *, leaves: bool) -> int:
    """End a daemon, print what happened, and return an exit code. Others may have ended meanwhile,
    which takes time: look once more."""
    gpu = path.stem
    if ref is None:
        print(f"{gpu}: was not running (a crash has left its socket)")
        return exits.OK
    try:
        if not leaves and (why := _obstacle(path)):
            _refuse(gpu, why)
            return exits.FAILED
        _end_process(ref, gpu)
    except KiwiError as error:
        warn(f"{gpu}: {error.message}", error.remedy)
        return exits.FAILED
    left: list[str] = []
    with suppress(OSError):  # what the daemon has written of memory that it could not bring back
        left = path.with_suffix(LEFT_SUFFIX).read_text("utf-8").splitlines()
    print(f"{gpu}: stopped" + (", and left in system RAM: " if left else "") + "; ".join(left))
    return exits.OK if leaves or not left else exits.FAILED


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
        raise _not_yours(ref) from None
    finally:
        os.close(descriptor)
