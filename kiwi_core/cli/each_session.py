"""Commands that do one thing to each session in their arguments, on any GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, find_sockets, observer, warn
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.client import Client

    Act = Callable[[Client, str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", nargs="+", metavar="SESSION", help="ids of sessions")
    add_gpu(parser, "look on this GPU only")
    add_socket_dir(parser)


def run(args: argparse.Namespace, act: Act, done: str) -> int:
    """Run ``act`` for each session. ``done`` is the text printed for a session after that."""
    wanted = list(dict.fromkeys(args.sessions))
    found: set[str] = set()
    code, all_asked = exits.OK, True
    for socket in find_sockets(directory_of(args), args.gpu):
        try:
            code = max(code, _on_gpu(socket, wanted, found, act, done))
        except KiwiError as error:
            warn(f"{socket.stem}: {error.message}", error.remedy)
            code, all_asked = exits.FAILED, False
    for session in wanted:
        if session not in found and all_asked:
            warn(f"No GPU has a session {session!r}.", "`kiwi status --json` lists them.")
            code = exits.FAILED
    return code


def _on_gpu(socket: Path, wanted: list[str], found: set[str], act: Act, done: str) -> int:
    """Run ``act`` for this daemon's sessions, and add them to ``found``. Return the exit code."""
    code = exits.OK
    with observer(socket) as client:
        client.connect()
        here = {one.id for one in client.status().sessions}
        for session in wanted:
            if session not in here:
                continue
            found.add(session)
            try:
                act(client, session)
                print(f"{session}: {done}")
            except KiwiError as error:
                warn(f"{session}: {error.message}", error.remedy)
                code = exits.FAILED
    return code
