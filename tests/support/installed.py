"""The installed command ``kiwi``, for tests that import nothing of Kiwi.

Every daemon has a short private directory (socket paths have 107 bytes) and ends with the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

KIWI = Path(sys.executable).with_name("kiwi")

MALLORY, ALICE, BOB = 54330, 54331, 54332
"""User ids without names, which the kernel accepts. Mallory is the hostile user."""

CAN_CHANGE_USER = os.geteuid() == 0 and shutil.which("setpriv") is not None

needs_users = pytest.mark.skipif(
    not CAN_CHANGE_USER and not os.environ.get("CI"),
    reason="it acts as two users: that needs root and setpriv (in CI it fails without them)",
)

_NOT_INHERITED = (
    "KIWI_DISABLE", "KIWI_GPU", "KIWI_PAGER", "KIWI_DAEMON_ARGS", "KIWI_RUN_SESSION",
    "KIWI_SOCKET_DIR", "KIWI_STATE_DIR", "KIWI_EMULATOR_STATE", "XDG_RUNTIME_DIR",
    "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD",
)  # fmt: skip


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``condition()``; fail saying that ``what`` did not come."""
    began_s = now_s = time.monotonic()
    while now_s < began_s + timeout_s:
        if value := condition():
            return value
        # Most conditions start a command: the longer it takes, the less often is looked.
        time.sleep(min(0.25, max(0.02, (now_s - began_s) / 10)))
        now_s = time.monotonic()
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what would lead to another daemon."""
    return {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED} | more


def as_user(uid: int) -> list[str]:
    """Return the prefix that runs a command as another user. That user may read this Python and
    this checkout, wherever they are, and has no other privilege."""
    assert CAN_CHANGE_USER, "this test needs root and setpriv"
    return [
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
        "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
    ]  # fmt: skip


def kiwi(
    *words: str,
    env: Mapping[str, str],
    before: Sequence[str] = (),
    cwd: Path | str = "/",
    timeout_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run ``kiwi WORDS`` to its end."""
    return subprocess.run(
        [*before, str(KIWI), *words], env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@contextmanager
def started(
    command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | str = "/"
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command``; at the end of the block, end it and all processes that it started."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(command), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """SIGKILL ``process`` and all that it has started, which is returned."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    return family


def daemons_of(directory: Path) -> list[psutil.Process]:
    """Return all processes that have ``directory`` in their command line or options as their socket
    directory, and are a daemon or its supervisor."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            options = process.environ().get("KIWI_CHILD_OPTIONS", "")
            ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        is_daemon = any("daemon" in word for word in words)
        if is_daemon and str(directory) in "\0".join((*words, options)) and not ended:
            found.append(process)
    return found


def status(directory: Path, **more: str) -> list[Any]:
    """Return the GPUs that ``kiwi status --json`` shows; empty while no daemon answers."""
    env = environment(KIWI_SOCKET_DIR=str(directory), **more)
    done = kiwi("status", "--json", env=env)
    if done.returncode != 0:
        return []
    gpus: list[Any] = json.loads(done.stdout)["gpus"]
    return gpus


def remove_at_once(directory: Path) -> None:
    """Remove ``directory``, in which daemons write: first its name, in one step, then the files.

    ``shutil.rmtree`` alone fails with "Directory not empty" when a daemon writes meanwhile: its
    roster 50 ms after a session has left, everything when it finds its socket gone, and a second
    daemon that starts just then its directories.
    """
    gone = directory.rename(directory.with_name(f"{directory.name}.gone"))
    shutil.rmtree(gone, ignore_errors=True)


@pytest.fixture
def short() -> Iterator[Path]:
    """A short private directory. Every daemon that was started below it ends with the test."""
    directory = Path(tempfile.mkdtemp(prefix="kw-", dir="/tmp"))
    try:
        yield directory
    finally:
        for process in daemons_of(directory):
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
