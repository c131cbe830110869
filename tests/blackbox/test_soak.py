"""Tests of everything at once for half a minute. ``make soak HOURS=24`` runs the long version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "tools/soak.py"
SECONDS = 36


@pytest.mark.timeout(400)
def test_a_short_soak() -> None:
    """The seed fixes who does what in which order, but not when."""
    done = subprocess.run(
        [sys.executable, SOAK, "--hours", str(SECONDS / 3600), "--seed", "1"],
        capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "soak: passed" in done.stdout
    *_, last = re.findall(r"^soak: \d+ s: (.*)$", done.stdout, re.MULTILINE)
    for what in ("bursts", "killed daemons", "killed movers"):
        assert re.search(rf"[1-9]\d* {what}", last), done.stdout


def test_a_failure_is_told() -> None:
    """If no daemon can run, the verdict and the exit code say so."""
    done = subprocess.run(
        [sys.executable, SOAK, "--hours", "0.001", "--seed", "1"], env={"PATH": "/usr/bin:/bin",
        "TMPDIR": "/tmp", "KIWI_STATE_DIR": "/proc/nowhere"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("soak: FAILED\n")
    assert "Cannot create /proc/nowhere" in done.stdout
