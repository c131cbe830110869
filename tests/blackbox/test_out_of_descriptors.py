"""Tests that paged-out programs lose nothing when the daemon runs out of descriptors."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from kiwi_box import ANSWERING, running_box, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DESCRIPTORS = 64
TAKEN_MIB = 150
HELLO = {"type": "hello", "protocol": 1, "role": "observer", "client": "test"}
LOOKS_FOR_S = 12.0
"""Twice the interval between two of the daemon's periodic looks."""


def test_programs_that_are_out_come_back() -> None:
    """The daemon still knows their sizes. Otherwise they would wait for an unused GPU, and a
    program outside Kiwi uses it all the time."""
    # Round robin: under the other policy the one that is out may go first in spite of its quantum.
    settings = ("--tq", "2", "--policy", "round-robin")
    with running_box("1x256MiB", *settings, descriptors=DESCRIPTORS) as box, ExitStack() as calls:
        outside = box.outside(ANSWERING)
        assert outside.get("take(2)") == "None"
        first, second = box.program("first"), box.program("second")
        assert first.get(f"take({TAKEN_MIB})") == "None"
        assert second.get(f"take({TAKEN_MIB})") == "None"
        box.set("tq=600")
        status = wait_until(lambda: one_is_out(box.status_or_none()), "one is out")
        (path,) = box.directory.glob("*.sock")
        for _ in range(2 * DESCRIPTORS):
            calls.enter_context(call(path))
        time.sleep(LOOKS_FOR_S)
        calls.close()
        after = wait_until(box.status_or_none, "the daemon answers")
        assert after["daemon_pid"] == status["daemon_pid"], box.log()
        assert out_bytes(after) == out_bytes(status), f"{status}\n{after}\n{box.log()}"
        box.set("tq=2")
        assert first.get("intact()", 90.0) == "True"
        assert second.get("intact()", 90.0) == "True"


def one_is_out(status: dict[str, Any] | None) -> dict[str, Any] | None:
    """Both sizes are known: what was never read would count as memory outside Kiwi, and a daemon
    that believes the GPU full takes what rests of the one that is out."""
    sizes = {
        session["state"]: session[
            "resident_bytes" if session["state"] == "running" else "paged_out_bytes"
        ]
        for session in (status or {"sessions": ()})["sessions"]
    }
    known = set(sizes) == {"running", "suspended"} and min(sizes.values()) >= TAKEN_MIB << 20
    return status if known else None


def out_bytes(status: dict[str, Any]) -> dict[str, int]:
    return {session["id"]: session["paged_out_bytes"] for session in status["sessions"]}


@contextmanager
def call(path: Path) -> Iterator[None]:
    """Keep a connection open, whether or not it is answered."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(5.0)
        with suppress(OSError):
            one.connect(str(path))
            one.sendall(json.dumps(HELLO).encode() + b"\n")
        yield
