"""Tests that a daemon which is there but does not answer is waited for: nobody goes on beside it,
and nobody starts another one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from daemon import wait_until
from patience import PATIENCE_S, die_with_the_test
from stopped import is_stopped, stopped

from kiwi_core.client.autostart import autostart
from kiwi_core.errors import PeerError, SilentDaemonError
from tests.support.kernels import running_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from daemon import Daemon

    Start = Callable[..., Daemon]

SIZES = "1x64MiB"
STARTABLE = {"KIWI_DAEMON_ARGS": f"--emulate {SIZES}"}
"""Whoever finds no daemon would start one."""

MUST_NOT_START = ["/bin/false"]
LONGER_THAN_ONE_TRY_S = 3.0


@contextmanager
def silent(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Stop the daemon's process during the block; yield what makes it go on earlier."""
    pid = daemon.status().daemon_pid
    with stopped(pid) as go_on:
        wait_until(lambda: is_stopped(pid), "it is stopped")
        yield go_on


@pytest.mark.parametrize("env", [{}, STARTABLE], ids=["whose", "own"])
def test_kiwi_run_waits_for_a_daemon_that_is_stopped(
    start: Start, tmp_path: Path, env: dict[str, str]
) -> None:
    daemon = start(SIZES)
    errors = tmp_path / "errors"
    with errors.open("wb") as file, silent(daemon):
        process = subprocess.Popen(
            [sys.executable, "-m", "kiwi_core.cli", "run", "--require", "--", "echo", "it ran"],
            env={**os.environ, **daemon.env, **env}, stdout=subprocess.PIPE, stderr=file,
            preexec_fn=die_with_the_test,
        )  # fmt: skip
        words = "The Kiwi daemon runs but does not answer. Waiting up to 60 s for it."
        wait_until(lambda: words in errors.read_text(), "it says what it waits for")
        assert process.poll() is None
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, b"it ran\n"), errors.read_text()


def test_a_kernel_waits_for_a_daemon_that_is_stopped(start: Start) -> None:
    daemon = start(SIZES)
    with running_kernel({**daemon.env, **STARTABLE}) as kernel:
        with silent(daemon):
            cell = kernel.send("from cuda.bindings import driver\nprint(driver.cuInit(0))")
            kernel.until(
                lambda: any(
                    "daemon, which runs but does not answer" in text for text in cell.displays()
                ),
                "it says what it waits for",
            )
            assert not cell.done
        kernel.finish(cell)
        assert "CUDA_SUCCESS" in cell.text
        assert "without Kiwi" not in cell.stream("stderr")
        daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [kernel.pid], "it has joined")


def test_nobody_starts_a_daemon_beside_one_that_is_stopped(start: Start) -> None:
    daemon = start(SIZES)
    began_s = time.monotonic()
    pid = daemon.status().daemon_pid
    with silent(daemon) as go_on:

        def waiting() -> None:
            if time.monotonic() - began_s > LONGER_THAN_ONE_TRY_S:
                go_on()

        found = autostart(daemon.directory, command=MUST_NOT_START, waiting=waiting)
    assert found == daemon.sockets()
    assert daemon.status().daemon_pid == pid


def test_a_daemon_that_hangs_is_not_waited_for_without_end(start: Start) -> None:
    daemon = start(SIZES)
    with (
        silent(daemon),
        pytest.raises(SilentDaemonError, match="runs but does not answer"),
    ):
        autostart(daemon.directory, timeout_s=1.0, command=MUST_NOT_START)


def test_a_silent_daemon_that_ends_is_replaced(start: Start) -> None:
    daemon = start(SIZES)
    began_s = time.monotonic()

    def waiting() -> None:
        if time.monotonic() - began_s > LONGER_THAN_ONE_TRY_S:
            daemon.stop()

    with (
        silent(daemon),
        pytest.raises(PeerError, match="ended at once with status 1"),
    ):
        autostart(daemon.directory, command=MUST_NOT_START, waiting=waiting)
