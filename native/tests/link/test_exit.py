"""Tests of the end of a program whose memory is out: its exit handlers may still use the GPU."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from pager_daemon import PATIENCE_S, eventually

import kiwi_emulator as emulator
from kiwi_core import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Controller, Stage

GATE_ONLY = {"KIWI_PRELOAD_OWN": "0"}
RIGHT = "copied 0, wrong bytes 0\n"
MIB = 1 << 20

Start = "Callable[..., subprocess.Popen[str]]"


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Start]:
    source = __file__.replace("test_exit.py", "exit_read.c")
    program = tmp_path / "exit_read"
    command = [*compiled.find_compiler(), "-O1", "-o", str(program), source, "-ldl"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **more: str) -> subprocess.Popen[str]:
        one = subprocess.Popen(
            [program, *arguments],
            env=stage.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "idle\n"
        return one

    yield begin
    for one in started:
        one.kill()
        one.communicate()


def ended(program: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = program.communicate(timeout=PATIENCE_S)
    return program.returncode, said


def test_an_exit_handler_waits_for_memory_that_is_out(stage: Stage, start: Start) -> None:
    program, peer = start(), stage.daemon.peer()
    assert peer.do("page-out")["outcome"] == "moved"
    assert program.stdin is not None
    program.stdin.close()
    peer.await_received("want-lease")
    assert peer.do("page-in")["outcome"] == "moved"
    program.stdin = None
    assert ended(program) == (0, RIGHT)


def test_it_waits_while_the_driver_has_the_process(
    stage: Stage, start: Start, controller: Controller
) -> None:
    emulator.set_driver(stage.state, "worst")
    program, peer = start(**GATE_ONLY), stage.daemon.peer()
    assert peer.do("hold")["outcome"] == "moved"
    controller.take(program.pid)
    assert program.stdin is not None
    program.stdin.close()
    peer.await_received("want-lease")
    controller.give_back(program.pid)
    assert peer.do("free")["outcome"] == "moved"
    program.stdin = None
    assert ended(program) == (0, RIGHT)


def test_a_program_may_end_in_the_middle_of_a_page_out(stage: Stage, start: Start) -> None:
    program, peer = start(), stage.daemon.peer()
    emulator.set_copy_bandwidth(stage.state, 16 * MIB)
    order = peer.begin("page-out")
    eventually(
        lambda: emulator.books(stage.state).gpus[0].used_bytes < 8 * MIB or peer.of("pager-done")
    )
    assert program.stdin is not None
    program.stdin.close()
    assert peer.end(order)["outcome"] == "moved"
    peer.await_received("want-lease")
    emulator.set_copy_bandwidth(stage.state, 0)
    assert peer.do("page-in")["outcome"] == "moved"
    program.stdin = None
    assert ended(program) == (0, RIGHT)


def test_without_a_daemon_the_memory_comes_back_for_it(stage: Stage, start: Start) -> None:
    program = start(KIWI_PRELOAD_ALONE_S="1")
    assert stage.daemon.peer().do("page-out")["outcome"] == "moved"
    stage.daemon.stop()
    assert ended(program) == (0, RIGHT)


@pytest.mark.parametrize("more", [{}, GATE_ONLY], ids=["owning", "gate-only"])
def test_a_program_that_makes_no_call_at_its_end_waits_for_nobody(
    stage: Stage, start: Start, more: dict[str, str]
) -> None:
    program, peer = start("silent", **more), stage.daemon.peer()
    assert peer.do("page-out" if not more else "hold")["outcome"] == "moved"
    assert ended(program) == (0, "")
