"""Tests of a program that a move would kill: the daemon refuses, and says so to everybody.

The emulated driver 595 ends a program with an NCCL communicator at its checkpoint, as the real one
does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from daemon import wait_until
from session_program import SessionProgram

import kiwi_emulator as emulator
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

DRIVER_595 = {"KIWI_EMULATOR_DRIVER": "595"}
WITH_NCCL = "open('/proc/self/comm', 'w').write('pt_nccl_watchdg')"


def test_a_program_with_nccl_is_left_where_it_is_and_everybody_sees_why(
    start: Start, program: Program
) -> None:
    daemon = start("1x64MiB", env=DRIVER_595)
    one = program(daemon, 40)
    one.worker.do(WITH_NCCL)
    other = program(daemon)
    other.begin_take(40, 2)
    shown = daemon.wait_for(
        lambda s: next((x for x in s.sessions if x.pid == one.pid and x.problem), None), "refused"
    )
    assert shown.problem == "page-out-refused"
    for words in ("uses NCCL", "595.84", "destroy_process_group"):
        assert words in shown.problem_text
    told = lambda s: any(x.pid == other.pid and "uses NCCL" in x.problem_text for x in s.sessions)  # noqa: E731
    daemon.wait_for(told, "it is told what it waits for")
    text, as_json = seen(daemon), json.loads(seen(daemon, "--json"))
    assert "uses NCCL" in " ".join(text.split())
    sessions = {x["pid"]: x for x in as_json["gpus"][0]["sessions"]}
    assert "uses NCCL" in sessions[one.pid]["problem_text"]
    assert "uses NCCL" in sessions[other.pid]["problem_text"]
    wait_until(lambda: any("uses NCCL" in told for _, told in one.notices()), "its user is told")
    assert one.intact(), "the driver never had it"
    one.close()
    other.worker.answer()
    assert other.intact()


def test_a_program_whose_code_broke_is_tried_once_and_told_to_restart(
    start: Start, program: Program
) -> None:
    """Without a library that owns the memory, only the program's end frees it."""
    daemon = start("1x128MiB", "--idle-after", "0.3")
    broken, beside = program(daemon, 40), program(daemon, 35)
    error = broken.worker.fails("begin(); launch('fill_u32', 8, 1, 1); sync()")
    assert error == "CUDA_ERROR_ILLEGAL_ADDRESS"
    broken.worker.do("client.end_burst()")
    other = program(daemon)
    other.begin_take(60, 3)
    shown = daemon.wait_for(
        lambda s: next((x for x in s.sessions if x.pid == broken.pid and x.problem), None), "tried"
    )
    for words in ("GPU code", "failed", "ILLEGAL_ADDRESS", "Restart it"):
        assert words in shown.problem_text
    wait_until(
        lambda: any("Restart it" in told for _, told in broken.notices()), "its user is told"
    )
    assert beside.intact(), "who is in goes on"
    broken.close()
    other.worker.answer()
    assert other.intact()


def test_a_program_whose_library_is_not_connected_is_left_to_itself(
    start: Start, program: Program, tmp_path: Path
) -> None:
    """Its gate is open and only its library can shut it, so the driver must not take the
    process."""
    daemon = start("1x64MiB", "--idle-after", "0.3")
    tried = emulator.Faults(daemon.state_path)
    tried.set("checkpoint_fail", count=-1)
    elsewhere = {"KIWI_SOCKET_DIR": str(tmp_path)}
    one = SessionProgram(daemon, 40, environment=elsewhere)
    try:
        # Only a daemon that knows the size of ``one`` makes ``other`` wait.
        daemon.wait_for(
            lambda s: any(x.pid == one.pid and x.resident_bytes >= 40 * MIB for x in s.sessions),
            "its memory is known",
        )
        other = program(daemon)
        other.begin_take(40, 2)
        shown = daemon.wait_for(
            lambda s: next((x for x in s.sessions if x.pid == one.pid and x.problem), None), "seen"
        )
        assert "has Kiwi's library, which is not connected" in shown.problem_text
        assert one.intact()
    finally:
        one.close()
    other.worker.answer()
    assert other.intact()
    assert tried.hits("checkpoint_fail") == 0


def test_with_mig_no_move_is_ever_tried(start: Start, program: Program) -> None:
    """NVML reports that MIG is on, so that no checkpoint has to find it out."""
    daemon = start("1x128MiB")
    emulator.set_quirk(daemon.state_path, "mig")
    tried = emulator.Faults(daemon.state_path)
    tried.set("checkpoint_fail", count=-1)  # counts each checkpoint that reaches a program
    killed = daemon.kill_child()
    daemon.wait_for(
        lambda s: s.daemon_pid != killed and any("MIG" in e and "-mig 0" in e for e in s.errors),
        "a daemon that has seen it",
    )
    assert "MIG" in seen(daemon)
    one, beside = program(daemon, 40), program(daemon, 35)
    one.start_burst()
    beside.start_burst()
    wait_until(lambda: one.rounds() and beside.rounds(), "who fits runs beside the other")
    one.stop_burst()
    beside.stop_burst()
    other = program(daemon)
    other.begin_take(60, 3)
    shown = daemon.wait_for(
        lambda s: next((x for x in s.sessions if x.pid == one.pid and x.problem), None), "refused"
    )
    assert shown.problem == "page-out-refused"
    assert "MIG" in shown.problem_text
    assert "-mig 0" in shown.problem_text
    told = lambda s: any(x.pid == other.pid and "MIG" in x.problem_text for x in s.sessions)  # noqa: E731
    daemon.wait_for(told, "it is told what it waits for")
    assert beside.intact(), "who is in runs all the same"
    one.close()
    other.worker.answer()
    assert other.intact()
    assert tried.hits("checkpoint_fail") == 0


def seen(daemon: Daemon, *args: str) -> str:
    command = [
        sys.executable,
        "-m",
        "kiwi_core.cli",
        "status",
        "--socket-dir",
        str(daemon.sockets()[0].parent),
    ]
    return subprocess.run([*command, *args], check=True, capture_output=True, text=True).stdout


def test_nothing_goes_out_where_the_driver_has_no_way_back(start: Start, program: Program) -> None:
    lacking = "cuCheckpointProcessRestore"
    daemon = start("1x64MiB", "--tq", "0.3", env={"KIWI_EMULATOR_LACKS": lacking})
    one = program(daemon, 40)
    other = program(daemon)
    other.begin_take(40, 2)
    told = lambda s: any(x.pid == other.pid and lacking in x.problem_text for x in s.sessions)  # noqa: E731
    daemon.wait_for(told, "the one that waits is told what is missing")
    assert any(lacking in error for error in daemon.status().errors)
    assert one.intact(), "its memory never left the GPU"
    one.close()
    other.worker.answer()
    assert other.intact()
