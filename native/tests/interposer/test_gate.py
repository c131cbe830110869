"""Tests of which calls wait at the gate, which pass, and what closing waits for."""

from __future__ import annotations

import pytest
from preload_world import run

SCENARIOS = (
    "closed drains armed shut shut-drains signals captures stress stress-shut forks forks-before"
    " exits crowd"
).split()
ANY_KERNEL = "closed drains armed shut shut-drains captures stress stress-shut crowd".split()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gate(odd, scenario):
    done = run(odd.directory / "gate", scenario, environment=odd.environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("scenario", ANY_KERNEL)
def test_gate_where_the_kernel_has_no_membarrier(odd, scenario):
    done = run(odd.directory / "gate", scenario, "without-membarrier", environment=odd.environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
