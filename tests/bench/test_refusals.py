"""Tests that what cannot be measured is refused with a remedy before the bench starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from benched import start_bench
from cuda_program import CudaProgram

import kiwi_emulator as emulator
from kiwi_core.bench.moves import one_switch, there_and_back
from kiwi_core.bench.process import BenchWorker
from kiwi_core.errors import KiwiError
from kiwi_core.units import MIB

EMULATE = ("--emulate", "1x256MiB")

pytestmark = pytest.mark.timeout(200)


def test_a_file_that_cannot_be_written(alone: Path, tmp_path: Path) -> None:
    code, out, err = start_bench(*EMULATE, "--json", str(tmp_path / "no" / "x.json")).finish()
    assert (code, out) == (1, "")
    assert "cannot be written" in err
    assert "directory that exists" in err
    assert "looking at the GPUs" not in err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--emulate", "many"], 2, "is not N×SIZE"),
        ([*EMULATE, "--emulate-copy-rate", "fast"], 2, "is not a size"),
        ([*EMULATE, "--gpu", "7"], 1, "'7' is no GPU"),
        (["--emulate", "1x32MiB"], 1, "Only 32 MiB of GPU memory are free"),
    ],
)
def test_impossible_options_are_refused(
    alone: Path, options: list[str], code: int, says: str
) -> None:
    ended, out, err = start_bench(*options).finish()
    assert ended == code, out + err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU here")
def test_no_gpu(alone: Path) -> None:
    code, _, err = start_bench().finish()
    assert code == 1
    assert "kiwi bench --emulate" in err


@pytest.fixture
def borrowed(tmp_path: Path) -> Any:
    """Return an environment in which the emulated GPU looks like a real one of this machine."""
    state = tmp_path / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    return emulator.environment(state, emulator.build())


def test_a_gpu_that_others_use(alone: Path, borrowed: dict[str, str], tmp_path: Path) -> None:
    """The bench refuses; if the user insists, the results say that they are not the limit."""
    other = CudaProgram(borrowed, 16 * MIB)
    try:
        code, out, err = start_bench(env=borrowed).finish()
        assert code == 1
        assert "1 program uses GPU 0 now (24 MiB of it)" in err
        assert "--beside-others" in err
        file = tmp_path / "r.json"
        words = ("--beside-others", "--json", str(file))
        code, out, err = start_bench(*words, env=borrowed, skip_limits=True).finish()
        assert code == 0, out + err
        data = json.loads(file.read_text())
        assert data["others"] == 1
        assert data["emulated"] is False
        assert "not this machine's limits" in out
        assert {"page_out_checkpoint", "switch_checkpoint"} <= {r["name"] for r in data["rows"]}
        assert other.digest()  # it continues
    finally:
        other.close()


def test_what_a_worker_says_and_when_it_says_nothing(
    alone: Path, borrowed: dict[str, str], tmp_path: Path
) -> None:
    with BenchWorker("bus", {**os.environ, **borrowed}, tmp_path / "log") as worker:
        with pytest.raises(KiwiError) as told:
            worker.ask("open", uuid="GPU-00000000-0000-0000-0000-000000000000")
        assert told.value.code == "no-such-gpu"
        assert "CUDA_VISIBLE_DEVICES" in told.value.remedy
        with pytest.raises(KiwiError, match="AttributeError"):
            worker.ask("fly")
        worker.ask("open", uuid=emulator.books(tmp_path / "gpus").gpus[0].uuid)
        with pytest.raises(KiwiError, match="enough free memory"):
            worker.ask("hold", size_bytes=1 << 40)
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(KiwiError, match=r"did not answer within 0 s"):
            worker.ask("free_bytes", 0.2)
        with pytest.raises(KiwiError, match="an earlier order"):
            worker.ask("free_bytes")
        os.kill(worker.pid, signal.SIGKILL)


def test_a_worker_that_dies_is_told_with_its_last_words(alone: Path, tmp_path: Path) -> None:
    with (
        BenchWorker("no such role", dict(os.environ), tmp_path / "log") as worker,
        pytest.raises(KiwiError, match="KeyError"),
    ):
        worker.ask("directory", 60.0)


class Scripted:
    """A worker with scripted answers."""

    pid = 1

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def ask(self, call: str, _answer_s: float = 0.0, **_args: object) -> Any:
        return self.answers.get(call)


def test_a_lost_byte_is_no_result() -> None:
    moved = {"bytes": 8, "seconds": 1.0}
    moves = [["out", 4, 0.5], ["in", 8, 1.0]]
    good: Any = Scripted(move_out=moved, cell={"intact": True, "moves": moves})
    assert there_and_back(good) == {"out": moved, "in": moved}
    stayed: Any = Scripted(move_out=moved, cell={"intact": True, "moves": moves[:1]})
    with pytest.raises(KiwiError, match="did not have to bring"):
        there_and_back(stayed)
    lost: Any = Scripted(move_out=moved, cell={"intact": False, "moves": moves})
    with pytest.raises(KiwiError, match="other contents"):
        there_and_back(lost)


@pytest.mark.parametrize(
    ("moves", "intact", "says"),
    [
        ([], True, "did not have to move"),
        ([["in", 8, 1.0]], True, "did not have to move"),
        ([["out", 8, 1.0], ["in", 8, 1.0]], False, "other contents"),
    ],
)
def test_a_switch_in_which_nothing_moved_is_no_result(
    moves: list[Any], intact: bool, says: str
) -> None:
    done = {"seconds": 1.0, "moves": moves, "intact": intact}
    program: Any = Scripted(cell=done)
    with pytest.raises(KiwiError, match=says):
        one_switch(program)
