"""Tests that Kiwi runs no files from the working directory, which belongs to the user."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from installed import KIWI, environment, eventually, kiwi, short, started, status

__all__ = ["short"]

ROOT = Path(__file__).parents[2]

INNOCENT = ("queue", "json", "select", "asyncio", "msgspec", "structlog", "sitecustomize", "random")
"""Names that people give to their own files, and that Python or Kiwi imports."""


@pytest.fixture
def innocent(tmp_path: Path) -> Path:
    """Return a working directory whose files record in ``ran`` who imported them."""
    directory = tmp_path / "work"
    directory.mkdir()
    said = directory / "ran"
    code = f"import os\nopen({str(said)!r}, 'a').write(f'{{__name__}} {{os.getpid()}}\\n')\n1 / 0\n"
    for name in INNOCENT:
        (directory / f"{name}.py").write_text(code)
    return directory


def ran(directory: Path) -> str:
    said = directory / "ran"
    return said.read_text() if said.exists() else ""


def test_a_daemon(innocent: Path, short: Path) -> None:
    log = innocent / "log"
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB"]
    with started([*command, "--socket-dir", str(short / "s")], log, environment(), cwd=innocent):
        eventually(lambda: b"ready" in log.read_bytes() or ran(innocent), "ready")
        eventually(lambda: status(short / "s"), "the daemon answers")
        env = environment(KIWI_SOCKET_DIR=str(short / "s"))
        done = kiwi("run", "--require", "--", "/bin/true", env=env, cwd=innocent)
        assert done.returncode == 0, done.stderr
    assert ran(innocent) == "", log.read_text()


def test_a_daemon_in_a_directory_named_from_here(innocent: Path, short: Path) -> None:
    log = short / "log"
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", "s"]
    with started(command, log, environment(), cwd=short):
        gpus = eventually(lambda: status(short / "s"), "the daemon answers")
        done = kiwi(
            "run", "--require", "--", sys.executable, "-c", "import os; print(dict(os.environ))",
            env=environment(KIWI_SOCKET_DIR=str(short / "s")),
        )  # fmt: skip
        assert str(short / "s") in done.stdout, "the program finds the emulated GPU from anywhere"
    assert len(gpus) == 1


def test_a_daemon_that_starts_automatically(innocent: Path, short: Path) -> None:
    env = environment(KIWI_SOCKET_DIR=str(short / "s"), KIWI_DAEMON_ARGS="--emulate 1x64MiB")
    done = kiwi("run", "--require", "--", "/bin/echo", "hello", env=env, cwd=innocent)
    assert done.stdout == "hello\n", done.stderr
    assert ran(innocent) == "", (short / "s" / "daemon.log").read_text()


@pytest.mark.parametrize(
    "words", [("doctor",), ("bench", "--emulate", "1x64MiB"), ("demo", "--headless", "--emulate")]
)
def test_the_other_commands(words: tuple[str, ...], innocent: Path, short: Path) -> None:
    kiwi(*words, env=environment(KIWI_SOCKET_DIR=str(short / "s")), cwd=innocent, timeout_s=200)
    assert ran(innocent) == ""


@pytest.mark.parametrize("here", [".", ""])
def test_from_a_checkout_named_by_pythonpath(tmp_path: Path, short: Path, here: str) -> None:
    """The daemon also comes from the checkout, not from an installed Kiwi."""
    checkout = tmp_path / "checkout"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kiwi_core", checkout / "kiwi_core", ignore=skip)
    version = checkout / "kiwi_core" / "__init__.py"
    version.write_text(version.read_text() + '\n__version__ = "9.8.7"\n')
    env = environment(PYTHONPATH=here or str(checkout))
    command = [sys.executable, "-m", "kiwi_core.cli", "daemon", "--emulate", "1x64MiB"]
    log = short / "log"
    with started([*command, "--socket-dir", str(short / "s")], log, env, cwd=checkout):
        (gpu,) = eventually(lambda: status(short / "s"), f"it answers: {log.read_text()}")
        assert gpu["daemon_version"] == "9.8.7"
