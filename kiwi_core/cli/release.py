"""``kiwi release``: page out a session now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli import each_session
from kiwi_core.client import Client

if TYPE_CHECKING:
    import argparse

DESCRIPTION = (
    "Moves the GPU memory of a session that is idle to system RAM, so that others have the room.\n"
    "Nothing is lost: it comes back with the session's next GPU cell."
)
EPILOG = """\
examples:
  kiwi release k5d0c3a9e11          its id is in kiwi status --json

Everybody may do so with their own sessions; the daemon's owner, root, and members of the group that
the daemon was given with --admin-group with all. The daemon's log says who did. A session in the
middle of a cell is refused: while others wait its turn ends by itself. kiwi suspend ends it now,
and for longer turns of others see kiwi set --session ID priority=low.
"""


add_arguments = each_session.add_arguments


def run(args: argparse.Namespace) -> int:
    return each_session.run(args, Client.release, "its memory is out of the GPU, or on its way")
