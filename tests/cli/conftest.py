"""Fixtures: the command line in this process or another, against scripted daemons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_process import PATIENCE_S, Result
from scripted_daemon import ScriptedDaemon

from kiwi_core.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private socket directory with a short path (Unix sockets have a limit), and no other."""
    directory = Path(tempfile.mkdtemp(prefix="kiwi-cli-"))
    monkeypatch.setenv("KIWI_SOCKET_DIR", str(directory))
    for name in ("KIWI_GPU", "KIWI_DISABLE", "KIWI_RUN_SESSION", "KIWI_DAEMON_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def scripted(sockets: Path) -> Iterator[Callable[..., ScriptedDaemon]]:
    """Start daemons in the socket directory. Stop them after the test; none may have seen a
    fault."""
    made: list[ScriptedDaemon] = []

    def make(name: str = "GPU-1", *, index: int = 0, grants: bool = True) -> ScriptedDaemon:
        daemon = ScriptedDaemon(sockets / f"{name}.sock", index=index, grants=grants)
        daemon.start()
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
        assert not daemon.faults


@pytest.fixture
def daemon(scripted: Callable[..., ScriptedDaemon]) -> ScriptedDaemon:
    return scripted()


@pytest.fixture
def kiwi(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run one command in this process."""

    def run(*arguments: str) -> Result:
        code = main([*arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def spawn(sockets: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start one command in its own process, and kill it at the end if it still runs."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kiwi_core.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        made.append(process)
        return process

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)
