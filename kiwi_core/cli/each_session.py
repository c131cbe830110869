"""``kiwi release``, ``kiwi suspend``, ``kiwi resume``: each does one thing to each session in its
arguments, on any GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import (
    add_gpu,
    add_socket_dir,
    directory_of,
    find_sockets,
    observer,
    sessions_of,
    warn,
)
from kiwi_core.client import Client
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


@dataclass(frozen=True)
class SessionCommand:
    """A command for ``app``. ``done`` is the text printed for a session after ``act``."""

    act: Callable[[Client, str], None]
    done: str
    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "sessions", nargs="+", metavar="SESSION", help="names or ids of sessions"
        )
        add_gpu(parser, "look on this GPU only")
        add_socket_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        there = sessions_of(find_sockets(directory_of(args), args.gpu))
        code = exits.OK if there.complete else exits.FAILED
        for wanted in dict.fromkeys(args.sessions):
            try:
                socket, session = there.find(wanted)
                with observer(socket) as client:
                    client.connect()
                    self.act(client, session.id)
                print(f"{wanted}: {self.done}")
            except KiwiError as error:
                warn(f"{wanted}: {error.message}", error.remedy)
                code = exits.FAILED
        return code


_WHO_MAY: Final = """\
Users may do this to their own sessions. The daemon's owner, root, and members of the daemon's
--admin-group may do it to all sessions."""

RELEASE: Final = SessionCommand(
    Client.release,
    "its memory is out of the GPU, or on its way",
    """\
Moves the GPU memory of a session that is idle to system RAM, so that others have the room.
Nothing is lost: it comes back with the session's next GPU cell.""",
    f"""\
examples:
  kiwi release train.ipynb
  kiwi release k5d0c3a9e11          by its id, which is in kiwi status --json

{_WHO_MAY} The daemon's log says who did it. The
command is refused for a session in the middle of a cell: while others wait, its turn ends by
itself. kiwi suspend ends the turn now. To give others longer turns, see
kiwi set --session ID priority=low.
""",
)
SUSPEND: Final = SessionCommand(
    Client.suspend,
    "suspended until kiwi resume",
    """\
Ends the turn of a session now, also in the middle of a cell, and keeps it out of the GPU
until `kiwi resume`. Its memory goes to system RAM. Nothing is lost: then the cell goes on.""",
    f"""\
examples:
  kiwi suspend train.ipynb
  kiwi resume train.ipynb           it waits for its turn like any other from then on
  kiwi suspend k5d0c3a9e11          by its id, which is in kiwi status --json

{_WHO_MAY} Only an admin can resume what an admin
suspended. The notebook, the sidebar and kiwi status say that the session is suspended, and the
daemon's log says by whom.

It lasts until kiwi resume, also if the daemon is killed and starts again. It ends with the
session's process (a kernel that is restarted), when the program leaves Kiwi (%kiwi off), and when
the daemon is stopped, which brings everybody's memory back.
""",
)
RESUME: Final = SessionCommand(
    Client.resume,
    "not suspended any more",
    """\
Ends a suspension by `kiwi suspend`. A cell of the session goes on in its turn: it joins the
end of the queue.""",
    """\
examples:
  kiwi resume train.ipynb

Users who may suspend a session may resume it. Only an admin can resume what an admin suspended.
""",
)
