"""``kiwi bench``: this machine's limits and Kiwi's distance from them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.cli.bench_text import begin_lines, report_lines
from kiwi_core.cli.common import add_gpu, for_others_to_read, not_written
from kiwi_core.cli.daemon import parse_emulation, parse_size
from kiwi_core.cli.leaving import Terminated, leaving_on_signals
from kiwi_core.cli.run import wanted_gpu
from kiwi_core.cli.terminal import Style

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from kiwi_core.bench.conductor import Bench

DESCRIPTION = """\
Measures what this machine can do (copies between GPU and system RAM) and how far
Kiwi is from it (lease, page-out, page-in, a switch between two programs), in less than two minutes.
Use it only on a GPU that nobody else is using."""
EPILOG = """\
It takes half of the free GPU memory at most, nearly all of it for some seconds while it measures
the switch between two programs that do not fit together, and a quarter of the system RAM that may
be used; it says how much before it starts. Everything is given back at the end, after Ctrl-C too.

exit codes: 0 all was measured, 1 it could not start or a part failed (the table says why), 2 not
understood, 130 interrupted. The table and the JSON are explained in docs/bench.md.

examples:
  kiwi bench
  kiwi bench --gpu 1 --json bench.json
  kiwi bench --emulate 1x512MiB            see how it works; its speeds mean nothing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gpu(parser, "measure this GPU (default: the first)")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything there, for programs (- prints it)"
    )
    parser.add_argument(
        "--beside-others",
        action="store_true",
        help="measure even though other programs use the GPU: they are slowed down, and the "
        "numbers are not this machine's limits",
    )
    parser.add_argument(
        "--emulate",
        metavar="NxSIZE",
        type=parse_emulation,
        help="measure an emulated GPU, for example 1x512MiB; no real GPU is touched and the "
        "speeds mean nothing",
    )
    parser.add_argument(
        "--emulate-copy-rate",
        metavar="SIZE",
        type=parse_size,
        help="bytes per second that the emulated bus moves, for example 1GiB (default: unlimited)",
    )


def run(args: argparse.Namespace) -> int:
    from kiwi_core.bench import conductor
    from kiwi_core.bench.backends import BACKENDS
    from kiwi_core.bench.results import to_json

    options = conductor.BenchOptions(
        gpu=wanted_gpu(args.gpu, dict(os.environ)) if args.emulate is None else args.gpu,
        emulate=args.emulate,
        copy_bytes_per_s=args.emulate_copy_rate or 0,
        beside_others=args.beside_others,
    )
    try:
        with leaving_on_signals(), _writing(args.json) as write:
            os.umask(0o077)  # other users may not read the files made meanwhile
            # With the JSON on standard output, the text for people goes to standard error.
            shown = sys.stderr if args.json == "-" else sys.stdout
            progress = _Progress(shown)
            try:
                report = conductor.run(options, BACKENDS, progress.step, progress.begins)
            finally:
                progress.ends()
            write(to_json(report))
            print("\n".join(report_lines(report, Style.of(shown))), file=shown)
    except Terminated as terminated:
        return exits.of_signal(terminated.number)
    return exits.OK if report.complete else exits.FAILED


@contextmanager
def _writing(name: str | None) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes the JSON. Raise ``CallerError`` before anything is measured if
    the file cannot be written. If nothing is written, remove the file that was created for this
    check.
    """
    if name is None or name == "-":
        yield lambda data: print(data.decode(), end="") if name else None
        return
    made = not os.path.lexists(name)
    try:
        with open(name, "ab", opener=for_others_to_read):
            pass
        yield Path(name).write_bytes  # type: ignore[misc]
    except OSError as error:
        raise not_written(name, error) from error
    finally:
        if made and os.path.lexists(name) and not os.path.getsize(name):
            os.unlink(name)


class _Progress:
    """The progress: one line on a terminal, elsewhere a line for each step."""

    def __init__(self, shown: TextIO) -> None:
        self._shown = shown
        self._began_s = time.monotonic()
        self._rewrites = sys.stderr.isatty()

    def begins(self, bench: Bench) -> None:
        self.ends()
        print("\n".join(begin_lines(bench, Style.of(self._shown))), file=self._shown, flush=True)

    def step(self, title: str) -> None:
        text = f"{time.monotonic() - self._began_s:4.0f} s  {title}"
        if self._rewrites:
            print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def ends(self) -> None:
        """Clear the line."""
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
