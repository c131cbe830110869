"""Tests of a daemon whose bindings raise anything: it lives, says so, and shares on afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

RAISING = Path(__file__).parents[1] / "support" / "raising"
READINGS = (
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetUtilizationRates",
)


def environment(raises: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(RAISING), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "KIWI_TEST_RAISES": str(raises)}


@pytest.mark.parametrize("what", ["NVMLLibraryMismatchError", "AttributeError", 999])
def test_no_exception_of_a_binding_ends_the_daemon(
    start: Start, program: Program, tmp_path: Path, what: str | int
) -> None:
    raises = tmp_path / "raises.json"
    daemon = start("1x256MiB", "--tq", "0.3", env=environment(raises))
    one, other = program(daemon, 150), program(daemon)
    before = daemon.status().daemon_pid
    raises.write_text(json.dumps(dict.fromkeys(READINGS, what)))
    other.begin_take(150, 2)
    told = str(what) if isinstance(what, str) else "NVML error 999"
    daemon.wait_for(lambda s: any(told in error for error in s.errors), "it says what is wrong")
    raises.unlink()
    other.worker.answer()
    assert daemon.status().daemon_pid == before, "the same daemon"
    assert one.intact()
    assert other.intact()
    daemon.wait_for(lambda s: not s.errors, "all is well")


def test_a_binding_that_cannot_even_start_nvml(start: Start, tmp_path: Path) -> None:
    raises = tmp_path / "raises.json"
    daemon = start("1x64MiB", env=environment(raises))
    raises.write_text(json.dumps({"nvmlInit": "OSError", "nvmlDeviceGetHandleByUUID": 1}))
    status = daemon.wait_for(lambda s: s.errors and s, "it says so")
    assert "OSError" in " ".join(status.errors)
    raises.unlink()
    wait_until(lambda: not daemon.status().errors, "it reads again")
