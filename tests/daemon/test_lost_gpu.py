"""Tests of a machine with two GPUs, one of which falls off the bus: the other one is shared on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli_process import finish, start_kiwi
from daemon import wait_until

import kiwi_emulator as emulator
from kiwi_core.client import gpu_placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

LOST = "fallen off the bus"


def test_the_healthy_gpu_is_shared_on(start: Start, program: Program) -> None:
    daemon = start("2x64MiB", "--tq", "0.3")
    one = program(daemon, 40)
    emulator.lose_gpu(daemon.state_path, 1)
    wait_until(lambda: any(LOST in error for error in daemon.status(1).errors), "it is told")
    other = program(daemon, 40)  # `one` goes out for it
    assert one.intact()
    assert other.intact()
    assert not daemon.status(0).errors
    assert daemon.status(1).newcomer_wait_s is None
    for number in range(3):
        placed = gpu_placement.place(daemon.sockets(), f"kernel {number}")
        assert placed is not None
        assert placed.index == 0, "no kernel is placed on a lost GPU"


def test_a_new_daemon_serves_the_healthy_gpu(start: Start, program: Program) -> None:
    daemon = start("2x64MiB")
    emulator.lose_gpu(daemon.state_path, 1)
    assert daemon.terminate() == 0
    served = start_kiwi(
        "daemon", "--emulate", "2x64MiB", "--socket-dir", str(daemon.directory), **daemon.env
    )
    try:
        wait_until(lambda: len(daemon.sockets()) == 1, "one GPU is served")
        one = program(daemon, 40)
        assert one.intact()
        one.close()
    finally:
        served.terminate()
    said = finish(served)
    assert said.code == 0
    assert "GPU 1 is not served" in said.out
    assert LOST in said.out


def test_doctor_names_the_lost_one(start: Start) -> None:
    daemon = start("2x64MiB")
    emulator.lose_gpu(daemon.state_path, 1)
    said = finish(start_kiwi("doctor", **daemon.cuda_env))
    rows = [line for line in said.out.splitlines() if LOST in line]
    assert any("GPU 1" in row for row in rows), said.out
