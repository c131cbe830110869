"""Tests of ``kiwi logs`` for a daemon that was started automatically."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_process import finish
from patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_process import Result


@pytest.fixture
def log(sockets: Path) -> Path:
    path = sockets / "daemon.log"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    return path


def test_the_last_lines(kiwi: Callable[..., Result], log: Path) -> None:
    assert kiwi("logs").out.splitlines() == [f"line {number}" for number in range(60, 100)]
    assert kiwi("logs", "-n", "2").out == "line 98\nline 99\n"
    assert kiwi("logs", "--lines", "0").out == ""
    assert kiwi("logs", "-n", "-1").code == 2


def test_it_does_not_steer_the_terminal(kiwi: Callable[..., Result], log: Path) -> None:
    log.write_bytes(b"evil \x1b[2J \xff\n")
    assert kiwi("logs").out == "evil \N{REPLACEMENT CHARACTER}[2J \N{REPLACEMENT CHARACTER}\n"


def test_without_a_log_it_says_where_else_to_look(
    kiwi: Callable[..., Result], sockets: Path
) -> None:
    result = kiwi("logs")
    assert result.code == 1
    assert str(sockets) in result.err
    assert "journalctl -u kiwi" in result.err


def test_a_link_is_not_followed(kiwi: Callable[..., Result], sockets: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (sockets / "daemon.log").symlink_to(tmp_path / "secret")
    result = kiwi("logs")
    assert (result.code, result.out) == (1, "")


def _bytes_read(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def test_it_follows_what_comes_also_when_the_log_is_begun_anew(spawn: Callable, log: Path) -> None:
    process = spawn("logs", "--follow", "-n", "1")
    assert process.stdout.readline() == "line 99\n"
    with log.open("a") as file:
        before = _bytes_read(process.pid)
        file.write("a new")
        file.flush()
        # An incomplete line must not be shown.
        wait_until(lambda: _bytes_read(process.pid) >= before + len("a new"), "it reads")
        file.write(" one\n")
    assert process.stdout.readline() == "a new one\n"
    log.write_text("begun anew\n")
    assert process.stdout.readline() == "begun anew\n"
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.code, result.err) == (130, "")
