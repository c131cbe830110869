"""Tests that a crash or hang of the program that tests share costs one test."""

from __future__ import annotations

import signal

import pytest
from cuda_processes import EMULATED, WorkerGoneError, end_on_a_gpu

import kiwi_emulator as emulator

pytestmark = pytest.mark.parametrize("platform", ["emulated"], indirect=True)


def test_it_is_the_same_as_long_as_it_works(platform):
    worker = platform.shared("n = 1")
    worker.do("n += 1")
    assert worker.fails("1 / 0") == "division by zero"
    again = platform.shared("n = 1")
    assert again.get("n") == 2
    assert platform.shared("n = 5").pid != again.pid


def test_after_a_crash_there_is_another(platform):
    worker = platform.shared("n = 1")
    with pytest.raises(WorkerGoneError):
        worker.do("os._exit(1)")
    assert platform.shared("n = 1").get("n") == 1


def test_after_a_hang_there_is_another(platform, tmp_path):
    worker, over = platform.shared("n = 1"), tmp_path / "over"
    with pytest.raises(AssertionError, match="did not answer"):
        worker.do(f"while not os.path.exists({str(over)!r}): time.sleep(0.01)", within_s=0.1)
    other = platform.shared("n = 1")
    assert other.pid != worker.pid
    assert other.get("n") == 1
    over.touch()


def test_a_program_on_the_emulated_driver_is_known_as_such(platform):
    assert emulator.ENV_STATE == EMULATED
    assert platform.worker().emulated


def test_on_a_real_gpu_only_what_is_out_is_killed(platform):
    """This is tested on the emulator, where it does no harm: a program that runs or is locked ends
    by itself."""
    runs, locked, out, busy = (platform.worker("init(); p = alloc(MIB)") for _ in range(4))
    helper = platform.worker("ck(driver.cuInit(0))")
    helper.do(f"checkpoint_of({locked.pid}).lock(); suspend({out.pid})")
    busy.send("time.sleep(600)")
    programs = [runs, locked, out, busy]
    for program in programs:
        program.emulated = False
    waited = busy.leave(0.2)
    end_on_a_gpu(programs, platform.environment)
    assert not waited
    assert [one.returncode for one in programs] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
