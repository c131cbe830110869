"""The package without Kiwi, as its own wheel brings it (run by `make wheels`)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PROGRAM = """
import os, subprocess, sys
sys.modules["kiwi_core"] = None  # importing it fails
import kiwi_emulator as emulator
from pathlib import Path
work = Path(sys.argv[1])
libraries = emulator.build(work / "cache")
emulator.create_state(work / "state", emulator.parse_gpus("2x64MiB"))
count = "from cuda.bindings import driver as d; d.cuInit(0); print(d.cuDeviceGetCount()[1])"
environment = os.environ | emulator.environment(work / "state", libraries)
sys.exit(subprocess.run([sys.executable, "-c", count], env=environment).returncode)
"""


@pytest.mark.wheels
@pytest.mark.timeout(300)
def test_the_wheel_needs_nothing_of_kiwi(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(tmp_path), str(PROJECT)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("kiwi_cuda_emulator-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "alone")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path / "alone",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
