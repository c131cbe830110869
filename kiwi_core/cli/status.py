"""``kiwi status``: show who has the GPU, who waits and for how long, and where memory is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kiwi_core.cli import choosing, exits
from kiwi_core.cli.choosing import EVERYTHING, Choice
from kiwi_core.cli.common import (
    add_gpu,
    add_socket_dir,
    ask_all,
    directory_of,
    find_sockets,
    warn,
)
from kiwi_core.cli.terminal import Style

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kiwi_core.wire.messages import GpuStatus

DESCRIPTION = "Shows who has each GPU, who waits and for how long, and where everybody's memory is."
EPILOG = """\
examples:
  kiwi status                    once, for people
  kiwi status --watch            live; leave with q or Ctrl-C
  kiwi status --state waiting    only who waits
  kiwi status --sort=-resident_bytes --format owner,name,resident_bytes
  kiwi status --json             once, for programs
  kiwi status --watch --json     one JSON line whenever something changes

states of a session:
  idle        not in a GPU cell; its memory, if any, is in the GPU
  waiting     asked for the GPU; its cell has not begun
  running     has the GPU
  suspended   held in mid-cell when its quantum ended; queued again by itself
  paging-out, paged-out, paging-in   its memory is on its way to, in, or back from system RAM
  lost        the contents of its GPU memory are gone; restart that kernel

JSON: {"gpus": [...]}, one object per daemon that answered; without any daemon the list is empty
and the exit code is 1. Names and process ids of other users' notebooks are not shown.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: the same facts as JSON")
    parser.add_argument("--watch", action="store_true", help="stay, and show each change; q leaves")
    choosing.add_arguments(parser)
    add_gpu(parser, "only this GPU")
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    choice = choosing.choice_of(args)
    if args.watch:
        from kiwi_core.cli import watch

        return watch.run(directory_of(args), args.gpu, choice, as_json=args.json)
    from kiwi_core.errors import PeerError

    try:
        answers = list(ask_all(find_sockets(directory_of(args), args.gpu)))
    except PeerError:
        if args.json:
            print(to_json([]))
        raise
    found = [answer.status for answer in answers if answer.status is not None]
    found.sort(key=lambda gpu: (gpu.index, gpu.uuid))
    if args.json:
        print(to_json(found, choice, indent=2 if sys.stdout.isatty() else 0))
    elif found:
        print("\n".join(text_lines(found, Style.of(sys.stdout), choice)))
    code = exits.OK
    for answer in answers:
        if answer.error is not None:  # it has a socket but does not answer
            warn(f"{answer.socket.name}: {answer.error.message}", answer.error.remedy)
            code = exits.FAILED
    return code


def text_lines(gpus: Sequence[GpuStatus], style: Style, choice: Choice = EVERYTHING) -> list[str]:
    """Return every GPU's block, with an empty line between two."""
    from kiwi_core.cli.status_text import gpu_lines

    lines: list[str] = []
    for gpu in gpus:
        block = gpu_lines(gpu, style, choice)
        lines += ["", *block] if lines else block
    return lines


def to_json(gpus: Sequence[GpuStatus], choice: Choice = EVERYTHING, *, indent: int = 0) -> str:
    """Return ``{"gpus": […]}``, an interface (see ``docs/``). ``choice`` selects the sessions."""
    import msgspec

    chosen = [msgspec.structs.replace(gpu, sessions=choice.of(gpu.sessions)) for gpu in gpus]
    data = msgspec.json.encode({"gpus": chosen})
    return (msgspec.json.format(data, indent=indent) if indent else data).decode()
