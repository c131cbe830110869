"""Unprivileged users against the installed ``kiwi``: a root daemon, and programs of other users.

This imports nothing of Kiwi: a user can know all that these helpers know.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from installed import ALICE, BOB, CAN_CHANGE_USER, KIWI, MALLORY, as_user
from patience import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ALICE", "BOB", "KIWI", "as_user"]

SUPPORT = Path(__file__).parent


def needs_other_users() -> None:
    """Skip a test if this process cannot act as other users; in CI that is a failure."""
    if CAN_CHANGE_USER:
        return
    why = "needs root and setpriv (util-linux), to act as other users"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def python(name: str, *args: object) -> list[str]:
    """Return the command of a program beside this file."""
    return [sys.executable, "-I", "-S", str(SUPPORT / name), *map(str, args)]


class RootDaemon:
    """A ``kiwi daemon`` on an emulated GPU, which every user can reach."""

    def __init__(self, directory: Path, *args: str, descriptors: int | None = None) -> None:
        self.directory = directory
        self.log_path = directory / "daemon.log"
        self.env = {**os.environ, "KIWI_SOCKET_DIR": str(directory)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(KIWI), "daemon", "--emulate", "1x256MiB",
                 "--socket-dir", str(directory), *args],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env,
                start_new_session=True, preexec_fn=_limit(descriptors),
            )  # fmt: skip
        wait_until(lambda: self.sockets() and "ready: GPU" in self.log(), "a daemon")

    def sockets(self) -> list[Path]:
        return sorted(self.directory.glob("*.sock"))

    @property
    def socket(self) -> Path:
        return self.sockets()[0]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def status(self, uid: int | None = None) -> Any:
        """Return the one GPU of ``kiwi status --json``."""
        command = [str(KIWI), "status", "--json"]
        done = subprocess.run(
            command if uid is None else [*as_user(uid), *command],
            env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["gpus"][0]

    def refused(self, what: str) -> int:
        """Return how often the daemon has refused more of ``what``, by its metrics."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.socket))  # blocking: waits if too many connect at once
            sock.settimeout(PATIENCE_S)
            hello = {"type": "hello", "protocol": 1, "role": "observer", "client": "test"}
            lines = (json.dumps(hello), json.dumps({"type": "get-metrics"}))
            sock.sendall("".join(line + "\n" for line in lines).encode())
            file = sock.makefile()
            file.readline()
            peers = json.loads(file.readline())["metrics"]["peers"]
        return next(one["refused"] for one in peers if one["what"] == what)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _limit(descriptors: int | None) -> Callable[[], None] | None:
    if descriptors is None:
        return None
    both = (descriptors, descriptors)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, both)


@contextmanager
def root_daemon(*args: str, descriptors: int | None = None) -> Iterator[RootDaemon]:
    """Run a root daemon. ``descriptors`` is its hard limit; with few, its own limits are
    smaller."""
    with tempfile.TemporaryDirectory(prefix="kw-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o755)
        daemon = RootDaemon(Path(directory), *args, descriptors=descriptors)
        try:
            yield daemon
        finally:
            daemon.stop()


@contextmanager
def program(command: list[str], says: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` until the block ends; the block begins when it has printed ``says``."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().startswith(says), command
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()


@contextmanager
def flood(
    daemon: RootDaemon, kind: str, *, uid: int = MALLORY, processes: int = 2, connections: int = 8
) -> Iterator[subprocess.Popen[str]]:
    command = python("flooder.py", daemon.socket, kind, processes, connections)
    with program([*as_user(uid), *command], "begun") as process:
        yield process


@contextmanager
def crowd(
    daemon: RootDaemon, role: str, count: int, *more: dict[str, Any], uid: int = MALLORY
) -> Iterator[dict[str, int]]:
    """Run a crowd of ``uid``; yield the number of connections by answer: "welcome", or an error."""
    lines = [json.dumps(one) for one in more]
    command = [*as_user(uid), *python("crowd.py", daemon.socket, role, count, *lines)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


def bursts(daemon: RootDaemon, count: int, pause_s: float = 0.005, *, uid: int = ALICE) -> Any:
    """Return what a well-behaved user measures: ``{"joined_s": …, "grants_s": […]}``."""
    done = subprocess.run(
        [*as_user(uid), *python("victim.py", daemon.socket, count, pause_s)],
        capture_output=True, text=True, cwd="/", timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
