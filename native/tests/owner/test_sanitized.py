"""Tests of the owner's C sources under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sanitizers import need_sanitizers
from tested_library import PARTS

import kiwi_emulator as emulator
from kiwi_core import compiled
from kiwi_core.preload import _build, _generate
from kiwi_emulator import _build as emulator_build

PROGRAM = Path(__file__).with_name("stress.c")
SOURCES = ("base/daemon.c", "base/fork.c", "base/real.c", "gate/*.c", "owner/*.c")
TESTED = ("check.c", "fault.c")
STEPS = {"address,undefined": "120", "thread": "80"}


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generated")
    known = _generate.read_header(compiled.find_compiler(), _build.find_header())
    _generate.write(directory, _generate.read_calls(), known)
    return directory


def compile_all(
    directory: Path, command: list[str], sanitize: list[str], sources: list[Path]
) -> list[str]:
    """Compile and return the objects, including the driver's: the sanitizer must see into it."""
    objects = []
    for i, source in enumerate(sources):
        objects.append(str(directory / f"{i}-{source.parent.name}-{source.name}.o"))
        subprocess.run(
            [*command, "-O0", *sanitize, "-c", str(source), "-o", objects[-1]], check=True
        )
    return objects


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sanitizers", STEPS)
def test_no_sanitizer_complains(tmp_path, generated, sanitizers):
    compiler = compiled.find_compiler()
    need_sanitizers(compiler, sanitizers, tmp_path)
    sanitize = [f"-fsanitize={sanitizers}"]
    sanitize += [] if sanitizers == "thread" else ["-fno-sanitize-recover=all"]
    command = [*compiler, "-std=gnu11", "-g", "-pthread"]
    if sanitizers == "thread":  # it knows only some address ranges
        command += ["-DKE_DEVICE_BASE=0x4000000000ull", "-DKE_DEVICE_SPAN=0x2000000000ull"]
    driver = (*emulator_build.COMMON, *emulator_build.CUDA)
    objects = compile_all(
        tmp_path, command, sanitize, [emulator_build.SOURCES / name for name in driver]
    )
    command += ["-isystem", str(_build.find_header().parent)]
    command += ["-iquote", str(generated), "-iquote", str(_build.SOURCES)]
    command += [flag for flag in _build.FLAGS if flag.startswith("-D")]
    command += ["-DKP_TESTED", "-iquote", str(PARTS)]
    own = [PROGRAM, *(path for names in SOURCES for path in sorted(_build.SOURCES.glob(names)))]
    own += [PARTS / name for name in TESTED]
    objects += compile_all(tmp_path, command, sanitize, own)
    target = str(tmp_path / "program")
    subprocess.run([*command, *sanitize, "-rdynamic", "-o", target, *objects, "-ldl"], check=True)

    emulator.create_state(tmp_path / "gpus", emulator.parse_gpus("1x64MiB"))
    environment = os.environ | {emulator.ENV_STATE: str(tmp_path / "gpus")}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # memory kept for a process's life is no leak
    done = subprocess.run(
        [target, STEPS[sanitizers]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "clean\n"
