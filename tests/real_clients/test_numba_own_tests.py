"""Run numba-cuda's own tests of arrays, memory, streams, events and contexts on the emulated
driver.

The tests are the unmodified ones of the package. They may fail only for what the emulated driver
does not have, which README.md ("What runs without a GPU") tells users.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import running_daemon
from pagers import IN_PROCESS

if TYPE_CHECKING:
    from contextlib import ExitStack

pytestmark = pytest.mark.timeout(240)

MODULES = """
    test_array_attr test_context_stack test_cuda_array_slicing test_cuda_auto_context
    test_cuda_devicerecord test_cuda_memory test_cuda_ndarray test_deallocations test_emm_plugins
    test_events test_host_alloc test_managed_alloc test_pinned test_profiler test_reset_device
    test_select_device test_cuda_driver.TestCudaDriver.test_cuda_driver_basic
""".split()
"""The modules of numba.cuda.tests.cudadrv that need no kernel, except for single tests. Two that
start a dozen interpreters one after the other are omitted (test_init, test_detect)."""

MANY = 120
"""The least number of passed tests: 147 pass with numba-cuda 0.30.4."""

REFUSED = {
    "CUDA_ERROR_INVALID_IMAGE": "the code of a kernel",
    "Call to cuMemAllocManaged results in CUDA_ERROR_NOT_SUPPORTED": "managed memory",
    "Call to cuProfilerStart results in CUDA_ERROR_NOT_SUPPORTED": "the profiler",
}
"""Text of an allowed failure, and what the emulated driver refuses then."""

NOT_INSTALLED = {
    "libnvrtc": "the compiler of kernels, 450 MB",
    "No module named 'cupy'": "another package",
}
"""Text of an allowed failure, and what the environment lacks then."""

SCRIPT = Path(__file__).with_name("numba_own_tests.py")


def test_numba_alone_with_the_emulated_driver(
    client_python: str, emulated_gpu: dict[str, str]
) -> None:
    _check(_run([client_python, str(SCRIPT), *MODULES], emulated_gpu))


def test_numba_with_the_library_that_owns_its_memory(client_python: str, stack: ExitStack) -> None:
    """The library is between numba-cuda and the driver in each call."""
    daemon = stack.enter_context(running_daemon("1x512MiB", pager=IN_PROCESS))
    kiwi = [sys.executable, "-m", "kiwi_core.cli", "run", "--require", "--"]
    command = [*kiwi, client_python, str(SCRIPT), *MODULES]
    _check(_run(command, {**os.environ, **daemon.env}))


def _run(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


def _check(found: Any) -> None:
    unknown = {
        test: reason
        for test, reason in found["failed"].items()
        if not any(words in reason for words in {**REFUSED, **NOT_INSTALLED})
    }
    assert not unknown
    reasons = " ".join(found["failed"].values())
    assert [words for words in REFUSED if words not in reasons] == [], "not refused any more"
    assert len(found["passed"]) >= MANY
