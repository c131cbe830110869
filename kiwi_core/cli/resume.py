"""``kiwi resume``: let a session that ``kiwi suspend`` keeps out of the GPU go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli import each_session
from kiwi_core.client import Client

if TYPE_CHECKING:
    import argparse

DESCRIPTION = (
    "Ends what `kiwi suspend` began. A cell of the session goes on in its turn: it joins the end\n"
    "of the queue."
)
EPILOG = """\
examples:
  kiwi resume k5d0c3a9e11           its id is in kiwi status --json

Who may suspend a session may resume it; what an admin suspended only an admin resumes.
"""

add_arguments = each_session.add_arguments


def run(args: argparse.Namespace) -> int:
    return each_session.run(args, Client.resume, "not suspended any more")
