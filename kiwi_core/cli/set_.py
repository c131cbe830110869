"""``kiwi set``: change a running daemon's settings."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.cli import exits
from kiwi_core.cli.common import (
    add_gpu,
    add_socket_dir,
    directory_of,
    find_sockets,
    observer,
    sessions_of,
    warn,
)
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.states import PRIORITIES, AntiThrash, Priority
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire.words import settings_text

if TYPE_CHECKING:
    from collections.abc import Callable
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
  policy=NAME           who goes first: {", ".join(names())} (default: {DEFAULT})
  priority=CLASS        of one session, with --session: {", ".join(PRIORITIES)}

examples:
  kiwi set                              what is set now
  kiwi set tq=10
  kiwi set --gpu 1 tq=60 anti-thrash=always
  kiwi set policy=interactive
  kiwi set --session train.ipynb priority=training

Without --gpu every GPU's daemon is set. Needs the daemon's owner, root, or a member of the group
that the daemon was given with --admin-group.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings", nargs="*", type=parse_setting, metavar="NAME=VALUE", help="see below"
    )
    add_gpu(parser, "only this GPU")
    parser.add_argument(
        "--session",
        metavar="SESSION",
        default="",
        help="whose priority: its name, or its id",
    )
    add_socket_dir(parser)


def parse_tq_s(text: str) -> float:
    """Parse seconds, with or without an ``s``, within the configured limits."""
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


def parse_policy(text: str) -> str:
    name = text.strip().lower()
    if name not in names():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a policy; there are: {', '.join(names())}"
        )
    return name


def parse_priority(text: str) -> Priority:
    try:
        return Priority(text.strip().lower())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a priority class; there are: {', '.join(PRIORITIES)}"
        ) from None


SETTINGS: Final[dict[str, Callable[[str], object]]] = {
    "tq": parse_tq_s,
    "anti-thrash": parse_anti_thrash,
    "policy": parse_policy,
    "priority": parse_priority,
}


def parse_setting(text: str) -> dict[str, object]:
    """Parse a setting for argparse, into an argument of ``Client.set``. The error says what is
    valid."""
    said, equals, value = text.partition("=")
    name = said.replace("_", "-")
    if not equals or name not in SETTINGS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a setting; write for example tq=10 or anti-thrash=off"
        )
    field = "tq_s" if name == "tq" else name.replace("-", "_")
    return {field: SETTINGS[name](value)}


def run(args: argparse.Namespace) -> int:
    wanted: dict[str, Any] = {}
    for setting in args.settings:
        wanted |= setting  # the last one of each name counts
    if ("priority" in wanted) != bool(args.session):
        raise CallerError(
            "bad-setting",
            "A priority is a session's: --session and priority=… go together.",
            "Write for example: kiwi set --session train.ipynb priority=high",
        )
    code, sockets, session = exits.OK, find_sockets(directory_of(args), args.gpu), ""
    if args.session:
        socket, found = sessions_of(sockets).find(args.session)
        sockets, session = [socket], found.id
    for socket in sockets:
        try:
            print(_apply(socket, wanted, session))
        except KiwiError as error:
            warn(f"{socket.stem}: {error.message}", error.remedy)
            code = exits.FAILED
    return code


def _apply(socket: Path, wanted: dict[str, Any], session: str) -> str:
    """Set, and return the daemon's settings after that as text."""
    with observer(socket) as client:
        client.connect()
        if wanted:
            client.set(**wanted, session=session)
        gpu = client.status()
    text = f"GPU {gpu.index}: {settings_text(gpu.scheduler)}"
    for one in gpu.sessions:
        if one.id == session:
            text += f"; {one.name} has priority {one.priority.value}"
    if gpu.scheduler.anti_thrash is AntiThrash.OFF:
        text += " (programs may now run out of GPU memory: that risk is yours)"
    return text
