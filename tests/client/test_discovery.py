"""Which sockets are there, and which of them can be trusted."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import discover
from tests.client.scripted_daemon import ScriptedDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def test_no_directory_no_sockets(tmp_path: Path) -> None:
    assert discover(tmp_path / "none") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_socket_is_not_trusted(two: Path) -> None:
    os.chown(two / f"{A}.sock", 12345, 12345)
    assert names(discover(two)) == [A, B], "root's directory: only root can have let it in"
    os.chown(two, 12345, 12345)
    assert names(discover(two)) == [B]
