"""Tests of how daemons begin, end, are killed, and follow one another."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import PATIENCE_S, wait_until

from kiwi_core.client import Client
from kiwi_core.errors import PeerError
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def kiwi_daemon(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kiwi_core.cli", "daemon", *args], env={**os.environ, **env},
        capture_output=True, text=True, timeout=PATIENCE_S * 2, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def short() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


# --- beginning ----------------------------------------------------------------------------------


def test_a_second_one_says_that_the_first_runs(start: Start) -> None:
    daemon = start("1x64MiB")
    place = ("--socket-dir", str(daemon.directory))
    pid = daemon.status().daemon_pid
    second = kiwi_daemon("--emulate", "1x64MiB", *place)
    assert second.returncode == 1
    assert f"already running (pid {pid})" in second.stdout + second.stderr
    other_size = kiwi_daemon("--emulate", "1x128MiB", *place)
    assert other_size.returncode != 0
    assert "still use emulated GPUs of other sizes" in other_size.stderr
    assert daemon.status().daemon_pid == pid
    assert daemon.status().memory.total_bytes == 64 << 20


def test_no_gpu_is_said_plainly(short: Path) -> None:
    result = kiwi_daemon("--socket-dir", str(short), LD_LIBRARY_PATH="")
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert "NVIDIA" in result.stderr


def test_stale_files_of_a_dead_daemon_are_in_nobodys_way(start: Start) -> None:
    daemon = start("1x64MiB")
    daemon.kill_all()
    assert daemon.sockets(), "left behind by the kill"
    daemon.start()
    assert daemon.terminate() == 0
    assert not daemon.sockets()


@pytest.mark.parametrize("what", ["file", "link", "open to all", "too long", "under a file"])
def test_unusable_directories_are_refused_with_words(short: Path, what: str) -> None:
    place = short / "d"
    if what == "file":
        place.write_text("")
    elif what == "link":
        (short / "real").mkdir()
        place.symlink_to(short / "real")
    elif what == "open to all":
        place.mkdir()
        place.chmod(0o777)
    elif what == "too long":
        place = short / ("x" * 100)
    else:
        place.write_text("")
        place = place / "d"
    result = kiwi_daemon("--emulate", "1x64MiB", "--socket-dir", str(place))
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert "Traceback" not in said
    assert str(place) in said
    assert "--socket-dir" in said or "chmod" in said or "is a link" in said


@as_root
def test_a_directory_of_somebody_else_is_refused(short: Path) -> None:
    place = short / "d"
    place.mkdir()
    os.chown(place, 12345, 12345)
    result = kiwi_daemon("--emulate", "1x64MiB", "--socket-dir", str(place))
    assert result.returncode != 0
    assert "belongs to another user" in result.stderr


def test_a_directory_where_a_socket_should_be_is_refused_with_words(start: Start) -> None:
    daemon = start("1x64MiB")
    (path,) = daemon.sockets()
    assert daemon.terminate() == 0
    path.mkdir()
    result = kiwi_daemon("--emulate", "1x64MiB", "--socket-dir", str(daemon.directory))
    said = result.stdout + result.stderr
    assert result.returncode == 1
    assert "Cannot listen" in said
    assert "Traceback" not in said


def test_two_gpus_and_the_choice_of_one(start: Start) -> None:
    daemon = start("2x64MiB")
    first, second = daemon.status(0), daemon.status(1)
    assert first.uuid != second.uuid
    assert first.daemon_pid != second.daemon_pid
    os.kill(second.daemon_pid, signal.SIGKILL)
    assert _pid_of(daemon, first.uuid) == first.daemon_pid
    wait_until(lambda: _pid_of(daemon, second.uuid) not in (0, second.daemon_pid), "another")
    assert daemon.terminate() == 0
    place = ("--socket-dir", str(daemon.directory), "--emulate", "2x64MiB")
    unique = second.uuid.removeprefix("GPU-")[:8]
    with subprocess.Popen(
        [sys.executable, "-m", "kiwi_core.cli", "daemon", *place, "--gpu", unique],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "ready" in line)
        assert second.uuid in ready
        assert [path.stem for path in daemon.sockets()] == [second.uuid]
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    nonsense = kiwi_daemon(*place, "--gpu", "7")
    assert nonsense.returncode != 0
    assert "'7' is no GPU" in nonsense.stderr
    assert first.uuid in nonsense.stderr


def _pid_of(daemon: Daemon, uuid: str) -> int:
    try:
        path = daemon.directory / f"{uuid}.sock"
        with Client(path, role=Role.OBSERVER, connect_timeout_s=PATIENCE_S) as client:
            client.connect()
            return client.status(PATIENCE_S).daemon_pid
    except Exception:  # noqa: BLE001  (it is just starting)
        return 0


# --- what it finds in its state directory -------------------------------------------------------


def test_a_full_disk_costs_the_journal_not_the_sessions(
    start: Start, program: Program, short: Path
) -> None:
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to mount a small file system")
    small = short / "small"
    small.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(small)],
        capture_output=True, text=True,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr}")
    try:
        daemon = start("1x256MiB", "--tq", "0.3", "--state-dir", str(small))
        first = program(daemon, 150)
        (small / "filler").write_bytes(b"x" * (40 << 10))
        with (small / "more").open("wb", buffering=0) as more:
            try:
                while True:
                    more.write(b"x" * 512)
            except OSError:
                pass
        second = program(daemon, 150)
        assert first.intact()
        assert second.intact()
        assert first.intact()
        for words in ("journal lost", "state directory cannot be written"):
            daemon.wait_for(lambda s, words=words: words in " ".join(s.errors), words)
        (small / "filler").unlink()
        (small / "more").unlink()
        assert second.intact()
        daemon.wait_for(lambda s: "state directory" not in " ".join(s.errors), "mended")
        assert daemon.terminate() == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# --- ending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signalled_daemon_pages_in_whatever_has_room(
    start: Start, program: Program, number: signal.Signals
) -> None:
    daemon = start("1x256MiB", "--tq", "0.3")
    a, b, c = program(daemon, 100), program(daemon, 100), program(daemon, 100)
    for one in (a, b, c):
        one.start_burst()
    daemon.wait_for(lambda s: sum(bool(x.suspensions) for x in s.sessions) >= 2, "suspensions")
    assert daemon.process is not None
    daemon.process.send_signal(number)
    assert daemon.process.wait(90) == 0
    log = daemon.log()
    books = {p.pid: p.state for p in daemon.books().processes}
    out = [one for one in (a, b, c) if books[one.pid] != 0]
    assert len(out) == 1, "two of three fit"
    assert log.count("stays paged out") == 1
    assert "start the daemon again" in log
    # Those in mid-burst continue; one whose burst had not begun waits for a daemon.
    back = [one for one in (a, b, c) if one not in out]
    for one in filter(lambda one: one.granted(), back):
        mark = one.rounds()
        wait_until(lambda one=one, mark=mark: one.rounds() > mark, "it runs without a daemon")
    daemon.start()
    for one in (a, b, c):
        mark = one.rounds()
        wait_until(lambda one=one, mark=mark: one.rounds() > mark, "its burst goes on")
        one.stop_burst()
    assert all(one.intact() for one in (a, b, c))


def test_repeated_crashes_keep_the_live_settings(start: Start) -> None:
    daemon = start("1x64MiB", "--tq", "5", "--anti-thrash", "always")
    client = daemon.client()
    client.set(tq_s=7.5)
    client.set(anti_thrash=AntiThrash.OFF)
    client.set(policy="interactive")
    with pytest.raises(PeerError, match="There is no policy 'best'"):
        client.set(policy="best")
    with pytest.raises(PeerError, match="There is no session"):
        client.set(session="k0", priority=Priority.HIGH)
    client.close()
    for _ in range(3):
        old = daemon.kill_child()
        daemon.wait_for(lambda s, old=old: s.daemon_pid != old, "another daemon")
        scheduler = daemon.status().scheduler
        assert (scheduler.tq_s, scheduler.anti_thrash) == (7.5, AntiThrash.OFF)
        assert scheduler.policy == "interactive"
    assert daemon.log().count("again in 0.1 s") == 1
    assert daemon.log().count("again in 0.5 s") == 1
    assert daemon.log().count("again in 2.0 s") == 1
    assert daemon.terminate() == 0
    # A new start obeys its command line; without an option, the earlier setting stays.
    daemon.args = ("--tq", "9")
    daemon.start()
    scheduler = daemon.status().scheduler
    assert (scheduler.tq_s, scheduler.anti_thrash) == (9, AntiThrash.OFF)
    assert scheduler.policy == "interactive"


def test_a_supervisor_can_be_ended_during_its_back_off(start: Start) -> None:
    daemon = start("1x64MiB")
    for expected in ("0.1 s", "0.5 s", "2.0 s"):
        daemon.kill_child()
        wait_until(lambda expected=expected: f"again in {expected}" in daemon.log(), "back-off")
        if expected != "2.0 s":
            wait_until(lambda: _pid_of(daemon, _uuid(daemon)) != 0, "it runs again")
    assert daemon.terminate(timeout_s=PATIENCE_S) == 0


def _uuid(daemon: Daemon) -> str:
    return daemon.books().gpus[0].uuid  # type: ignore[no-any-return]
