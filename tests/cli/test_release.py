"""Tests of ``kiwi release`` on real daemons with emulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from cli_process import PATIENCE_S, finish

from kiwi_core.client import Client, discover
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cli_process import Result

    Kiwi = Callable[..., Result]
    Spawn = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.timeout(PATIENCE_S * 3)

SESSION = """
import sys
from pathlib import Path
from kiwi_core.client import Client
client = Client(Path(sys.argv[1]), name="somebody")
client.connect()
print(client.status().index, flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
client.close()
"""


@pytest.fixture
def daemons(spawn: Spawn, sockets: Path) -> list[Path]:
    process = spawn("daemon", "--emulate", "2x64MiB", "--socket-dir", str(sockets))
    for _ in range(2):
        line = ""
        while "ready" not in line:
            line = process.stdout.readline()  # type: ignore[union-attr]
            assert line, finish(process).err
    return discover(sockets)


@contextmanager
def session(path: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Yield the session's id, and a function that makes it run code."""
    with subprocess.Popen(
        [sys.executable, "-c", SESSION, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()

        def do(code: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{code}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        with Client(path, role=Role.OBSERVER, reconnect=False) as observer:
            observer.connect()
            (one,) = observer.status().sessions
        yield one.id, do
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_sessions_of_several_gpus(daemons: list[Path], kiwi: Kiwi) -> None:
    with session(daemons[0]) as (one, _), session(daemons[1]) as (other, _):
        result = kiwi("release", one, other, one)
        assert (result.code, result.err) == (0, "")
        assert sorted(line.split(":")[0] for line in result.out.splitlines()) == sorted(
            [one, other]
        )
        result = kiwi("release", one, "k0123456789")
        assert result.code == 1
        assert f"{one}: its memory is out" in result.out
        assert "No GPU has a session 'k0123456789'" in result.err
        result = kiwi("release", "--gpu", daemons[1].stem, one)
        assert result.code == 1
        assert f"No GPU has a session {one!r}" in result.err


def test_one_in_the_middle_of_a_cell_is_refused(daemons: list[Path], kiwi: Kiwi) -> None:
    with session(daemons[0]) as (one, do):
        do("client.acquire()")
        result = kiwi("release", one)
        assert result.code == 1
        assert "nothing was moved" in result.err
        assert "Try again when its cell is over" in result.err
        do("client.end_burst()")
        assert kiwi("release", one).code == 0


def test_no_daemon(kiwi: Kiwi) -> None:
    result = kiwi("release", "k0123456789")
    assert result.code == 1
    assert "No Kiwi daemon" in result.err


def test_a_session_by_its_name(daemons: list[Path], kiwi: Kiwi) -> None:
    """Not where two have it: their ids are said."""
    with session(daemons[0]) as (first, _):
        assert kiwi("suspend", "somebody").code == 0
        assert kiwi("resume", "somebody").code == 0
        assert kiwi("set", "--session", "somebody", "priority=low").code == 0
        with session(daemons[1]) as (second, _):
            for command in (
                ("suspend", "somebody"),
                ("set", "--session", "somebody", "priority=high"),
            ):
                refused = kiwi(*command)
                assert refused.code == 1
                assert first in refused.err
                assert second in refused.err
            assert kiwi("suspend", second).code == 0


def test_set_alone_says_what_is_set(daemons: list[Path], kiwi: Kiwi) -> None:
    result = kiwi("set")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("quantum 30 s") == len(daemons)
