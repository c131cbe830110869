"""Set up the demo: a private directory, the two notebooks, and a separate daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core import interpreter, preload
from kiwi_core.cli.leaving import ending_descendants
from kiwi_core.client import Client
from kiwi_core.client.private_daemon import PrivateDaemon
from kiwi_core.errors import CallerError
from kiwi_core.gpu import proofs
from kiwi_core.preload import ready
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTEBOOKS: Final = ("emulated_training.ipynb", "emulated_exploration.ipynb")


@dataclass(frozen=True)
class DemoStage:
    """``env`` is what kernels (and a Jupyter server) need to find the demo's daemon."""

    directory: Path
    notebooks: tuple[Path, ...]
    socket: Path
    journal: Path
    emulated: bool
    env: dict[str, str]

    def client(self) -> Client:
        """Return a connected observer; the caller closes it."""
        client = Client(self.socket, role=Role.OBSERVER, reconnect=False)
        client.connect()
        return client


@contextmanager
def stage(emulated_size: str | None, tq_s: float, copy_rate: str) -> Iterator[DemoStage]:
    """Set up a stage (``emulated_size``: ``None`` on a real GPU), and remove it at the end."""
    directory = Path(tempfile.mkdtemp(prefix="kiwi-demo-"))
    try:
        with ending_descendants():
            yield from _set(directory, emulated_size, tq_s, copy_rate)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _set(
    directory: Path, emulated_size: str | None, tq_s: float, copy_rate: str
) -> Iterator[DemoStage]:
    sockets = directory / "run"
    sockets.mkdir(mode=0o700)
    arguments = ["--tq", str(tq_s)]
    _compile_gate()
    if emulated_size is not None:
        arguments += ["--emulate", f"1x{emulated_size}", "--emulate-copy-rate", copy_rate]
        _prove()
        text = "EMULATED GPU: no real GPU is used. It shows how Kiwi works, not how fast it is."
        line = "*" * (len(text) + 4)
        print(f"{line}\n* {text} *\n{line}", flush=True)
    else:
        arguments += ["--gpu", "0"]
    env = {**os.environ, "KIWI_SOCKET_DIR": str(sockets), "KIWI_DISABLE": ""}
    daemon: PrivateDaemon | None = None
    try:
        daemon = PrivateDaemon("The demo's", arguments, sockets, directory / "daemon.log", env)
        socket = daemon.wait_ready()
        yield DemoStage(
            directory=directory,
            notebooks=_copy_notebooks(directory),
            socket=socket,
            journal=sockets / "state" / f"{socket.stem}.journal",
            emulated=emulated_size is not None,
            env=env,
        )
    finally:
        if daemon is not None:
            daemon.end()


def _prove() -> None:
    """Let the emulated GPU prove itself for Kiwi's library now. The daemon would do so in its first
    idle moment, which the demo does not have."""
    if proofs.load(*proofs.EMULATED) is None:
        print("The emulated GPU proves itself for Kiwi's library, once …", flush=True)
        asked = interpreter.module("kiwi_core.cli", "doctor", "--prove", "--emulate", "1x512MiB")
        subprocess.run(asked, cwd=interpreter.DIRECTORY, stderr=subprocess.DEVNULL, check=False)


def _compile_gate() -> None:
    """Make Kiwi's gate ready: the demo shows a notebook stopped in mid-cell, which needs it."""
    if ready.find() is not None:
        return
    print("Kiwi's library is compiled. This happens once, and takes up to a minute.", flush=True)
    try:
        ready.ensure()
    except preload.Unavailable as error:
        print(f"Notebooks run without Kiwi's gate: {error}", flush=True)


def _copy_notebooks(directory: Path) -> tuple[Path, ...]:
    # They are inside this package in an installed wheel, and at the top of a checkout.
    places = (Path(__file__).parent / "examples", Path(__file__).parents[3] / "examples")
    source = next((place for place in places if (place / NOTEBOOKS[0]).is_file()), None)
    if source is None:
        raise CallerError(
            "no-examples", "The example notebooks are not installed.", "Install kiwi-jupyter again."
        )
    (directory / "notebooks").mkdir()
    copies = tuple(directory / "notebooks" / name for name in NOTEBOOKS)
    for copy in copies:
        shutil.copyfile(source / copy.name, copy)
    return copies
