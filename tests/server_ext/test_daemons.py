"""Tests of daemons that come, go, are killed and are started while browsers watch."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from daemon import PATIENCE_S, Daemon, wait_until

from kiwi_core import config
from kiwi_jupyter.server_ext import daemon_connections, daemon_follower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def connections(daemon: Daemon) -> int:
    """Return how many connections Linux counts at the daemon's one socket, without the listening
    one."""
    (path,) = daemon.sockets()
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(str(path)) for line in lines) - 1


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for ``condition``, and let the server run, which shares this event loop."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if value := condition():
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


def problem(state: dict[str, Any]) -> str | None:
    found = state["server"]["problem"]
    return found and str(found["code"])


# --- connections --------------------------------------------------------------------------------


async def test_two_readers_share_one_connection_which_ends_when_nobody_looks(
    daemon: Daemon, kiwi: Any, read: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: connections(daemon) == 0, "no connection before anybody looks")
    monkeypatch.setattr("kiwi_jupyter.server_ext.daemon_connections.IDLE_S", 0.5)
    one, two = await read(), await read()
    await one.read()
    await two.read()
    uuid = one.state["gpus"][0]["uuid"]
    assert (await ask(f"gpus/{uuid}", "PATCH", {"tq_s": 9}))[0] == 200
    for reader in (one, two):
        await reader.until(lambda s: s["gpus"][0]["scheduler"]["tq_s"] == 9.0)
    assert connections(daemon) == 1
    one.close()
    two.close()
    await until(lambda: connections(daemon) == 0, "the connection is closed")
    assert not kiwi.service.daemons.is_open
    code, state = await ask("status")
    assert (code, state["gpus"][0]["uuid"]) == (200, uuid)


async def test_many_who_begin_to_look_at_once_are_served_by_one_task(
    daemon: Daemon, kiwi: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly() -> bool:
        await asyncio.sleep(0.2)
        return False

    monkeypatch.setattr(kiwi.service._documents, "refresh", slowly)
    await asyncio.gather(*(ask("status") for _ in range(5)))
    tasks = [task for task in asyncio.all_tasks() if "_keep_reading" in repr(task)]
    assert len(tasks) == 1


async def test_after_a_pause_the_status_is_of_now(
    daemon: Daemon, kiwi: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_jupyter.server_ext.daemon_connections.IDLE_S", 0.2)
    await ask("status")
    await until(lambda: not kiwi.service.daemons.is_open, "nobody looks")
    with daemon.client() as client:
        client.set(tq_s=11)
    _, state = await ask("status")
    assert state["gpus"][0]["scheduler"]["tq_s"] == 11.0


# --- killed and restarted -----------------------------------------------------------------------


async def test_a_killed_daemon_is_shown_and_the_stream_goes_on(
    daemon: Daemon, program: Any, read: Any
) -> None:
    one = program(daemon, 16, name="a.ipynb")
    stream = await read()
    old = await stream.until(lambda s: s["gpus"] and s["gpus"][0]["history"])
    daemon.kill_all()
    gpu = await stream.until(lambda s: not s["gpus"][0]["reachable"] and s["gpus"][0])
    assert gpu["problem"]["code"]
    assert gpu["problem"]["remedy"]
    assert [session["name"] for session in gpu["sessions"]] == ["a.ipynb"], "the last known"
    daemon.start()
    back = await stream.until(lambda s: s["gpus"][0]["reachable"] and s["gpus"][0])
    assert back["problem"] is None
    assert back["daemon_pid"] != gpu["daemon_pid"]
    assert one.intact()
    new = await stream.until(
        lambda s: len(s["gpus"][0]["history"]) > len(old) and s["gpus"][0]["history"]
    )
    ids = [entry["id"] for entry in new]
    assert len(ids) == len(set(ids))
    assert {entry["id"] for entry in old} <= set(ids), "the timeline reaches behind the restart"
    assert len({id_.partition("-")[0] for id_ in ids}) == 2
    assert [message["type"] for message in stream.seen].count("snapshot") == 1


async def test_a_daemon_that_hangs_is_shown_as_away_until_it_goes_on(
    daemon: Daemon, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_follower, "PING_EVERY_S", 0.1)
    monkeypatch.setattr(daemon_follower, "ANSWER_S", 3.0)
    stream = await read()
    pid = await stream.until(lambda s: s["gpus"] and s["gpus"][0]["daemon_pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        away = await stream.until(lambda s: not s["gpus"][0]["reachable"] and s["gpus"][0])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert away["problem"]["remedy"]
    back = await stream.until(lambda s: s["gpus"][0]["reachable"] and s["gpus"][0])
    assert back["daemon_pid"] == pid


async def test_requests_to_a_daemon_that_is_away(daemon: Daemon, ask: Any, kiwi: Any) -> None:
    uuid = daemon.status().uuid
    await ask("status")
    assert daemon.process is not None
    child = daemon.status().daemon_pid
    daemon.process.send_signal(signal.SIGSTOP)  # stopped, it does not restart its child
    try:
        os.kill(child, signal.SIGKILL)
        await until(lambda: not kiwi.service.daemons._somebody_answers(), "it is noticed")
        for path, method in [("", "PATCH"), ("/sessions/x/release", "POST")]:
            code, said = await ask(f"gpus/{uuid}{path}", method, {"tq_s": 5} if not path else None)
            assert (code, said["code"]) == (503, "no-daemon")
        code, state = await ask("status")
        assert code == 200
        assert not state["gpus"][0]["reachable"]
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("traits", [{"autostart": False}])
async def test_one_that_leaves_is_forgotten_and_found_when_it_is_back(
    daemon: Daemon, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_connections, "FORGET_S", 0.5)
    stream = await read()
    await stream.until(lambda s: len(s["gpus"]) == 1)
    assert daemon.terminate() == 0
    await stream.until(lambda s: problem(s) == "no-daemon" and not s["gpus"])
    daemon.sizes = "2x64MiB"
    daemon.state_path.unlink(missing_ok=True)
    daemon.start()
    await stream.until(lambda s: problem(s) is None and len(s["gpus"]) == 2)
    assert [gpu["index"] for gpu in stream.state["gpus"]] == [0, 1]


@pytest.mark.parametrize("traits", [{"autostart": False}])
async def test_one_that_is_back_when_it_would_be_forgotten_has_one_connection(
    daemon: Daemon, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def counted(directory: Path) -> list[Path]:
        nonlocal looks
        looks += 1
        return discover(directory)

    discover = daemon_connections.discover
    monkeypatch.setattr(daemon_connections, "discover", counted)
    monkeypatch.setattr(daemon_connections, "RESCAN_S", 0.05)
    stream = await read()
    await stream.until(lambda s: len(s["gpus"]) == 1)
    assert daemon.terminate() == 0
    await stream.until(lambda s: not s["gpus"][0]["reachable"])
    daemon.start()  # The server, which runs in this event loop, has not looked yet.
    monkeypatch.setattr(daemon_connections, "FORGET_S", 0.0)
    await stream.until(lambda s: s["gpus"] and s["gpus"][0]["reachable"])
    looks = 0
    await until(lambda: looks >= 5, "the server has looked for other sockets")
    await until(lambda: connections(daemon) == 1, "one connection")


# --- starting -----------------------------------------------------------------------------------


@pytest.fixture
def nothing() -> Iterator[Path]:
    """Return a short private directory. Daemons that were started for it are gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    yield directory
    for process in daemons_for(directory):
        with suppress(psutil.NoSuchProcess):  # a child ends with its supervisor
            process.kill()
            process.wait(PATIENCE_S)
    # Their movers end by themselves, and remove their own files meanwhile.
    wait_until(lambda: _removed(directory), "its end")


def _removed(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def daemons_for(directory: Path) -> list[psutil.Process]:
    """Return supervisors first: once they have ended, they restart no child."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if any(str(directory) in word for word in process.info["cmdline"] or ())
    ]
    return sorted(found, key=lambda process: process.info["create_time"])


class TestWithoutADaemon:
    @pytest.fixture
    def socket_dir(self, nothing: Path) -> Path:
        return nothing / "sockets"

    @pytest.mark.parametrize("traits", [{"autostart": False}])
    async def test_no_daemon_is_a_problem_of_the_server(
        self, ask: Any, read: Any, socket_dir: Path
    ) -> None:
        code, state = await ask("status")
        assert (code, state["gpus"], problem(state)) == (200, [], "no-daemon")
        assert str(socket_dir) in state["server"]["problem"]["message"]
        stream = await read()
        await stream.until(lambda s: problem(s) == "no-daemon")
        code, said = await ask("gpus/GPU-1", "PATCH", {"tq_s": 5})
        assert (code, said["code"]) == (503, "no-daemon")

    async def test_a_machine_without_a_gpu_is_told_so(
        self, ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(config, "GPU_DEVICES", (str(tmp_path / "nvidiactl"),))
        _, state = await ask("status")
        assert problem(state) == "no-gpu", state["server"]
        assert "--emulate" in state["server"]["problem"]["remedy"]

    async def test_one_is_started_because_somebody_looks_and_not_before(
        self, kiwi: Any, read: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KIWI_DAEMON_ARGS", "--emulate 1x64MiB")
        assert not socket_dir.exists(), "the server's start starts nothing"
        stream = await read()
        gpu = await stream.until(lambda s: s["gpus"] and s["gpus"][0])
        assert gpu["emulated"]
        assert gpu["reachable"]
        assert gpu["may_set"]
        daemons_for(socket_dir)[0].terminate()
        await stream.until(lambda s: not s["gpus"][0]["reachable"])

    async def test_a_start_that_fails_is_said_and_not_repeated_in_a_loop(
        self, ask: Any, kiwi: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KIWI_DAEMON_ARGS", "--no-such-option")
        _, state = await ask("status")
        while problem(state) == "starting":
            await asyncio.sleep(0.1)
            _, state = await ask("status")
        assert problem(state) == "start-failed"
        assert "--no-such-option" in state["server"]["problem"]["message"]
        assert state["server"]["problem"]["remedy"]
        starts = 0

        def count(*_: Any) -> None:
            nonlocal starts
            starts += 1

        monkeypatch.setattr(daemon_connections, "autostart", count)
        monkeypatch.setattr(daemon_connections, "START_AGAIN_S", 3600.0)
        for _ in range(5):
            await ask("status")
        assert starts == 0
        monkeypatch.setattr(daemon_connections, "START_AGAIN_S", 0.0)
        await ask("status")
        assert starts == 1

    @pytest.mark.parametrize("traits", [{"autostart": False}])
    async def test_a_socket_that_nobody_serves(self, ask: Any, socket_dir: Path) -> None:
        socket_dir.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_dir / "GPU-1.sock"))
        _, state = await ask("status")
        assert (state["gpus"], problem(state)) == ([], "no-daemon")
        assert "GPU-1.sock" in state["server"]["problem"]["message"]


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_directory_that_one_may_not_look_into(tmp_path: Path, mode: int) -> None:
    """The test runs as nobody, because root may read every directory."""
    tmp_path.chmod(mode)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from kiwi_jupyter.server_ext.daemon_connections import DaemonConnections\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "never = lambda: False\n"
        "path = Path(sys.argv[1])\n"
        "look = DaemonConnections(path, autostarts=True, changed=never, watched=never)\n"
        "print(look.problem())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    tmp_path.chmod(0o700)
    assert "no-access" in done.stdout
    assert str(tmp_path) in done.stdout


class TestSwitchedOff:
    """KIWI_DISABLE in the server's environment, and so in its kernels'."""

    @pytest.fixture
    def traits(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("KIWI_DISABLE", "1")
        return {}

    async def test_disabled_is_a_problem_beside_the_gpus(self, daemon: Daemon, ask: Any) -> None:
        _, state = await ask("status")
        assert problem(state) == "disabled"
        assert len(state["gpus"]) == 1

    @pytest.mark.parametrize("socket_dir", [Path("/nonexistent")])
    async def test_no_daemon_is_started(
        self, kiwi: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KIWI_DAEMON_ARGS", "--emulate 1x64MiB")
        monkeypatch.setattr(
            daemon_connections, "autostart", lambda _: pytest.fail("it was started")
        )
        _, state = await ask("status")
        assert (state["gpus"], problem(state)) == ([], "disabled")
