"""``kiwi demo``: two notebooks that do not fit together share one GPU before your eyes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.units import parse_size_bytes

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Shows Kiwi at work: two plain notebooks, each with 60 % of the GPU's memory, take turns.
With no NVIDIA GPU (or with --emulate) it runs on an emulated one, and says so."""

EPILOG = """\
examples:
  kiwi demo                  opens JupyterLab with the two notebooks; run both
  kiwi demo --headless       runs them itself, prints what happens, ends with a verdict

All that the demo starts ends with it, a browser that it has opened included.

exit codes: 0 the verdict is good (or you closed the demo), 1 it is not, or something failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headless", action="store_true", help="no browser: run the notebooks, print a verdict"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="use an emulated GPU even if there is a real one"
    )
    parser.add_argument("--tq", type=float, default=2.0, metavar="S", help="time quantum (2)")
    parser.add_argument(
        "--size", default="512MiB", metavar="SIZE", help="of the emulated GPU (512MiB)"
    )
    parser.add_argument(
        "--copy-rate",
        default="1GiB",
        metavar="SIZE",
        help="bytes per second of the emulated bus, so that swaps take visible time (1GiB)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="start JupyterLab, but do not open a browser"
    )
    parser.add_argument("--port", type=int, default=8888, help="for JupyterLab (8888)")


def run(args: argparse.Namespace) -> int:
    from kiwi_core.cli.demo.stage import stage
    from kiwi_core.cli.leaving import Terminated, leaving_on_signals
    from kiwi_core.errors import KiwiError
    from kiwi_core.gpu import nvml

    real = False
    if not args.emulate:
        with suppress(KiwiError):
            real = bool(nvml.gpus())
    emulated_size = None if real else args.size
    for size in (args.size, args.copy_rate):
        parse_size_bytes(size)
    os.umask(0o077)  # other users may not read the files made meanwhile
    try:
        with leaving_on_signals(), stage(emulated_size, args.tq, args.copy_rate) as it:
            if args.headless:
                from kiwi_core.cli.demo.headless import play

                return play(it, sys.stdout)
            from kiwi_core.cli.demo.lab import open_lab

            return open_lab(it, browser=not args.no_browser, port=args.port)
    except Terminated as terminated:
        return exits.of_signal(terminated.number)
