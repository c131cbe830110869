"""Tests of the C sources under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sanitizers import need_sanitizers

import kiwi_emulator as emulator
from kiwi_core import compiled
from kiwi_emulator import _build

PROGRAM = Path(__file__).with_name("sanitized.c")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_no_sanitizer_complains(tmp_path, sanitizers):
    compiler = compiled.find_compiler()
    need_sanitizers(compiler, sanitizers, tmp_path)
    sources = [str(_build.SOURCES / n) for n in (*_build.COMMON, *_build.CUDA)]
    flags = ["-std=gnu11", "-O0", "-g", "-pthread", f"-fsanitize={sanitizers}"]
    target = str(tmp_path / "program")
    include = f"-I{_build.SOURCES}"
    fatal = [] if sanitizers == "thread" else ["-fno-sanitize-recover=all"]
    if sanitizers == "thread":  # it knows only some address ranges
        flags += ["-DKE_DEVICE_BASE=0x4000000000ull", "-DKE_DEVICE_SPAN=0x2000000000ull"]
    command = [*compiler, *flags, *fatal, include, "-o", target, str(PROGRAM), *sources]
    subprocess.run(command, check=True)
    emulator.create_state(tmp_path / "gpus", emulator.parse_gpus("1x64MiB"), "worst")
    for quirk in ("sync_crashes", "query_crashes"):  # the program is swapped at any point
        emulator.set_quirk(tmp_path / "gpus", quirk, on=False)
    environment = os.environ | {emulator.ENV_STATE: str(tmp_path / "gpus")}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # memory kept for a process's life is no leak
    done = subprocess.run(
        [target], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "clean\n"
