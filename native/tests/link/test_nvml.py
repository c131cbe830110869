"""Tests of calls of NVML while the driver may have the process: they wait in front of NVML, and ask
for the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from preload_world import compile_c

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_processes import Worker

    from conftest import Controller, Stage

MIB = 1 << 20
NOT_YET_S = 0.3
GATE_ONLY = {"KIWI_PRELOAD_OWN": "0"}
SETUP = (
    "init(); p = alloc(4 * MIB); d = fill(p, 1, 4 * MIB)\n"
    "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)"
)
COUNT = "pynvml.nvmlDeviceGetCount()"


@pytest.fixture(autouse=True)
def _worst(stage: Stage) -> None:
    emulator.set_driver(stage.state, "worst")


def yielded(stage: Stage) -> Worker:
    """Return a program whose memory is out, and which the driver may have."""
    program = stage.program(SETUP)
    for order in ("page-out", "yield"):
        assert stage.daemon.peer().do(order)["outcome"] == "moved"
    return program


def test_a_call_waits_while_the_driver_may_have_the_process(stage: Stage) -> None:
    program, peer = yielded(stage), stage.daemon.peer()
    program.send(COUNT)
    peer.await_received("want-lease")
    assert peer.of("want-lease") == [{"type": "want-lease", "context": True}]
    assert not program.answered(NOT_YET_S)
    assert peer.do("page-out")["outcome"] == "moved", "what it has done: the driver has let go"
    assert program.answer() == 1
    assert peer.state["state"] == "out"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 4 * MIB) == d")


def test_it_asks_once_each_time_that_the_driver_may_have_the_process(stage: Stage) -> None:
    program, peer = yielded(stage), stage.daemon.peer()
    for times in (1, 2):
        program.do(
            "def ask(): threading.current_thread().count = pynvml.nvmlDeviceGetCount()\n"
            "those = [threading.Thread(target=ask) for _ in range(3)]\n"
            "[one.start() for one in those]"
        )
        peer.await_received("want-lease", times)
        peer.do("page-out")
        assert program.get("[one.join() or one.count for one in those]") == [1, 1, 1]
        assert len(peer.of("want-lease")) == times
        peer.do("yield")


@pytest.mark.parametrize("call", ["pynvml.nvmlInit()", "pynvml.nvmlDeviceGetMemoryInfo(h).total"])
def test_a_call_passes_while_the_gate_is_only_shut(stage: Stage, call: str) -> None:
    """Monitors in the program read NVML each second, and its context is there."""
    program = stage.program(SETUP)
    expected = program.get(call)
    for order in ("hold", "page-out"):
        assert stage.daemon.peer().do(order)["outcome"] == "moved"
        assert program.get(call) == expected
    assert stage.daemon.peer().of("want-lease") == []


def test_what_needs_no_gpu_passes(stage: Stage) -> None:
    program = yielded(stage)
    assert program.get("str(pynvml.NVMLError(2))") == "Invalid Argument"


def test_a_shut_gate_that_owns_nothing_counts_as_taken(stage: Stage) -> None:
    """No further order says that the driver takes the process."""
    program, peer = stage.program(SETUP, **GATE_ONLY), stage.daemon.peer()
    assert peer.do("hold")["outcome"] == "moved"
    program.send(COUNT)
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    assert peer.do("free")["outcome"] == "moved"
    assert program.answer() == 1


def test_it_asks_the_next_daemon(stage: Stage, controller: Controller) -> None:
    program = yielded(stage)
    controller.take(program.pid)
    stage.daemon.stop()
    program.send(COUNT)
    assert not program.answered(NOT_YET_S)
    stage.daemon.start()
    again = stage.daemon.peer(2)
    again.await_received("want-lease")
    controller.give_back(program.pid)
    assert again.do("page-in")["outcome"] == "moved"
    assert program.answer() == 1
    assert program.get("digest(p, 4 * MIB) == d")


def test_a_program_that_closes_nvml_keeps_it_loaded(stage: Stage, tmp_path: Path) -> None:
    """A driver of version 610 calls it at a lock (NVIDIA/cuda-checkpoint#58)."""
    other = compile_c("nvml.c", tmp_path / "libnvidia-ml.so.1", "-shared", "-fPIC")
    program = stage.program("init(); import ctypes, _ctypes")
    program.do(
        f"mine = ctypes.CDLL({str(other)!r}); mine.nvmlInit_v2(); _ctypes.dlclose(mine._handle)"
    )
    assert program.get(f"{str(other)!r} in open('/proc/self/maps').read()")
