"""Tests of connections that send nothing, at a daemon's socket and at the port of ``--metrics``."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from patience import wait_until
from unprivileged import (
    BOB,
    PATIENCE_S,
    RootDaemon,
    bursts,
    crowd,
    flood,
    needs_other_users,
    root_daemon,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE = 400
"""More than a supervisor with the usual limit of descriptors could keep."""

FEW_DESCRIPTORS = 256


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[RootDaemon]:
    needs_other_users()
    with root_daemon() as one:
        yield one
        assert "crashed" not in one.log()


@pytest.mark.parametrize("kind", ["(connect without a word)", "(connect and close)"])
def test_connecting_in_a_loop_hinders_nobody(daemon: RootDaemon, kind: str) -> None:
    pid = daemon.status()["daemon_pid"]
    with flood(daemon, kind, processes=2):
        time.sleep(2.0)
        seen = bursts(daemon, 20, uid=BOB)
        assert len(seen["grants_s"]) == 20
        assert descriptors(pid) < 1000
        assert daemon.status(BOB)
    wait_until(lambda: descriptors(pid) < 200, "all of it closed")


def test_a_silent_connection_is_closed_soon(daemon: RootDaemon) -> None:
    pid = daemon.status()["daemon_pid"]
    before = descriptors(pid)
    with crowd(daemon, "silent", 2000) as said:
        assert said == {"connected": 2000}
        assert descriptors(pid) < before + 1000
        wait_until(lambda: descriptors(pid) <= before + 8, "the silent ones are gone")


@pytest.fixture
def serving() -> Iterator[tuple[RootDaemon, str]]:
    """Run a daemon with few descriptors that serves metrics; yield both and their address."""
    with root_daemon("--metrics", "127.0.0.1:0", descriptors=FEW_DESCRIPTORS) as one:
        found = re.search(r"metrics at (http://\S+)", one.log())
        assert found, one.log()
        yield one, found[1]


def test_idle_scrapers_cost_the_supervisor_little(serving: tuple[RootDaemon, str]) -> None:
    """They connect and send nothing, or a byte at times. A daemon that is killed meanwhile is
    restarted, and the metrics are served."""
    daemon, url = serving
    supervisor = daemon.process.pid
    host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
    crowd = []
    try:
        for number in range(IDLE):
            crowd.append(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            if number % 2:
                crowd[-1].sendall(b"G")
        wait_until(lambda: threads(supervisor) > 10, "some of them are heard")
        assert descriptors(supervisor) < 100
        assert threads(supervisor) < 60
        (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        wait_until(lambda: daemon.log().count("ready: GPU") == 2, "started again")

        def scraped() -> bool:
            try:
                with urlopen(url, timeout=PATIENCE_S) as answer:
                    return "kiwi_up" in answer.read().decode()
            except OSError:  # there is no place at the moment
                return False

        assert wait_until(scraped, "a scrape")
        wait_until(lambda: threads(supervisor) < 10, "none is kept for ever")
    finally:
        for one in crowd:
            one.close()
