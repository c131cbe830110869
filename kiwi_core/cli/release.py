"""``kiwi release``: move a session's GPU memory out now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, find_sockets, observer, warn
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DESCRIPTION = (
    "Moves the GPU memory of a session that is idle to system RAM, so that others have the room.\n"
    "Nothing is lost: it comes back with the session's next GPU cell."
)
EPILOG = """\
examples:
  kiwi release k5d0c3a9e11          its id is in kiwi status --json

Everybody may do so with their own sessions; the daemon's owner, root, and members of the group that
the daemon was given with --admin-group with all. The daemon's log says who did. A session in the
middle of a cell is refused: while others wait its turn ends by itself, and for longer turns of
others see kiwi set --session ID priority=low.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", nargs="+", metavar="SESSION", help="ids of sessions")
    add_gpu(parser, "look on this GPU only")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    wanted = list(dict.fromkeys(args.sessions))
    found: set[str] = set()
    code, all_asked = exits.OK, True
    for socket in find_sockets(directory_of(args), args.gpu):
        try:
            code = max(code, _release(socket, wanted, found))
        except KiwiError as error:
            warn(f"{socket.stem}: {error.message}", error.remedy)
            code, all_asked = exits.FAILED, False
    for session in wanted:
        if session not in found and all_asked:
            warn(f"No GPU has a session {session!r}.", "`kiwi status --json` lists them.")
            code = exits.FAILED
    return code


def _release(socket: Path, wanted: list[str], found: set[str]) -> int:
    """Those that this daemon has; they are ``found`` then. Return the exit code."""
    client = observer(socket)
    code = exits.OK
    try:
        client.connect()
        here = {one.id for one in client.status().sessions}
        for session in wanted:
            if session not in here:
                continue
            found.add(session)
            try:
                client.release(session)
                print(f"{session}: its memory is out of the GPU, or on its way")
            except KiwiError as error:
                warn(f"{session}: {error.message}", error.remedy)
                code = exits.FAILED
    finally:
        client.close()
    return code
