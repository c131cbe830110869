"""``kiwi usage``: show how much users, notebooks and jobs have used the GPUs."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, find_sockets, observer, warn
from kiwi_core.cli.terminal import Style, printable, table
from kiwi_core.errors import KiwiError, PeerError
from kiwi_core.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.wire.messages import UsageReport, UsageRow, Welcome

DESCRIPTION = (
    "Shows how much of the GPUs users, notebooks or jobs have had. The daemons keep these sums\n"
    "over restarts and crashes. Without a running daemon they cannot be shown (nothing is lost)."
)
EPILOG = """\
examples:
  kiwi usage                                by user, as far back as it is known
  kiwi usage --by notebook --since 1d       each notebook in the last day
  kiwi usage --by job                       each of Slurm's jobs; "-" is what ran in none
  kiwi usage --since 2026-11-01 --json      for programs

columns:
  had         had the GPU; notebooks that ran side by side are each counted in full
  waited      waited for it before a cell began
  suspended   waited for it in mid-cell, after the quantum had ended
  moved       memory moved out of the GPU and back in, and how long that took
  cells       GPU cells (or programs) that began

You see your own notebooks, and the sum of all other users; root, the daemon's owner and its admin
group see everybody. --since reaches back to within 5 minutes in the last two days, to the hour in
the last 60, and to the day (UTC) before that.
"""

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\Z")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by",
        choices=("user", "notebook", "job"),
        default="user",
        help="whose sums (default: user)",
    )
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=parse_since,
        default=0.0,
        help="30m, 1h, 2d or 1w ago, or a date like 2026-11-01 or 2026-11-01T14:00 (local time)",
    )
    parser.add_argument("--json", action="store_true", help="for programs: the same facts as JSON")
    add_gpu(parser, "only this GPU")
    add_socket_dir(parser)


def parse_since(text: str) -> float:
    """Parse a time for argparse into Unix seconds."""
    if ago := _AGO.match(text.strip()):
        return max(0.0, time.time() - float(ago[1]) * _UNIT_S[ago[2]])
    try:
        return max(0.0, datetime.fromisoformat(text.strip()).timestamp())
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; write for example 1h, 2d, 2026-11-01 or 2026-11-01T14:00"
        ) from None


def run(args: argparse.Namespace) -> int:
    from kiwi_core.wire.messages import UsageBy

    code, answers = exits.OK, []
    try:
        sockets = find_sockets(directory_of(args), args.gpu)
    except PeerError as error:
        if args.json:
            print(_to_json([]))
        error.remedy = f"The daemons keep the usage; nothing is lost. {error.remedy}"
        raise
    for socket in sockets:
        try:
            with observer(socket) as client:
                welcome = client.connect()
                answers.append((welcome, client.usage(UsageBy(args.by), args.since)))
        except KiwiError as error:
            warn(f"{socket.name}: {error.message}", error.remedy)
            code = exits.FAILED
    answers.sort(key=lambda one: (one[0].gpu_index, one[0].gpu_uuid))
    if args.json:
        print(_to_json(answers, indent=2 if sys.stdout.isatty() else 0))
    elif answers:
        print("\n".join(text_lines(answers, args.by, Style.of(sys.stdout))))
    return code


def _to_json(answers: Sequence[tuple[Welcome, UsageReport]], *, indent: int = 0) -> str:
    """Return ``{"gpus": […]}``, an interface (see ``docs/usage.md``)."""
    import msgspec

    gpus = [
        {
            "uuid": welcome.gpu_uuid,
            "index": welcome.gpu_index,
            "name": welcome.gpu_name,
            "began_unix_s": report.began_unix_s,
            "complete": report.complete,
            "rows": report.rows,
        }
        for welcome, report in answers
    ]
    data = msgspec.json.encode({"gpus": gpus})
    return (msgspec.json.format(data, indent=indent) if indent else data).decode()


def text_lines(answers: Sequence[tuple[Welcome, UsageReport]], by: str, style: Style) -> list[str]:
    """Return one table for all GPUs."""
    began = [report.began_unix_s for _, report in answers if report.began_unix_s is not None]
    if not began:
        return ["Nobody has used the GPU in that time, as far as is known."]
    gpus = "1 GPU" if len(answers) == 1 else f"{len(answers)} GPUs"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(began)))
    lines = [style.dim(f"since {since}, {gpus}"), ""]
    head = (
        "user",
        "job" if by == "job" else "notebook",
        "had",
        "waited",
        "suspended",
        "moved",
        "",
        "cells",
    )
    sums = _over_all(answers)
    rows = [head, *(_cells(row) for row in sums)]
    figures = 6
    if by == "user":
        rows = [(first, *rest) for first, _, *rest in rows]
    lines += table(rows, right=range(len(rows[0]) - figures, len(rows[0])))
    if not all(report.complete for _, report in answers):
        lines += ["", style.yellow("What came last is missing: it cannot be written (disk full?).")]
    return lines


def _over_all(answers: Sequence[tuple[Welcome, UsageReport]]) -> list[UsageRow]:
    """Sum each user's or notebook's rows over all GPUs. The row that held the GPU longest comes
    first.
    """
    import msgspec

    sums: dict[tuple[str, str, bool], UsageRow] = {}
    for _, report in answers:
        for row in report.rows:
            key = row.owner, row.name, row.mine
            if (known := sums.get(key)) is None:
                sums[key] = row
            else:
                sums[key] = msgspec.structs.replace(
                    known,
                    **{
                        name: getattr(known, name) + getattr(row, name)
                        for name in row.__struct_fields__
                        if name not in ("owner", "name", "mine")
                    },
                )
    return sorted(sums.values(), key=lambda row: -row.held_s)


def _cells(row: UsageRow) -> tuple[str, ...]:
    moved_bytes = row.moved_out_bytes + row.moved_in_bytes
    return (
        printable(row.owner),
        printable(row.name) or "-",
        format_duration_s(row.held_s),
        format_duration_s(row.waited_s),
        format_duration_s(row.suspended_s),
        format_bytes(moved_bytes),
        f"in {format_duration_s(row.moving_s)}" if moved_bytes else "",
        str(row.bursts),
    )
