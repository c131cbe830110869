"""``kiwi logs``: show the log of a daemon that a notebook, or ``kiwi run``, has started."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, BinaryIO, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_socket_dir, directory_of
from kiwi_core.cli.listening import unit_of
from kiwi_core.cli.numbers import whole
from kiwi_core.cli.terminal import printable
from kiwi_core.client import discover
from kiwi_core.client.autostart import LOG_NAME
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DESCRIPTION = "Shows the log of a daemon that a notebook or kiwi run has started."
EPILOG = """\
examples:
  kiwi logs                  the last 40 lines
  kiwi logs -n 500           more of them
  kiwi logs --follow         and new lines; leave with Ctrl-C

A daemon that was started by hand writes to its terminal. A daemon that systemd started writes to
systemd's journal: journalctl -u kiwi
"""

LINES: Final = 40
_BLOCK_BYTES: Final = 1 << 20
"""The log is emptied at about this size, so one block has nearly all of it."""
_LOOK_EVERY_S: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--lines", metavar="N", type=whole(0), default=LINES, help=f"how many ({LINES})"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="stay, and show what comes")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    with _open(directory_of(args)) as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _BLOCK_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        for line in lines[-args.lines :] if args.lines else []:
            print(printable(line), flush=args.follow)
        while args.follow:
            if os.fstat(log.fileno()).st_size < log.tell():  # it was emptied
                log.seek(0)
            whole_lines, _, begun = log.read().rpartition(b"\n")
            log.seek(-len(begun), os.SEEK_CUR)
            for line in whole_lines.decode(errors="replace").splitlines():
                print(printable(line), flush=True)
            time.sleep(_LOOK_EVERY_S)
    return exits.OK


def _open(directory: Path) -> BinaryIO:
    path = directory / LOG_NAME
    try:
        return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except OSError as error:
        if unit := next(filter(None, map(unit_of, discover(directory))), ""):
            raise CallerError(
                "no-log",
                f"The daemon is a service of systemd ({unit}), which keeps its log.",
                f"journalctl -u {unit.removesuffix('.service')} -n {LINES}",
            ) from error
        raise CallerError(
            "no-log",
            f"There is no log of a daemon to read in {directory} ({error.strerror}).",
            "Only a daemon that a notebook or kiwi run has started has one. One of systemd's writes"
            " to systemd's journal (journalctl -u kiwi), one that was started by hand to its"
            " terminal. If one runs elsewhere, name its directory with --socket-dir.",
        ) from error
