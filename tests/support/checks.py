"""Checks of a daemon after any test."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from kiwi_core.cli import main

if TYPE_CHECKING:
    from daemon import Daemon

COMPLAINTS = ("daemon crashed", "message not handled", "operation raised", "Traceback")
"""Texts that a daemon logs after an internal error."""


def unharmed(daemon: Daemon) -> None:
    """Check that the daemon had no internal error, and that its journals replay as recorded."""
    log = daemon.log()
    for complaint in COMPLAINTS:
        assert complaint not in log, log
    replays_as_recorded(daemon)


def replays_as_recorded(daemon: Daemon) -> None:
    for path in sorted((daemon.directory / "state").glob("GPU-*.journal*")):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = main(["replay", str(path)])
        differing = [line for line in said.getvalue().splitlines() if line.startswith("!!")]
        assert status == 0, "\n".join(
            [path.name, *differing[:20], *said.getvalue().splitlines()[-5:]]
        )
