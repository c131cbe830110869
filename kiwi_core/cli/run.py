"""``kiwi run -- CMD …``: run any program as a session that shares the GPU fairly.

This process is the session. It holds the connection (the daemon knows a session by the process of
its socket) and stays the program's parent, so that the program is in the session's process tree.
It never uses CUDA itself. The burst lasts as long as the program (but see ``LinkWatch``).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from kiwi_core import config, preallocation, preload
from kiwi_core.cli import child, exits
from kiwi_core.cli.common import add_gpu, add_socket_dir, directory_of, no_daemon, warn
from kiwi_core.cli.leaving import Terminated, leaving_on_signals
from kiwi_core.cli.wait_line import TerminalWaitLine
from kiwi_core.client.own_gpus import ENV_VISIBLE, only_visible
from kiwi_core.errors import KiwiError, PeerError, SilentDaemonError, is_full
from kiwi_core.preload import ready
from kiwi_core.states import MovedBy, Notice

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import UserNotice, Welcome

DESCRIPTION = "Runs a program as a session: it waits for its turn and shares the GPU fairly."
EPILOG = """\
examples:
  kiwi run -- python train.py --epochs 10
  kiwi run --name "nightly training" --gpu 1 -- ./train.sh
  kiwi run --require -- python train.py      do not run without a daemon

The program starts when it gets the GPU, with the same terminal, and holds the GPU until it ends.
While others wait, it is suspended at the end of each time quantum and goes on by itself, like a
cell of a notebook. Its children take part, too. A program that needs the GPU only now and then
keeps others waiting longer than necessary: prefer a notebook, or split the program.

If its job or container has too little RAM for its GPU memory, it keeps the GPU while others wait,
and says how much RAM to ask for.

The program sees one GPU (CUDA_VISIBLE_DEVICES), unless you have chosen one yourself. With a
daemon of emulated GPUs it gets the emulated driver.

Kiwi preloads a library into it (LD_PRELOAD): the gate, which lets Kiwi stop it safely in the middle
of its work. A program that strips its environment, or is linked statically, has no gate: it
keeps the GPU until its work is done, and `kiwi status` says so.

Where this machine has proven itself (kiwi doctor --prove), the library also moves the program's GPU
memory, and asks for the GPU at each burst of GPU work, so that the program keeps nobody waiting
while it does not compute. --pager inprocess does so without that proof, --pager checkpoint never.

Notebooks and `kiwi run`s that it starts belong to this session. Programs that leave for good
(daemons) are not followed.

If there is no daemon and this machine has a GPU, kiwi run starts a daemon. If that fails, the
program runs as if Kiwi were not there, with a warning.

exit codes: the program's own; 128 + n if signal n ended it; 126 or 127 if it cannot be executed or
found; 130 if you gave up waiting with Ctrl-C; 1 if --require and there is no daemon.
"""

ENV_INSIDE: Final = "KIWI_RUN_SESSION"
"""Variable that tells the program that it belongs to a session and must not wait for itself."""

NO_GATE: Final = (
    "The program runs without Kiwi's gate: it is never stopped in the middle of its work, so "
    "others wait for its end."
)

LOOK_EVERY_S: Final = 0.25
LOOKS_OFTEN: Final = 240
"""Then it looks ten times as rarely: the program seems to leave its memory to the driver."""

STATUS_WITHIN_S: Final = 2.0

ALWAYS_SHOWN: Final = frozenset(
    {
        Notice.SERIALISING,
        Notice.PAGE_OUT_REFUSED,
        Notice.LITTLE_RAM,
        Notice.PAGE_IN_REFUSED,
        Notice.KEPT_OUT,
        Notice.STUCK,
        Notice.UNSTUCK,
        Notice.LOST,
    }
)
"""Notices always printed; ordinary suspensions would disturb the program's output (--verbose)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kiwi run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--name", help="what others see (default: the command)")
    add_gpu(
        parser,
        "the GPU to use (default: $KIWI_GPU, else $CUDA_VISIBLE_DEVICES, else the one with "
        "the shortest wait)",
    )
    add_socket_dir(parser)
    parser.add_argument(
        "--require", action="store_true", help="fail instead of running without a daemon"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also say when it is suspended and resumed"
    )
    parser.add_argument(
        "--pager",
        choices=config.PAGERS,
        help="what moves its GPU memory (default: $KIWI_PAGER, else auto)",
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    command: list[str] = args.command_line
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        warn("run: no command was given.", "Write it after two dashes: kiwi run -- python train.py")
        return exits.USAGE
    path = child.find(command[0])
    if isinstance(path, int):
        words = "cannot be executed" if path == exits.CANNOT_EXECUTE else "was not found"
        warn(f"{command[0]} {words}.", "Is it installed, and on the PATH?")
        return path
    if os.environ.get(ENV_INSIDE):
        _become(path, command)  # the session around this process waits and holds for it
    pager = args.pager or config.pager_of(os.environ)
    try:
        with leaving_on_signals():  # Ctrl-C frees the place in the queue by itself
            library, lacking = find_library()
            client = _connect(args, args.name or " ".join(command)[:80], str(lacking or ""))
            if lacking is not None:
                warn(f"{lacking.message} {NO_GATE}", lacking.remedy)
            line = TerminalWaitLine()
            try:
                client.acquire(on_waiting=line.show)
                line.granted()
            except BaseException:
                client.close()
                raise
            finally:
                line.clear()
    except Terminated as terminated:
        return exits.of_signal(terminated.number)
    except KiwiError as error:
        if args.require:
            raise
        warn(f"{error.message} The program runs without Kiwi.", error.remedy)
        _become(path, command)
    welcome = client.welcome
    assert welcome is not None
    env = environment(welcome, dict(os.environ), args.gpu)
    watch = None
    if library is not None:
        env.update(preload.environment(library, env))
        env[preload.ENV_OWN] = preload.OWN_BY_PAGER[pager]
        if pager != config.CHECKPOINT:
            watch = LinkWatch(client)
    try:
        return child.run(path, command, env)
    except OSError as error:
        warn(f"{command[0]} cannot be executed: {error.strerror}.")
        return exits.CANNOT_EXECUTE
    finally:
        if watch is not None:
            watch.stop()
        client.end_burst()
        client.close()


def find_library() -> tuple[Path | None, preload.Unavailable | None]:
    """Return the library with the gate, or why there is none. Called before this process asks for
    the GPU: the library may have to be compiled first, and nobody should wait for that."""
    try:
        return ready.find() or ready.ensure(), None
    except preload.Unavailable as error:
        return None, error


class LinkWatch:
    """Ends the program's burst as soon as the library in the program asks for the GPU itself. If
    the library was not loaded (as in a static program), the burst lasts as long as the program.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = threading.Event()
        self._deciding = threading.Lock()
        threading.Thread(target=self._watch, name="kiwi link", daemon=True).start()

    def stop(self) -> None:
        """Leave the end of the burst to the caller from now on. Does not wait for an answer: a
        daemon that is busy, or hangs, must not delay the end of the program."""
        with self._deciding:
            self._over.set()

    def _watch(self) -> None:
        welcome = self._client.welcome
        looks = 0
        while welcome is not None and not self._over.wait(
            LOOK_EVERY_S if looks < LOOKS_OFTEN else 10 * LOOK_EVERY_S
        ):
            looks += 1
            with suppress(KiwiError):  # the daemon may be away for now
                status = self._client.status(STATUS_WITHIN_S)
                ours = (s for s in status.sessions if s.id == welcome.session)
                if any(session.pager is MovedBy.INPROCESS for session in ours):
                    with self._deciding:
                        if not self._over.is_set():
                            self._client.end_burst(lingering=True)
                    return


def _connect(args: argparse.Namespace, name: str, ungated: str = "") -> Client:
    """Connect to the daemon of the wanted GPU; start a daemon if none answers and there could be a
    GPU."""
    from kiwi_core.client import asking
    from kiwi_core.client.directory import may_start_in

    directory = directory_of(args)
    named = args.gpu or os.environ.get(config.ENV_GPU)
    shown: set[bool] = set()

    def connect() -> Client:
        return _connect_once(directory, named, name, ungated, verbose=args.verbose)

    def tell(_spent_s: float, there: bool) -> None:
        if there in shown:
            return
        shown.add(there)
        what = "runs but does not answer" if there else "does not answer; it may be restarting"
        most_s = asking.HANGS_AFTER_S if there else within_s
        warn(f"The Kiwi daemon {what}. Waiting up to {most_s:g} s for it.")

    may_start = config.gpu_possible() and may_start_in(directory)
    within_s = asking.REVIVED_WITHIN_S if may_start else asking.RESTARTED_WITHIN_S
    try:
        return connect()
    except PeerError as error:
        if error.code != "no-daemon":
            raise
        failed = error
    client = asking.await_return(directory, connect, failed, within_s=within_s, waiting=tell)
    if client is None and may_start:
        from kiwi_core.client.autostart import autostart

        autostart(directory)
    return client or connect()


def _connect_once(
    directory: Path, named: str | None, name: str, ungated: str, *, verbose: bool
) -> Client:
    """Connect where the program waits least, unless its user has chosen. Raises ``PeerError``
    "no-daemon"."""
    from kiwi_core.client import discover, gpu_placement, own_gpus

    key = f"kiwi run {os.getpid()}"
    sockets = discover(directory, named) if named else own_gpus.own_sockets(directory)
    if not sockets and not named:
        error = own_gpus.no_daemon(directory)
        if error.code != "no-daemon":
            raise error
    placed = None
    if not named and not os.environ.get(own_gpus.ENV_VISIBLE):
        placed = gpu_placement.place(sockets, key)
    if placed is not None:  # the others stay, in case its daemon ends just now
        sockets.sort(key=lambda socket: socket.stem != placed.uuid)
    client = _first_that_answers(sockets, name, ungated, verbose=verbose)
    if client is None:
        raise no_daemon(directory, named)
    if placed is not None:
        with suppress(KiwiError):  # it lapses by itself, too
            client.expect(key, 0)
    return client


def _first_that_answers(
    sockets: list[Path], name: str, ungated: str, *, verbose: bool
) -> Client | None:
    """Return a connected client; ``None`` if no daemon is there: a crashed one leaves its socket.
    Other errors (no right, another version, a daemon that does not answer) are raised."""
    from kiwi_core.client import Client

    def tell(notice: UserNotice) -> None:
        if verbose or notice.notice in ALWAYS_SHOWN:
            warn(notice.text, notice.remedy)

    silent: SilentDaemonError | None = None
    for socket in sockets:
        client = Client(
            socket, name=name, client="kiwi run", ungated=lambda: ungated, on_notice=tell
        )
        try:
            welcome = _once_there_is_room(client)
        except PeerError as error:
            client.close()
            if error.code != "no-daemon":
                raise
            silent = error if isinstance(error, SilentDaemonError) else silent
            continue
        if welcome.emulation is not None:
            warn(f"EMULATED GPU ({welcome.gpu_name}): no real GPU is used, speeds mean nothing.")
        return client
    if silent is not None:
        raise silent
    return None


def _once_there_is_room(client: Client) -> Welcome:
    """Connect, and wait while the daemon is full. Without a connection the program would use the
    GPU at the same time as the sessions that take turns.
    """
    from kiwi_core.client.patience import FULL_AGAIN_S

    said = False
    while True:
        try:
            return client.connect()
        except PeerError as error:
            if not is_full(error):
                raise
            if not said:
                warn(f"{error.message} The program waits for a place.", error.remedy)
                said = True
        time.sleep(FULL_AGAIN_S)


def wanted_gpu(named: str | None, env: dict[str, str]) -> str | None:
    """Return ``--gpu``, else KIWI_GPU, else the GPU of CUDA_VISIBLE_DEVICES if it names one."""
    if named or env.get(config.ENV_GPU):
        return named or env[config.ENV_GPU]
    return only_visible(env) or None


def environment(welcome: Welcome, env: dict[str, str], named: str | None) -> dict[str, str]:
    """Return the program's environment: it shows one GPU, has the daemon's emulated driver if there
    is one, and says that the program already belongs to a session.
    """
    if named or env.get(config.ENV_GPU) or not env.get(ENV_VISIBLE) or only_visible(env):
        env[ENV_VISIBLE] = welcome.gpu_uuid
    env[ENV_INSIDE] = welcome.session
    env[config.ENV_DISABLE] = "1"
    preallocation.switch_off(env)
    if (emulation := welcome.emulation) is not None:
        import kiwi_emulator as emulator

        env.update(emulation.env)
        env["LD_LIBRARY_PATH"] = emulator.library_path(
            emulation.libcuda, emulation.libnvml, before=env.get("LD_LIBRARY_PATH", "")
        )
    return env


def _become(path: str, command: list[str]) -> NoReturn:
    """Replace this process with the program; nothing of Kiwi stays."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in child.IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(path, command)
    except OSError as error:
        warn(f"{command[0]} cannot be executed: {error.strerror}.")
        raise SystemExit(exits.CANNOT_EXECUTE) from error
