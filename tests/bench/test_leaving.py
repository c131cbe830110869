"""Tests of a bench that is interrupted or killed: no process, memory or partial file stays."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest
from benched import BenchProcess, private_directory, start_bench
from daemon import wait_until

import kiwi_emulator as emulator

LOCKED, CHECKPOINTED = 1, 2
SLOW = 16 << 20
"""In bytes per second."""

pytestmark = pytest.mark.timeout(200)


def slow_bench(*arguments: str, skip_limits: bool = True) -> BenchProcess:
    """Start a bench whose moves take half a second or more, so that a test can interrupt them."""
    usual = ("--emulate", "1x256MiB", "--emulate-copy-rate", "128MiB")
    return start_bench(*usual, *arguments, skip_limits=skip_limits)


def end_in_a_move(directory: Path, bench: BenchProcess, number: signal.Signals) -> None:
    """Send a signal while the memory of one of its programs is held or out. Moves take so long that
    it is still so then; afterwards they are quick, for the programs that have to end."""
    state = private_directory(directory) / "emulated-gpus"
    emulator.set_copy_bandwidth(state, SLOW)

    def look() -> bool:
        assert bench.process.poll() is None, bench.said
        return any(p.state in (LOCKED, CHECKPOINTED) for p in emulator.books(state).processes)

    wait_until(look, "a program whose memory is moved", 60.0)
    bench.process.send_signal(number)
    with suppress(OSError, emulator.StateError):  # it is gone already
        emulator.set_copy_bandwidth(state, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_in_the_middle_of_a_page_out(alone: Path, number: signal.Signals) -> None:
    bench = slow_bench()
    bench.wait_step("page-out and page-in, checkpoint")
    end_in_a_move(alone, bench, number)
    code, _, err = bench.finish()
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_in_the_middle_of_a_switch(alone: Path, number: signal.Signals) -> None:
    bench = slow_bench()
    bench.wait_step("switch between two programs")
    end_in_a_move(alone, bench, number)
    code, _, err = bench.finish()
    assert code in (130, -9)
    assert "Traceback" not in err


def test_in_the_middle_of_copies(alone: Path, tmp_path: Path) -> None:
    """The file for the results is not left behind empty."""
    file = tmp_path / "bench.json"
    bench = slow_bench("--json", str(file), skip_limits=False)
    bench.wait_step("copies from and to pinned")
    assert file.exists()  # the bench has tried to write it
    bench.process.send_signal(signal.SIGTERM)
    code, _, _ = bench.finish()
    assert code == 128 + signal.SIGTERM
    assert not file.exists()


def test_interrupted_before_its_first_step(alone: Path, tmp_path: Path) -> None:
    """An older result stays as it was."""
    file = tmp_path / "bench.json"
    file.write_text("older")
    bench = slow_bench("--json", str(file))
    bench.wait_step("looking at the GPUs")
    bench.process.send_signal(signal.SIGINT)
    code, _, _ = bench.finish()
    assert code == 130
    assert file.read_text() == "older"
