"""The parser of the command line and its errors: from arguments to a command's exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

from kiwi_core import __version__
from kiwi_core.cli import exits
from kiwi_core.errors import KiwiError

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandModule(Protocol):
    """The interface of a command: a module, or an object like one."""

    DESCRIPTION: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Return the exit code. Raises ``KiwiError`` with a sentence and a remedy."""
        ...


@dataclass(frozen=True)
class Command:
    """``module`` is below ``kiwi_core.cli``; ``module:NAME`` is an object in it."""

    module: str
    summary: str

    def load(self) -> CommandModule:
        module, _, name = self.module.partition(":")
        found = import_module(f"kiwi_core.cli.{module}")
        return cast("CommandModule", getattr(found, name) if name else found)


COMMANDS: Final[dict[str, Command]] = {
    "status": Command("status", "who has the GPU, who waits and for how long"),
    "run": Command("run", "run any program as a session that shares the GPU fairly"),
    "usage": Command("usage", "how much of the GPU each user has had, and how long each waited"),
    "wait": Command("wait", "how long a newcomer would wait for a GPU now, for scripts"),
    "set": Command("set_", "change quantum, anti-thrash mode, policy or a priority, live"),
    "release": Command("each_session:RELEASE", "move a session's memory out of the GPU now"),
    "suspend": Command("each_session:SUSPEND", "end a session's turn, and keep it out of the GPU"),
    "resume": Command("each_session:RESUME", "let a suspended session go on"),
    "doctor": Command(
        "doctor", "check whether this machine is fit for Kiwi, and say what to do if not"
    ),
    "daemon": Command("daemon", "serve this machine's GPUs (or emulated ones)"),
    "device-plugin": Command("device_plugin", "offer this node's GPUs to Kubernetes"),
    "stop": Command("stop", "end the daemons, and keep notebooks from starting them again"),
    "logs": Command("logs", "show the log of a daemon that a notebook has started"),
    "demo": Command("demo", "watch two notebooks share one GPU (an emulated one is enough)"),
    "bench": Command("bench", "measure this machine's limits, and Kiwi's distance from them"),
    "replay": Command("replay", "show what a journal records, and check the scheduler"),
    "simulate": Command("simulate", "what another policy or setting would do with the same work"),
}

_EPILOG: Final = """\
examples:
  kiwi demo --headless                  see it work, in half a minute
  kiwi doctor                           is this machine fit?
  kiwi daemon                           serve every GPU, in the foreground
  kiwi daemon --emulate 2x512MiB        no GPU? serve two emulated ones
  kiwi bench                            how fast is this machine, and Kiwi on it?
  kiwi status --watch                   who has the GPU, live
  kiwi run -- python train.py           a program from a terminal shares fairly too

Notebooks need none of this: with kiwi-jupyter installed a plain Python 3 notebook
takes part by itself (`%kiwi status` there).

environment:
  KIWI_SOCKET_DIR   where the daemons' sockets are (default: /run/kiwi if it exists,
                    else $XDG_RUNTIME_DIR/kiwi, else a private temporary directory)
  KIWI_GPU          the GPU that `kiwi run` takes without --gpu
  NO_COLOR          set to anything: no colours

exit codes: 0 done, 1 failed (a sentence on standard error says why), 2 not understood,
130 interrupted with Ctrl-C. `kiwi run` passes on the program's own.
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv``, run the command, and turn every expected error into a sentence and a code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _dispatch(arguments)
        except SystemExit as leaving:  # argparse leaves this way, for --help too
            code = leaving.code if isinstance(leaving.code, int) else exits.OK
        except KiwiError as error:
            complain(error)
            code = exits.FAILED
        except KeyboardInterrupt:
            code = exits.INTERRUPTED
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left (``kiwi status | head``): drop buffered output
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
        code = exits.BROKEN_PIPE
    return code


def complain(error: KiwiError) -> None:
    """Print what happened and what to do about it on standard error."""
    print(f"kiwi: {error.message}", file=sys.stderr)
    if error.remedy:
        print(f"      {error.remedy}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        means = f" Did you mean: kiwi {near[0]}" if near else ""
        print(f"kiwi: there is no command {name!r}.{means}", file=sys.stderr)
        print("      See kiwi --help.", file=sys.stderr)
        return exits.USAGE
    parser, command = _parser(name)
    if command is None:
        parser.parse_args(arguments)  # exits for --help, --version and unknown options
        parser.print_help()
        return exits.USAGE
    return command.run(parser.parse_args(arguments))


def _parser(chosen: str | None) -> tuple[argparse.ArgumentParser, CommandModule | None]:
    """Return the whole parser, but import only the chosen command's module: ``--help`` and
    ``status`` stay quick."""
    parser = _Parser(
        prog="kiwi",
        description="Many notebooks share one NVIDIA GPU, each with the whole GPU memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kiwi {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    module: CommandModule | None = None
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = command.load()
            sub.description = module.DESCRIPTION
            sub.epilog = module.EPILOG
            module.add_arguments(sub)
    return parser, module


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what was not understood, and where to look."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        print(f"      See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(exits.USAGE)
