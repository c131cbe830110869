"""``kiwi wait``: say how long a new, unknown session would wait for a GPU now."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, find_sockets, no_daemon
from kiwi_core.cli.numbers import number

if TYPE_CHECKING:
    import argparse

    from kiwi_core.wire.messages import GpuStatus

DESCRIPTION = """\
Says on which GPU a program would wait least if it asked now, and for how long: the number by which
Jupyter Server and `kiwi run` place programs, for the scripts of other schedulers."""
EPILOG = """\
examples:
  kiwi wait                      the GPU with the shortest wait: seconds and UUID
  kiwi wait --below 60           exit code 0 if it is shorter than a minute, 1 if not
  kiwi wait --json               every GPU: {"gpus": [{"uuid", "index", "wait_s"}]}, shortest first

The wait is that of a newcomer whose needs nobody knows. It is "unknown" (null) where nobody can
tell, because a fault or a program outside Kiwi holds the GPU up: that is never below anything.

exit codes: 0 done; 1 no daemon answers, or no GPU's wait is below --below.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--below",
        type=number(0.0, 1e9, "a time in seconds"),
        metavar="S",
        help="fail unless a GPU's wait is shorter",
    )
    parser.add_argument("--json", action="store_true", help="for programs: every GPU as JSON")
    add_gpu(parser, "only this GPU")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    from kiwi_core.client import gpu_placement

    directory = directory_of(args)
    gpus = gpu_placement.statuses(find_sockets(directory, args.gpu), gpu_placement.WITHIN_S)
    if not gpus:
        raise no_daemon(directory, args.gpu)
    gpus.sort(key=gpu_placement.rank)
    shortest_s = gpus[0].newcomer_wait_s
    if args.json:
        print(_json(gpus))
    else:
        print("unknown" if shortest_s is None else f"{shortest_s:.1f}", gpus[0].uuid)
    wait_s = math.inf if shortest_s is None else shortest_s
    return exits.OK if args.below is None or wait_s < args.below else exits.FAILED


def _json(gpus: list[GpuStatus]) -> str:
    import msgspec

    rows = [{"uuid": gpu.uuid, "index": gpu.index, "wait_s": gpu.newcomer_wait_s} for gpu in gpus]
    return msgspec.json.encode({"gpus": rows}).decode()
