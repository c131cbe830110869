"""Other users of the machine, for tests that run as root."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from talker import HELLO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALICE, BOB = 54321, 54322
"""User ids without names, which the kernel accepts."""

PROGRAM = """
import json, os, socket, sys, threading
if {group!r}:
    open({group!r}, "w").write(str(os.getpid()))
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    sock.connect({path!r})
except OSError as error:
    print(json.dumps({{"refused": error.errno}}), flush=True)
    raise SystemExit
def hear():
    try:
        for line in sock.makefile("rb"):
            print(line.decode().strip(), flush=True)
    except OSError:
        pass  # reset: closed, too
    print('"closed"', flush=True)
threading.Thread(target=hear, daemon=True).start()
for line in sys.stdin:
    try:
        sock.sendall(line.encode())
    except OSError:
        pass  # closed: the other thread says so
"""
"""Program that passes on all messages of the daemon, also those that answer no request."""


class Somebody:
    """A process of user ``uid`` with one connection; it uses only the standard library. ``group``
    is the directory of the control group that it joins first."""

    def __init__(
        self, path: Path, uid: int, gid: int | None = None, group: Path | None = None
    ) -> None:
        procs = str(group / "cgroup.procs") if group else ""
        gid = uid if gid is None else gid
        code = PROGRAM.format(uid=uid, gid=gid, path=str(path), group=procs)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, kind: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"type": kind, **fields}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def hello(self, **fields: Any) -> Any:
        return self.ask(**{"kind": "hello", **HELLO, **fields, "type": "hello"})

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def somebody() -> Iterator[Callable[..., Somebody]]:
    """Make processes of other users, and kill them after the test."""
    made: list[Somebody] = []

    def make(path: Path, uid: int) -> Somebody:
        made.append(Somebody(path, uid))
        return made[-1]

    yield make
    for one in made:
        one.kill()
