"""Tests of which sockets exist, and which of them can be trusted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client, discover, discovery
from kiwi_core.client.directory import LEFT_LATELY_S, signs_of_a_daemon, why_no_sockets
from kiwi_core.errors import PeerError, SilentDaemonError, is_full
from kiwi_core.wire.messages import Error, Role
from tests.client.scripted_daemon import ScriptedDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

A, B = "GPU-aaaa1111-0000", "GPU-aaab2222-0000"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Path]:
    daemons = [
        ScriptedDaemon(tmp_path / f"{A}.sock", index=1),
        ScriptedDaemon(tmp_path / f"{B}.sock", index=0),
    ]
    for daemon in daemons:
        daemon.start()
    yield tmp_path
    for daemon in daemons:
        daemon.stop()


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_all_sockets_by_name(two: Path) -> None:
    (two / "state").mkdir()
    (two / "start.lock").write_text("")
    (two / "notes.sock").write_text("a file, not a socket")
    (two / "link.sock").symlink_to(two / f"{A}.sock")
    assert names(discover(two)) == [A, B]


@pytest.mark.parametrize(
    ("gpu", "found"),
    [
        (A, [A]),
        (A.lower(), [A]),
        ("GPU-aaab", [B]),
        ("aaaa", [A]),
        ("GPU-aaa", [A, B]),
        ("GPU-c", []),
        ("0", [B]),
        ("1", [A]),
        ("7", []),
    ],
)
def test_narrowed_to_a_gpu(two: Path, gpu: str, found: list[str]) -> None:
    assert names(discover(two, gpu)) == found


def test_a_dead_daemon_has_no_index(two: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(two / "GPU-dead.sock"))
    assert names(discover(two, "0")) == [B]
    assert len(discover(two)) == 3


FULL = Error(code="too-many-connections", message="Full.", remedy="Wait.", fatal=True)


def full_daemon(path: Path) -> ScriptedDaemon:
    """Return a daemon that refuses every connection."""
    daemon = ScriptedDaemon(path)
    daemon.script = lambda peer, _message: peer.say(FULL)
    daemon.start()
    return daemon


@pytest.mark.parametrize("name", ["GPU-aaaa0000", "GPU-zzzz0000"])
def test_a_full_daemon_hides_no_other(two: Path, name: str) -> None:
    daemon = full_daemon(two / f"{name}.sock")
    try:
        assert names(discover(two, "0")) == [B]
        assert names(discover(two, "1")) == [A]
        with pytest.raises(PeerError) as caught:
            discover(two, "2")
        assert is_full(caught.value), "it may be that one"
    finally:
        daemon.stop()


def test_a_daemon_that_does_not_answer_hides_no_other(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ASK_TIMEOUT_S", 0.3)
    daemon = ScriptedDaemon(two / "GPU-aaaa0000.sock")
    daemon.script = lambda _peer, _message: None
    daemon.start()
    try:
        assert names(discover(two, "1")) == [A]
        with pytest.raises(SilentDaemonError):  # it may be that one
            discover(two, "2")
    finally:
        daemon.stop()


def test_no_directory_no_sockets(tmp_path: Path) -> None:
    assert discover(tmp_path / "none") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_socket_is_not_trusted(two: Path) -> None:
    os.chown(two / f"{A}.sock", 12345, 12345)
    assert names(discover(two)) == [B]
    os.chown(two, 12345, 12345)
    assert names(discover(two)) == []


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_has_none(two: Path, mode: int) -> None:
    two.chmod(mode)
    assert discover(two) == []
    assert "can be written by others" in why_no_sockets(two)
    two.chmod(0o755)
    assert names(discover(two)) == [A, B]
    assert why_no_sockets(two) == ""


def test_a_link_to_a_directory_has_none(two: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(two)
    assert discover(link) == []
    assert "a link is not followed" in why_no_sockets(link)


LISTENER = """
import os, socket, sys
os.setgid(12345); os.setuid(12345)
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1]); sock.listen()
print("ready", flush=True)
while True:
    peer = sock.accept()[0]
    peer.sendall(b'{"type":"welcome"}\\n')
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_peer_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    """The directory may be exchanged between the check and the connection."""
    path = Path(tempfile.mkdtemp(prefix="kw-", dir="/tmp")) / f"{A}.sock"
    os.chown(path.parent, 12345, 12345)
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(path)], stdout=subprocess.PIPE, cwd="/"
    ) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"ready\n"
            os.chown(path, 0, 0)
            os.chown(path.parent, 0, 0)
            assert discover(path.parent) == [path]
            with pytest.raises(PeerError, match="belongs to another user") as caught:
                Client(path, role=Role.OBSERVER).connect()
            assert caught.value.code == "not-trusted"
        finally:
            stranger.kill()
            shutil.rmtree(path.parent)


def test_signs_of_a_daemon(two: Path) -> None:
    before = signs_of_a_daemon(two)
    assert {name for name, *_ in before} == {f"{A}.sock", f"{B}.sock"}
    assert signs_of_a_daemon(two) == before
    (two / f"{A}.sock").unlink()
    assert signs_of_a_daemon(two) < before
    lock = two / f"{A}.lock"
    lock.write_text("")
    assert f"{A}.lock" in {name for name, *_ in signs_of_a_daemon(two)}
    long_ago_s = lock.stat().st_mtime - LEFT_LATELY_S - 60
    os.utime(lock, (long_ago_s, long_ago_s))
    assert signs_of_a_daemon(two) < before
    (two / "start.lock").write_text("")
    assert signs_of_a_daemon(two) < before
    two.chmod(0o777)
    assert signs_of_a_daemon(two) == frozenset()
    assert signs_of_a_daemon(two / "none") == frozenset()
