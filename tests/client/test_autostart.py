"""Tests of starting a daemon if there is none: once, in a safe place, with a reason if it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client.autostart import ENV_DAEMON_ARGS, autostart
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.messages import Hello
from tests.client.scripted_daemon import PATIENCE_S, ScriptedDaemon, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.wire.messages import ClientMessage
    from tests.client.scripted_daemon import Peer

# A whole daemon process: it prints where it is and what it was given, and answers hellos.
DAEMON = """
import os, sys, time
from pathlib import Path
directory = Path(sys.argv[1])
with open(directory / "pids", "a") as pids:
    pids.write(f"{os.getpid()} {os.getppid()} {os.getsid(0)} {os.getcwd()}\\n")
print("starting", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
from tests.client.scripted_daemon import ScriptedDaemon
ScriptedDaemon(directory / "GPU-7.sock").start()
print("ready", flush=True)
time.sleep(600)
"""
ROOT = str(Path(__file__).parents[2])
PYTHONPATH = os.pathsep.join((ROOT, f"{ROOT}/tests/support"))


def command(directory: Path, source: str = DAEMON) -> list[str]:
    return [sys.executable, "-c", source, str(directory)]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "run" / "kiwi"
    yield directory
    for pid in _pids(directory):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        eventually(lambda: not _alive(pid))  # noqa: B023


def _pids(directory: Path) -> list[int]:
    try:
        return [int(line.split()[0]) for line in (directory / "pids").read_text().splitlines()]
    except OSError:
        return []


def _alive(pid: int) -> bool:
    """Return whether it runs; without a reaper, an orphan may stay a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def env(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **more}


def test_a_daemon_is_started_once_for_many(directory: Path) -> None:
    results: list[object] = []

    def start() -> None:
        try:
            results.append(
                autostart(directory, env=env(CUDA_VISIBLE_DEVICES="3"), command=command(directory))
            )
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [[directory / "GPU-7.sock"]] * 5
    assert len(_pids(directory)) == 1
    pid, _, session, cwd = (directory / "pids").read_text().split()
    assert session == pid, "a session of its own: no terminal's signals reach it"
    assert cwd == "/"
    assert directory.stat().st_mode & 0o777 == 0o700
    log = directory / "daemon.log"
    assert log.read_text().splitlines() == ["starting None", "ready"]
    assert log.stat().st_mode & 0o777 == 0o600
    eventually(lambda: _parent(int(pid)) != os.getpid())
    assert _alive(int(pid))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_the_daemon_outlives_its_starter_and_is_not_its_child(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from kiwi_core.client.autostart import autostart\n"
        "autostart(Path(sys.argv[1]), command=[sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(directory), DAEMON],
        env=env(), check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    (pid,) = _pids(directory)
    assert _alive(pid)
    assert autostart(directory, command=["/bin/false"]) == [directory / "GPU-7.sock"]


def test_a_daemon_that_ends_tells_why(directory: Path) -> None:
    source = "print('first line'); raise SystemExit('no GPU here')"
    with pytest.raises(PeerError) as caught:
        autostart(directory, command=command(directory, source))
    assert caught.value.code == "no-daemon"
    assert "no GPU here" in str(caught.value)
    assert "first line" in str(caught.value)
    assert "status 1" in str(caught.value)
    assert str(directory / "daemon.log") in caught.value.remedy


def test_a_daemon_that_answers_when_the_started_one_gives_way_is_found(directory: Path) -> None:
    """A daemon whose socket was gone makes it again when another one starts, which then ends. Here
    it answers only after that end, and the second look has begun before."""
    asked, parent = directory / "asked", directory / "parent"
    source = (
        "import os, sys, time\n"
        f"open({str(parent)!r} + '.new', 'w').write(str(os.getppid()))\n"
        f"os.rename({str(parent)!r} + '.new', {str(parent)!r})\n"
        f"while not os.path.exists({str(asked)!r}): time.sleep(0.01)\n"
        "raise SystemExit('already running')"
    )

    def answer(peer: Peer, message: ClientMessage) -> None:
        looks = len(daemon.received(Hello))
        if looks > 2:
            daemon.obey(peer, message)
            return
        if looks == 2:
            eventually(parent.exists)
            asked.touch()
            eventually(lambda: not _alive(int(parent.read_text())))
        peer.drop()

    directory.mkdir(parents=True, mode=0o700)
    daemon = ScriptedDaemon(directory / "GPU-7.sock")
    daemon.script = answer
    daemon.start()
    try:
        assert autostart(directory, env=env(), command=command(directory, source)) == [daemon.path]
    finally:
        daemon.stop()


def test_the_words_of_an_earlier_start_are_not_shown_again(directory: Path) -> None:
    for word in ("word-one", "word-two"):
        with pytest.raises(PeerError) as caught:
            autostart(directory, command=command(directory, f"raise SystemExit('{word}')"))
    assert "word-two" in str(caught.value)
    assert "word-one" not in str(caught.value)


def test_a_program_that_cannot_run_is_told(directory: Path) -> None:
    with pytest.raises(PeerError, match=r"cannot run /nonexistent"):
        autostart(directory, command=["/nonexistent"])


def test_a_slow_daemon_is_not_waited_for_without_end(directory: Path) -> None:
    source = "import os, time; print('hm', flush=True); time.sleep(600)"
    source = source.replace("time.sleep", "open('%s/pids','w').write(f'{os.getpid()} ');time.sleep")
    with pytest.raises(PeerError, match="too long"):
        autostart(directory, timeout_s=1.0, command=command(directory, source % directory))
    eventually(lambda: _pids(directory))


def test_a_stale_socket_is_not_a_daemon(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    stale = ScriptedDaemon(directory / "GPU-7.sock")
    stale.start()
    stale.stop()
    assert stale.path.exists()
    assert autostart(directory, env=env(), command=command(directory)) == [stale.path]
    assert len(_pids(directory)) == 1


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(CallerError, match="written by others") as caught:
        autostart(directory, command=["/bin/false"])
    assert caught.value.code == "unsafe-directory"


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.parent.mkdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(CallerError, match="is not a directory"):
        autostart(directory, command=["/bin/false"])


def test_a_place_where_nothing_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CallerError, match="cannot be made"):
        autostart(tmp_path / "file" / "kiwi", command=["/bin/false"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    os.chown(directory, 12345, 12345)
    with pytest.raises(CallerError, match="belongs to another user"):
        autostart(directory, command=["/bin/false"])


def test_arguments_come_from_the_environment(directory: Path) -> None:
    with pytest.raises(CallerError, match=ENV_DAEMON_ARGS):
        autostart(directory, env=env(**{ENV_DAEMON_ARGS: "--tq 'half"}))
    with pytest.raises(PeerError, match="frobnicate"):
        autostart(directory, env=env(**{ENV_DAEMON_ARGS: "--frobnicate 'x y'"}))
