"""Tests of ``kiwi stop`` on real daemons with emulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from cli_process import PATIENCE_S, finish
from scripted_daemon import eventually
from unprivileged import ALICE, KIWI, as_user, needs_other_users

from kiwi_core.cli import listening, stop
from kiwi_core.client.autostart import autostart
from kiwi_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cli_process import Result

    Kiwi = Callable[..., Result]
    Spawn = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.timeout(PATIENCE_S * 3)


@pytest.fixture
def start(spawn: Spawn, sockets: Path) -> Callable[[int], subprocess.Popen[str]]:
    def run(gpus: int) -> subprocess.Popen[str]:
        process = spawn("daemon", "--emulate", f"{gpus}x64MiB", "--socket-dir", str(sockets))
        for _ in range(gpus):
            line = ""
            while "ready" not in line:
                line = process.stdout.readline()  # type: ignore[union-attr]
                assert line, finish(process).err
        return process

    return run


def test_all_daemons_end_and_are_not_started_by_themselves(
    start: Callable[[int], subprocess.Popen[str]], kiwi: Kiwi, sockets: Path
) -> None:
    process = start(2)
    result = kiwi("stop")
    assert (result.code, result.err) == (0, "")
    assert result.out.count(": stopped\n") == 2
    assert finish(process).code == 0
    assert not list(sockets.glob("*.sock"))
    with pytest.raises(PeerError, match="kiwi stop --undo"):
        autostart(sockets)
    again = kiwi("stop")
    assert again.code == 0
    assert "kiwi stop --undo" in again.out
    assert kiwi("stop", "--undo").code == 0
    assert not (sockets / "stopped").exists()
    with pytest.raises(PeerError, match="ended at once"):  # so it was tried
        autostart(sockets, command=["false"])


def test_a_daemon_that_is_started_by_hand_ends_the_stop(
    start: Callable[[int], subprocess.Popen[str]], kiwi: Kiwi, sockets: Path
) -> None:
    (sockets / "stopped").touch()
    start(1)
    assert not (sockets / "stopped").exists()
    assert kiwi("stop").code == 0


def test_one_of_two_daemons_is_stopped(
    start: Callable[[int], subprocess.Popen[str]], kiwi: Kiwi, sockets: Path
) -> None:
    process = start(2)
    assert kiwi("stop", "--gpu", "0").code == 0
    assert len(list(sockets.glob("*.sock"))) == 1
    assert not (sockets / "stopped").exists(), "notebooks may go on with the other one"
    assert "GPU 1" in kiwi("status").out
    assert kiwi("stop").code == 0
    assert finish(process).code == 0


def test_a_socket_that_a_crash_has_left(
    start: Callable[[int], subprocess.Popen[str]], kiwi: Kiwi, sockets: Path
) -> None:
    process = start(1)
    (path,) = sockets.glob("*.sock")
    ref = listening.listener(path)
    assert ref is not None
    # A daemon whose supervisor ends takes its socket along, and a supervisor restarts its daemon.
    process.send_signal(signal.SIGSTOP)
    os.kill(ref.pid, signal.SIGKILL)
    process.kill()
    eventually(lambda: listening.listener(path) is None)
    result = kiwi("stop")
    assert (result.code, result.out.count("was not running (a crash")) == (0, 1)


def test_without_a_daemon_or_a_directory(kiwi: Kiwi, sockets: Path) -> None:
    result = kiwi("stop", "--socket-dir", str(sockets / "nowhere"))
    assert result.code == 1
    assert "No Kiwi daemon" in result.err
    assert not (sockets / "nowhere").exists()


def test_systemd_is_named_instead_of_fought(
    start: Callable[[int], subprocess.Popen[str]], kiwi: Kiwi, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(1)
    with monkeypatch.context() as patch:
        patch.setattr(stop, "service_of", lambda _pid: "kiwi.service")
        result = kiwi("stop")
    assert result.code == 1
    assert "systemctl stop kiwi.service" in result.err
    assert process.poll() is None
    assert kiwi("stop").code == 0


def test_another_users_daemon(
    start: Callable[[int], subprocess.Popen[str]],
    kiwi: Kiwi,
    sockets: Path,
) -> None:
    needs_other_users()
    sockets.chmod(0o755)
    process = start(1)
    command = [*as_user(ALICE), str(KIWI), "stop", "--socket-dir", str(sockets)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "belongs to another user" in done.stderr
    assert process.poll() is None
    assert not (sockets / "stopped").exists()
    assert kiwi("stop").code == 0
