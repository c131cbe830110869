"""Tests that a daemon started by a program ends when it is unused, and comes back when needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from patience import wait_until

from kiwi_core.client import Client, discover
from kiwi_core.client.autostart import ENV_DAEMON_ARGS, autostart
from kiwi_core.client.directory import STOPPED_NAME
from kiwi_core.errors import PeerError
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

UNUSED_AFTER_S = 4.0
"""Long enough for a client to return to the daemon that it has just found, and for a test to read
the status."""

ENDS_WITHIN_S = 60.0
"""Limit on a busy machine; a daemon without sessions ends within a second."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kiwi-u-") as name:
        directory = Path(name)
        monkeypatch.setenv("KIWI_SOCKET_DIR", name)
        arguments = f"--emulate 2x64MiB --end-unused-after {UNUSED_AFTER_S}"
        monkeypatch.setenv(ENV_DAEMON_ARGS, arguments)
        yield directory
        for supervisor in supervisors(directory):
            with suppress(psutil.NoSuchProcess):
                supervisor.terminate()
        wait_until(lambda: not supervisors(directory), "the daemons end", ENDS_WITHIN_S)


def supervisors(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "kiwi_core.cli" in words and "daemon" in words and str(directory) in words:
            found.append(process)
    return found


def serve(directory: Path) -> Path:
    """Start the daemons without a test's help; return a socket once both serve."""
    autostart(directory)
    wait_until(lambda: len(discover(directory)) == 2, "both daemons serve", ENDS_WITHIN_S)
    return discover(directory)[0]


def has_ended(directory: Path) -> bool:
    return not supervisors(directory) and not discover(directory)


def test_it_ends_and_the_next_one_starts_at_once(sockets: Path) -> None:
    serve(sockets)
    (first,) = supervisors(sockets)
    wait_until(lambda: has_ended(sockets), "the daemons end", ENDS_WITHIN_S)
    log = (sockets / "daemon.log").read_text()
    assert log.count("nobody needs this daemon") == 2
    assert "Traceback" not in log
    assert not (sockets / STOPPED_NAME).exists()
    serve(sockets)
    (second,) = supervisors(sockets)
    assert second.pid != first.pid


def test_a_session_on_one_gpu_keeps_all_daemons(sockets: Path) -> None:
    """A client that wants the other GPU starts no daemon while one answers."""
    path = serve(sockets)
    (supervisor,) = supervisors(sockets)
    program = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "joined\n"
    # A stopped program is still a session, whether it can answer or not.
    program.send_signal(signal.SIGSTOP)
    with pytest.raises(AssertionError):
        wait_until(lambda: has_ended(sockets), "the daemons end", 4 * UNUSED_AFTER_S)
    assert supervisors(sockets) == [supervisor]
    assert len(discover(sockets)) == 2
    program.send_signal(signal.SIGCONT)
    program.stdin.close()
    assert program.wait(ENDS_WITHIN_S) == 0
    program.stdout.close()
    wait_until(lambda: has_ended(sockets), "the daemons end", ENDS_WITHIN_S)


SESSION = """
import sys
from pathlib import Path
from kiwi_core.client import Client
from kiwi_core.wire.messages import Emulation
client = Client(Path(sys.argv[1]), name="somebody")
client.connect()
print("joined", flush=True)
sys.stdin.read()
client.close()
"""


def test_a_reader_keeps_the_daemon(sockets: Path) -> None:
    path = serve(sockets)
    with Client(path, role=Role.OBSERVER, reconnect=False) as client:
        client.connect()
        with pytest.raises(AssertionError):
            wait_until(lambda: has_ended(sockets), "the daemons end", 4 * UNUSED_AFTER_S)
        assert client.status()


def test_a_program_that_comes_at_the_end_finds_a_daemon(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs come at all moments of a daemon's last second. Each gets a connection that lasts,
    and no two daemons serve one GPU."""
    monkeypatch.setenv(ENV_DAEMON_ARGS, "--emulate 1x64MiB --end-unused-after 0.1")
    failures: list[BaseException] = []

    def come(times: int) -> None:
        try:
            for _ in range(times):
                meet(sockets)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=come, args=(4,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert not failures, (failures, (sockets / "daemon.log").read_text())
    wait_until(lambda: has_ended(sockets), "the daemons end", ENDS_WITHIN_S)
    assert "already-running" not in (sockets / "daemon.log").read_text()


def meet(sockets: Path) -> None:
    """Come when the daemon is about to end: try, start one, and try again, as a program does."""
    for _ in range(10):
        for path in discover(sockets) or autostart(sockets):
            client = Client(path, role=Role.OBSERVER, reconnect=False)
            try:
                client.connect()
                assert client.status()
            except PeerError as error:
                if error.code != "no-daemon":
                    raise
                continue
            finally:
                client.close()
            threading.Event().wait(0.9)  # about when the next look is
            return
    raise AssertionError("no daemon in ten attempts")


def test_a_daemon_started_by_hand_stays(sockets: Path) -> None:
    command = [sys.executable, "-m", "kiwi_core.cli", "daemon", "--emulate", "1x64MiB"]
    with subprocess.Popen(
        [*command, "--socket-dir", str(sockets)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "ready" not in (line := process.stdout.readline()):
            assert line
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * UNUSED_AFTER_S)
        process.terminate()
        assert process.wait(ENDS_WITHIN_S) == 0
