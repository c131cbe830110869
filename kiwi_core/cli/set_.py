"""``kiwi set``: change a running daemon's settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.cli import exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, find_sockets, observer, warn
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import KiwiError
from kiwi_core.states import AntiThrash
from kiwi_core.units import format_duration_s, ns_to_seconds

if TYPE_CHECKING:
    from pathlib import Path

DESCRIPTION = (
    "Changes the settings of running daemons, at once. They outlive the daemon, until the machine\n"
    "restarts or a daemon is started with other ones."
)
_LOW_S, _HIGH_S = ns_to_seconds(DEFAULTS.tq_min_ns), ns_to_seconds(DEFAULTS.tq_max_ns)
_DEFAULT_S = ns_to_seconds(DEFAULTS.tq_ns)
EPILOG = f"""\
settings:
  tq=SECONDS            the time quantum: how long a notebook may keep the GPU while others wait
                        ({_LOW_S:g} to {_HIGH_S:g}; default {_DEFAULT_S:g}), the running one too
  anti-thrash=on        parallel while all memory fits, else one at a time (default)
  anti-thrash=always    always one at a time
  anti-thrash=off       never one at a time: programs may run out of GPU memory; your risk

examples:
  kiwi set tq=10
  kiwi set --gpu 1 tq=60 anti-thrash=always

Without --gpu every GPU's daemon is set. Needs the daemon's owner, root, or a member of the group
that the daemon was given with --admin-group.
"""


@dataclass(frozen=True)
class Setting:
    """One ``name=value``; exactly one of the two fields is set."""

    tq_s: float | None = None
    anti_thrash: AntiThrash | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings", nargs="+", type=parse_setting, metavar="NAME=VALUE", help="see below"
    )
    add_gpu(parser, "only this GPU")
    add_socket_dir(parser)


def parse_setting(text: str) -> Setting:
    """For argparse: raises its error with what would have been right."""
    name, equals, value = text.partition("=")
    if equals and name == "tq":
        return Setting(tq_s=parse_tq_s(value))
    if equals and name in ("anti-thrash", "anti_thrash"):
        return Setting(anti_thrash=parse_anti_thrash(value))
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a setting; write for example tq=10 or anti-thrash=off"
    )


def parse_tq_s(text: str) -> float:
    """Seconds, with or without an ``s``, within the configured limits."""
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not _LOW_S <= seconds <= _HIGH_S:
        raise argparse.ArgumentTypeError(
            f"a time quantum of {text} s is outside the limits, {_LOW_S:g} to {_HIGH_S:g} seconds"
        )
    return seconds


def parse_anti_thrash(text: str) -> AntiThrash:
    try:
        return AntiThrash(text.strip().lower())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of on, always, off") from None


def run(args: argparse.Namespace) -> int:
    settings: list[Setting] = args.settings
    tq_s = next((one.tq_s for one in reversed(settings) if one.tq_s is not None), None)
    mode = next((one.anti_thrash for one in reversed(settings) if one.anti_thrash), None)
    code = exits.OK
    for socket in find_sockets(directory_of(args), args.gpu):
        try:
            print(_apply(socket, tq_s, mode))
        except KiwiError as error:
            warn(f"{socket.stem}: {error.message}", error.remedy)
            code = exits.FAILED
    return code


def _apply(socket: Path, tq_s: float | None, mode: AntiThrash | None) -> str:
    """Sets, and says what the daemon then has (not what it was told)."""
    client = observer(socket)
    try:
        client.connect()
        client.set(tq_s=tq_s, anti_thrash=mode)
        gpu = client.status()
    finally:
        client.close()
    text = f"GPU {gpu.index}: quantum {format_duration_s(gpu.scheduler.tq_s)}, "
    text += f"anti-thrash {gpu.scheduler.anti_thrash.value}"
    if gpu.scheduler.anti_thrash is AntiThrash.OFF:
        text += " (programs may now run out of GPU memory: that risk is yours)"
    return text
