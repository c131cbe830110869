"""Tests of the link under the sanitizers.

Threads send requests while a daemon sends orders and nonsense, and cuts the connection. See
``stress.c``.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pager_daemon import PagerDaemon, Peer
from sanitizing import SOURCES, compile_with

PROGRAM = Path(__file__).with_name("stress.c")
PARTS = ("base/daemon.c", "base/fork.c", "base/log.c", "gate/*.c", "link/*.c")
CONNECTIONS, ROUNDS = 4, 1000
"""Least connections that the program makes, and times that its threads pass the gate, before it
ends: numbers and not a time, so that a slow machine does as much."""


def act(draw: random.Random, daemon: PagerDaemon) -> None:
    peers = [peer for peer in daemon.peers if not peer.ended]
    if not peers:
        time.sleep(0.0005)
        return
    peer: Peer = peers[-1]
    match draw.randrange(12):
        case 0:
            peer.drop()
        case 1:
            peer.say_bytes(draw.randbytes(50) + b"\n")
        case 2 | 3 | 4:
            peer.say("gate", open=draw.random() < 0.5)
        case 5 | 6:
            for asked in peer.of("want-room")[-3:]:
                granted = draw.random() < 0.5
                peer.say("room", request=asked["request"], granted=granted, detail="")
        case _:
            action = draw.choice(["hold", "free", "page-out", "page-in", "page-in"])
            if draw.random() < 0.2:
                peer.say("pager-limits", arena_bytes=draw.randrange(-1, 9))
            op = peer.begin(action, within_s=draw.choice([0.0, 0.001, 1.0]))
            if draw.random() < 0.8:
                while not peer.ended and not any(m["op"] == op for m in peer.of("pager-done")):
                    time.sleep(0.0005)


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_sanitizer_complains(tmp_path: Path, sanitizers: str) -> None:
    sources = [path for names in PARTS for path in sorted(SOURCES.glob(names))]
    target = compile_with(sanitizers, tmp_path, [PROGRAM, *sources])
    with tempfile.TemporaryDirectory(prefix="kiwi-") as directory:
        daemon = PagerDaemon(
            Path(directory, f"GPU-{'-'.join('0' * n for n in (8, 4, 4, 4, 12))}.sock")
        )
        daemon.start()
        environment = os.environ | {
            "KIWI_SOCKET_DIR": directory,
            "KIWI_PRELOAD_LOG": str(tmp_path / "log"),
            "ASAN_OPTIONS": "detect_leaks=0",  # memory on a thread's stack at exit is no leak
        }
        with subprocess.Popen(
            [target, str(ROUNDS)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as program:
            draw = random.Random(4)
            while program.poll() is None:
                act(draw, daemon)
                if len(daemon.peers) >= CONNECTIONS and program.stdin is not None:
                    program.stdin.close()
                    program.stdin = None  # for ``communicate``
            out, err = program.communicate()
        daemon.stop()
    assert program.returncode == 0, err[-6000:]
    assert int(out) >= ROUNDS
    assert daemon.faults == []
