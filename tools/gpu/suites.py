"""The project's own tests on the GPU. The output of pytest is in a log beside the results."""

from __future__ import annotations

import importlib.util
import sys

from paging import without_driver
from stage import Skipped, Stage, in_a_log

INPROCESS = "tests/gpu/inprocess"
"""The in-process pager with PyTorch, CuPy, JAX and Triton."""
OWNER = "native/tests/owner/test_real_gpu.py"
"""The owner's memory, and what a program maps itself: away and back, with every byte."""
GPU_TESTS = (
    "tests/bench/test_real.py",
    "tests/gpu",
    "tests/pager/test_real_gpu.py",
    OWNER,
)
"""Suites, named one by one: others need packages (Jupyter, a browser) that a GPU machine lacks."""
CONFORMANCE = "emulator/conformance"
PER_TEST_S = 60
HANGS = "def test_hangs():\n    import time\n    time.sleep(10**6)\n"


def gpu_tests(stage: Stage) -> None:
    _pytest(stage, *GPU_TESTS, f"--ignore={INPROCESS}", small="tests/gpu/test_host.py")


def owner(stage: Stage) -> None:
    _pytest(stage, OWNER, small="native/tests/owner/test_ahead.py")


def inprocess(stage: Stage) -> None:
    _pytest(stage, INPROCESS, small="tests/gpu/test_processes.py")


def conformance(stage: Stage) -> None:
    _pytest(stage, CONFORMANCE, small="emulator/conformance/test_own_gpu.py")


def _pytest(stage: Stage, *words: str, small: str) -> None:
    """Run tests until they end or the time is over. A test that hangs fails, and the next one
    runs."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed in this Python")
    marker, per_test_s = "gpu", PER_TEST_S
    if stage.emulated:
        words, marker, per_test_s = (small,), "not gpu", 20
    if stage.fault == "slow-test":
        slow = stage.work / "test_slow.py"
        slow.write_text(HANGS)
        words, per_test_s = (str(slow), *words), 3
    log = stage.folder / f"{stage.name}.log"
    # On the emulated driver the suites make their own GPUs.
    env = without_driver(stage.env) if stage.emulated else stage.env
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short", "--color=no"]
    command += [f"--timeout={per_test_s}", "-p", "no:cacheprovider"]
    status = in_a_log([*command, "-m", marker, *words], log, stage.left_s, env)
    lines = log.read_text(errors="replace").splitlines()
    passed = sum(" PASSED" in line for line in lines)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    stage.row("tests passed", passed)
    stage.row(
        "tests failed", len(failed), target="0", passed=not failed and status == 0,
        failed=failed[:40], in_full=log.name,
        status="not done in time" if status is None else status,
    )  # fmt: skip
