"""``kiwi suspend``: end a session's turn now, and keep it out of the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli import each_session
from kiwi_core.client import Client

if TYPE_CHECKING:
    import argparse

DESCRIPTION = (
    "Ends the turn of a session now, also in the middle of a cell, and keeps it out of the GPU\n"
    "until `kiwi resume`. Its memory goes to system RAM. Nothing is lost: the cell goes on then."
)
EPILOG = """\
examples:
  kiwi suspend k5d0c3a9e11          its id is in kiwi status --json
  kiwi resume k5d0c3a9e11           it waits for its turn like any other from then on

Everybody may do so with their own sessions; the daemon's owner, root, and members of the group that
the daemon was given with --admin-group with all. What an admin suspended only an admin resumes. The
notebook, the sidebar and kiwi status say that it is suspended, and the daemon's log says by whom.

It lasts until kiwi resume, also if the daemon is killed and starts again. It ends with the
session's process (a kernel that is restarted), when the program leaves Kiwi (%kiwi off), and when
the daemon is told to end, which gives everybody their memory back.
"""

add_arguments = each_session.add_arguments


def run(args: argparse.Namespace) -> int:
    return each_session.run(args, Client.suspend, "suspended until kiwi resume")
