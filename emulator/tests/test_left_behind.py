"""Tests of what forked children keep of a program that has ended, as they do on a real driver."""

from __future__ import annotations

import os
import signal

import pytest
from cuda_processes import wait_until

MIB = 1 << 20

FORK = """
def loader():
    pid = os.fork()
    if not pid:
        for pipe in (0, 1, 2, answers.fileno()):
            os.close(pipe)  # the test waits for their end
    while not pid:
        time.sleep(1000)
    return pid
"""
ROWS = "sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h))"
FREE = "pynvml.nvmlDeviceGetMemoryInfo(h).free"


@pytest.mark.parametrize("end", ["killed", "exits", "runs another program"])
def test_a_forked_child_keeps_the_memory_of_its_dead_parent(machine, end):
    """It belongs to nobody: NVML has no row for it. Only the end of the child frees it."""
    watcher = machine.worker("import pynvml; pynvml.nvmlInit()")
    watcher.do("h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    unused = watcher.get(FREE)
    program = machine.worker()
    program.do(f"held = alloc({40 * MIB})")
    program.do(FORK)
    child = program.get("loader()")
    before = watcher.get(FREE)
    assert before <= unused - 40 * MIB
    try:
        if end == "killed":
            program.kill()
        elif end == "exits":
            program.close()
        else:
            program.send("os.execvp('sleep', ['sleep', '0'])")
        wait_until(lambda: program.pid not in watcher.get(ROWS), "it has no row")
        program.close()
        assert watcher.get(FREE) <= before
        assert child not in watcher.get(ROWS)
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: watcher.get(FREE) == unused, "the last close frees it")


def test_a_child_that_runs_another_program_keeps_nothing(machine):
    watcher = machine.worker("import pynvml; pynvml.nvmlInit()")
    watcher.do("h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    unused = watcher.get(FREE)
    program = machine.worker()
    program.do(f"import subprocess; held = alloc({40 * MIB})")
    child = program.get("subprocess.Popen(['sleep', '1000']).pid")
    program.kill()
    try:
        wait_until(lambda: watcher.get(FREE) == unused, "the memory is free")
    finally:
        os.kill(child, signal.SIGKILL)
