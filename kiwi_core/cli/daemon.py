"""``kiwi daemon``: serve GPUs in the foreground."""

from __future__ import annotations

import argparse
import re

import kiwi_emulator as emulator
from kiwi_core.cli.numbers import number, whole
from kiwi_core.cli.set_ import parse_anti_thrash, parse_policy, parse_priority, parse_tq_s
from kiwi_core.config import AUTO, CHECKPOINT, DEFAULTS
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.sched.policy.interactive import SHARES_MAX
from kiwi_core.states import PRIORITIES, Priority
from kiwi_core.units import ns_to_seconds, parse_size_bytes, seconds_to_ns

_seconds = number(0.1, 3600.0, "a time in seconds")
"""More than an hour is a typing error."""

FLOOR_FACTOR_MAX = 100
"""More swap round trips for each turn are certainly a typing error."""

DESCRIPTION = (
    "Serves GPUs: one daemon process for each, under a supervisor that restarts a crashed one.\n"
    "Stays in the foreground, and says when it is ready. Ctrl-C or SIGTERM first brings every\n"
    "suspended notebook's memory back into the GPU, as far as there is room."
)
EPILOG = """\
examples:
  kiwi daemon                              every GPU of this machine
  kiwi daemon --gpu 0 --gpu 2 --tq 20      two of them, a quantum of 20 seconds
  kiwi daemon --emulate 2x512MiB           two emulated GPUs: no hardware needed
  kiwi daemon --metrics :9402              and Prometheus metrics, for this machine
  sudo kiwi daemon --socket-dir /run/kiwi --admin-group gpu-admins
                                           for all users of a shared machine

A notebook starts a daemon for its own user if there is none. For a shared machine install
the systemd unit: kiwi doctor --print systemd. Whether this machine is fit: kiwi doctor.

Time quantum, mode, policy and priorities can be changed live: kiwi set --help.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare each option: its name, its unit, and as ``dest`` the field of ``DaemonOptions`` or
    the limit in ``Config`` that it sets. An option that is not given keeps the default there.
    """
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--gpu",
        dest="gpus",
        metavar="UUID|INDEX",
        action="append",
        help="serve this GPU (its index, UUID or the beginning of it); repeat for more; "
        "default: every GPU",
    )
    parser.add_argument(
        "--tq",
        dest="tq_ns",
        metavar="SECONDS",
        type=_quantum_ns,
        help="time quantum: how long a session may keep the GPU while others wait "
        f"(default: {_seconds_of(DEFAULTS.tq_ns)})",
    )
    parser.add_argument(
        "--anti-thrash",
        metavar="on|always|off",
        type=parse_anti_thrash,
        help="one at a time when memory does not fit (on, the default), always, or never (off)",
    )
    _add_policy(parser)
    _add_resources(parser)
    _add_emulation(parser)


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="NAME",
        type=parse_policy,
        help=f"who goes first: {', '.join(names())} (default: {DEFAULT})",
    )
    parser.add_argument(
        "--priority",
        dest="priorities",
        metavar="USER=CLASS",
        action="append",
        type=_user_priority,
        help=f"the class of a user's sessions: {', '.join(PRIORITIES)}; repeat for more "
        "(default: normal)",
    )
    parser.add_argument(
        "--fair-share",
        dest="turns_by_owner",
        metavar="owner|session",
        type=_by_owner,
        help="whether turns go round the owners of sessions, so that nobody gains by running "
        "several programs, or round the sessions (default: owner)",
    )
    parser.add_argument(
        "--training-share",
        metavar="SHARE",
        type=number(0.001, SHARES_MAX, "a share"),
        help="least share of the GPU's time that a burst of the class training gets, from its "
        f"request to its end (policy interactive; default: {DEFAULTS.training_share:g})",
    )


def _add_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host-budget",
        dest="host_budget_bytes",
        metavar="SIZE",
        type=parse_size,
        help="system RAM that paged-out memory may take, for example 64GiB "
        "(default: what the machine and its cgroup have, less a reserve)",
    )
    parser.add_argument(
        "--pager",
        choices=(AUTO, CHECKPOINT),
        help="what moves the GPU memory of programs that ask for nothing: Kiwi's library in each "
        "program where this machine has proven itself, which it does when the GPU is idle (auto, "
        "the default), or the driver (checkpoint)",
    )
    parser.add_argument(
        "--lock-timeout",
        dest="lock_timeout_ns",
        metavar="SECONDS",
        type=_duration_ns,
        help="how long to wait for running GPU work when a notebook's turn ends; if it takes "
        "longer, the notebook keeps the GPU, and Kiwi tries again; raise it for very long GPU "
        "kernels "
        f"(default: {_seconds_of(DEFAULTS.lock_timeout_ns)})",
    )
    parser.add_argument(
        "--stuck-after",
        dest="operation_deadline_min_ns",
        metavar="SECONDS",
        type=_duration_ns,
        help="time for a driver call beyond --lock-timeout and the time for its bytes; a call that "
        "takes longer counts as hanging: it is shown, and its notebook is avoided "
        f"(default: {_seconds_of(DEFAULTS.operation_deadline_min_ns)})",
    )
    parser.add_argument(
        "--idle-after",
        dest="lingering_idle_ns",
        metavar="SECONDS",
        type=_duration_ns,
        help="a program with Kiwi's library in it, and threads that a cell left behind, count as "
        "idle when the GPU has done nothing for them for this long "
        f"(default: {_seconds_of(DEFAULTS.lingering_idle_ns)})",
    )
    parser.add_argument(
        "--swap-floor",
        dest="swap_floor_factor",
        metavar="FACTOR",
        type=number(0, FLOOR_FACTOR_MAX, "a factor"),
        help="a runner keeps the GPU for at least this many times the time that moving its "
        "memory out and back takes, even if its quantum is shorter "
        f"(default: {DEFAULTS.swap_floor_factor:g})",
    )
    parser.add_argument(
        "--no-bring-back",
        dest="bring_back",
        action="store_false",
        help="do not bring a notebook's memory back before it runs a cell, when its user comes "
        "back to it and the GPU is free",
    )
    parser.add_argument(
        "--socket-dir", metavar="DIR", help="where the sockets go (see kiwi --help)"
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="journals and what is needed after a crash (default: $KIWI_STATE_DIR, else state/ "
        "in the socket directory)",
    )
    parser.add_argument(
        "--admin-group",
        metavar="GROUP",
        help="members may change settings and priorities (kiwi set), see everybody's usage, and "
        "move out or suspend everybody's sessions (kiwi release, kiwi suspend)",
    )
    parser.add_argument(
        "--sessions-per-user",
        metavar="N",
        type=whole(1),
        help="how many sessions each user may have on each GPU, except root and the daemon's own "
        "user (default: the built-in share)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        type=_address,
        help="serve Prometheus metrics of all these GPUs over HTTP; :9402 means this machine only "
        "(default: none)",
    )
    parser.add_argument(
        "--end-unused-after",
        dest="end_unused_after_s",
        metavar="SECONDS",
        type=_unused_after,
        help="end when there has been no session and no connection for this long; 0: never "
        "(default: "
        f"0, and {ns_to_seconds(DEFAULTS.unused_ns):g} where a notebook or kiwi run starts the "
        "daemon)",
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log JSON lines instead of text for people"
    )


def _add_emulation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        metavar="NxSIZE",
        type=parse_emulation,
        help="serve N emulated GPUs of SIZE each, for example 2x512MiB, or 2x512MiB,driver=595 "
        "to behave like that driver; no real GPU is touched",
    )
    parser.add_argument(
        "--emulate-copy-rate",
        dest="emulate_copy_bytes_per_s",
        metavar="SIZE",
        type=parse_size,
        help="bytes per second that the emulated bus moves, for example 1GiB (default: unlimited)",
    )


def run(args: argparse.Namespace) -> int:
    from kiwi_core.daemon import supervisor
    from kiwi_core.daemon.options import DaemonOptions

    asked = {name: value for name, value in vars(args).items() if name != "command"}
    return supervisor.main(DaemonOptions.asked(asked))


def _quantum_ns(text: str) -> int:
    return seconds_to_ns(parse_tq_s(text))


def _duration_ns(text: str) -> int:
    return seconds_to_ns(_seconds(text))


def _seconds_of(duration_ns: int) -> str:
    return f"{ns_to_seconds(duration_ns):g}"


def _by_owner(text: str) -> bool:
    if text not in ("owner", "session"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither owner nor session")
    return text == "owner"


def _user_priority(text: str) -> tuple[str, Priority]:
    user, equals, name = text.partition("=")
    if not equals or not user.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not USER=CLASS; write for example ann=high")
    return user.strip(), parse_priority(name)


def parse_size(text: str) -> int:
    """Parse a size for ``argparse``, here and in ``kiwi bench``."""
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _unused_after(text: str) -> float:
    return 0.0 if text.strip() == "0" else _seconds(text)


def _address(text: str) -> tuple[str, int]:
    """Return host and port. ``:9402`` and ``9402`` mean this machine only, because a program should
    not open a port to others unasked. IPv6 addresses stand in brackets."""
    match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:\[\]]*)):)?(\d{1,5})", text.strip())
    if match is None or int(match[3]) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT; write for example :9402, 0.0.0.0:9402 or [::1]:9402"
        )
    return match[1] or match[2] or "127.0.0.1", int(match[3])


def parse_emulation(text: str) -> str:
    """Check the form, so that a typing error is reported before anything starts; the emulator
    parses it. Users may also write the × of the documentation."""
    plain = text.strip().replace("×", "x")
    sizes = plain.partition(",")[0]
    match = re.fullmatch(r"([1-9]\d?)x(.+)", sizes)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not N×SIZE; write for example 2x512MiB for two GPUs of 512 MiB"
        )
    parse_size(match[2])
    try:
        emulator.parse_machine(plain)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return plain
