"""Tests of the gate's cost in instructions, which does not depend on the machine's load.

``benchmarks/bench_preload_gate.py`` measures the time.
"""

from __future__ import annotations

import re
import shutil

import pytest
from preload_world import compile_c, run

from kiwi_core import preload

MOST = 70
"""Largest number of instructions that the library may add to a call; it was half of this at
first."""


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions")
@pytest.mark.parametrize("call", ["copy", "wait"])
def test_instructions_per_call(world, tmp_path, call):
    world.library = preload.library()  # the library that programs use
    program = compile_c("overhead.c", tmp_path / "overhead", "-O2")

    def collected(environment, calls):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        command.append("--toggle-collect=main")
        done = run(*command, program, call, str(calls), environment=environment)
        assert done.returncode == 0, done.stderr
        return int(re.search(r"Collected : (\d+)", done.stderr)[1])

    def per_call(environment):
        return (collected(environment, 1500) - collected(environment, 500)) / 1000

    added = per_call(world.environment) - per_call(world.plain)
    assert 10 < added < MOST  # zero would mean that the library was not loaded
