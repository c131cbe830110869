"""Test that TensorFlow starts the same with Kiwi and without, up to the first CUDA library that it
misses. ``make tensorflow`` runs this; it is too large (2 GB) for the other targets.

Its library has 608 functions with the driver's names, which open libcuda at their first call.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kiwi_core import preload

PYTHON = Path(__file__).parents[2] / ".venvs" / "tensorflow" / "bin" / "python"
START = """
import tensorflow
print(tensorflow.config.list_physical_devices())
with open("/proc/self/maps") as maps:
    print("libcuda is loaded:", "/libcuda.so" in maps.read())
"""


def start(environment: dict[str, str]) -> tuple[str, list[str]]:
    """Return what TensorFlow prints, and its messages without times, thread ids and doubles."""
    done = subprocess.run(
        [PYTHON, "-c", START], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, [
        re.sub(r"^\w\d{4} [\d:.]+ +\d+ ", "", one) for one in done.stderr.splitlines()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", [{}, {"KIWI_PRELOAD_OWN": "0"}], ids=["owning", "gate-only"])
def test_it_starts_the_same(emulated_gpu: dict[str, str], more: dict[str, str]) -> None:
    plain = start(emulated_gpu)
    assert "libcuda is loaded: True" in plain[0]
    assert not any("cuInit" in line for line in plain[1])
    guarded = emulated_gpu | preload.environment(preload.library(), emulated_gpu) | more
    assert start(guarded) == plain
