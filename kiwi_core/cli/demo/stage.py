"""Sets the demo's stage: a private directory, the two notebooks, and a daemon of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.client import Client
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTEBOOKS: Final = ("emulated_training.ipynb", "emulated_exploration.ipynb")

READY_WITHIN_S: Final = 120.0
"""The emulated driver may have to be compiled first."""


@dataclass(frozen=True)
class Stage:
    """``env`` is what kernels (and a Jupyter server) need to find the demo's daemon."""

    directory: Path
    notebooks: tuple[Path, ...]
    socket: Path
    journal: Path
    emulated: bool
    env: dict[str, str]

    def client(self) -> Client:
        """An observer's, connected; the caller closes it."""
        client = Client(self.socket, role=Role.OBSERVER, reconnect=False)
        client.connect()
        return client


@contextmanager
def stage(emulated_size: str | None, tq_s: float, copy_rate: str) -> Iterator[Stage]:
    """``emulated_size`` is ``None`` on a real GPU. Everything is gone when the demo ends."""
    directory = Path(tempfile.mkdtemp(prefix="kiwi-demo-"))
    sockets = directory / "run"
    sockets.mkdir(mode=0o700)
    arguments = ["--socket-dir", str(sockets), "--tq", str(tq_s)]
    if emulated_size is not None:
        arguments += ["--emulate", f"1x{emulated_size}", "--emulate-copy-rate", copy_rate]
        _shout("EMULATED GPU: no real GPU is used. It shows how Kiwi works, not how fast it is.")
    else:
        arguments += ["--gpu", "0"]
    env = {**os.environ, "KIWI_SOCKET_DIR": str(sockets), "KIWI_DISABLE": ""}
    daemon: subprocess.Popen[bytes] | None = None
    try:
        with (directory / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "kiwi_core.cli", "daemon", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip
        socket = _wait_ready(daemon, sockets, directory / "daemon.log")
        yield Stage(
            directory=directory,
            notebooks=_copy_notebooks(directory),
            socket=socket,
            journal=sockets / "state" / f"{socket.stem}.journal",
            emulated=emulated_size is not None,
            env=env,
        )
    finally:
        if daemon is not None:
            _end(daemon)
        shutil.rmtree(directory, ignore_errors=True)


def _copy_notebooks(directory: Path) -> tuple[Path, ...]:
    source = _examples()
    (directory / "notebooks").mkdir()
    copies = tuple(directory / "notebooks" / name for name in NOTEBOOKS)
    for copy in copies:
        shutil.copyfile(source / copy.name, copy)
    return copies


def _examples() -> Path:
    """In an installed wheel inside this package, in a checkout at its top."""
    for place in (Path(__file__).parent / "examples", Path(__file__).parents[3] / "examples"):
        if (place / NOTEBOOKS[0]).is_file():
            return place
    raise CallerError(
        "no-examples", "The example notebooks are not installed.", "Install kiwi-jupyter again."
    )


def _wait_ready(daemon: subprocess.Popen[bytes], sockets: Path, log: Path) -> Path:
    ends_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < ends_at and daemon.poll() is None:
        for socket in sockets.glob("GPU-*.sock"):
            if _answers(socket):
                return socket
        time.sleep(0.05)
    words = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise CallerError(
        "no-daemon", "The demo's daemon did not start. It said: " + " / ".join(words),
        "`kiwi doctor` says what this machine lacks.",
    )  # fmt: skip


def _answers(socket: Path) -> bool:
    client = Client(socket, role=Role.OBSERVER, reconnect=False)
    try:
        client.connect()
    except (KiwiError, OSError):
        return False
    client.close()
    return True


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _shout(text: str) -> None:
    line = "*" * (len(text) + 4)
    print(f"{line}\n* {text} *\n{line}", flush=True)
