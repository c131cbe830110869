"""Tests of daemons that are started by a program with closed streams, or with odd signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from patience import PATIENCE_S, die_with_the_test, wait_until

import kiwi_emulator as emulator
from kiwi_core.client import Client
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from pathlib import Path


def closed_streams() -> None:
    for descriptor in range(3):
        os.close(descriptor)


def blocked_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})


def ignored_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.parametrize("odd", [closed_streams, blocked_signals, ignored_children])
def test_it_serves_and_ends_as_always(
    tmp_path_factory: pytest.TempPathFactory, odd: object
) -> None:
    emulator.build()
    sockets: Path = tmp_path_factory.mktemp("s")
    sockets.chmod(0o700)

    def begin() -> None:
        die_with_the_test()
        odd()  # type: ignore[operator]

    process = subprocess.Popen(
        [sys.executable, "-m", "kiwi_core.cli", "daemon", "--emulate", "1x64MiB", "--socket-dir",
         str(sockets)],
        preexec_fn=begin, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: list(sockets.glob("GPU-*.sock")), "it serves")
        (socket,) = sockets.glob("GPU-*.sock")
        client = Client(socket, role=Role.OBSERVER, reconnect=False, connect_timeout_s=PATIENCE_S)
        client.connect()
        assert client.status().emulated
        client.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
