"""The owner's C sources under the address and undefined-behaviour, then the thread sanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kiwi_core import emulator
from kiwi_core.emulator import _build as emulator_build
from kiwi_core.preload import _build, _generate

PROGRAM = Path(__file__).with_name("stress.c")
SOURCES = (
    *("own.c", "query.c", "contexts.c", "physical.c", "table.c", "slab.c", "arena.c"),
    *("host_memory.c", "lane.c", "move.c", "settle.c", "hash.c", "hash_cpu.c", "keep.c"),
    *("fault.c", "gate.c"),
)
STEPS = {"address,undefined": "200", "thread": "60"}


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generated")
    known = _generate.read_header(_build.find_compiler(), _build.find_header())
    _generate.write(directory, _generate.read_calls(), known)
    return directory


def emulator_objects(directory: Path, compiler: list[str], flags: list[str]) -> list[str]:
    """The driver is part of the program, or the sanitizer would not see into it."""
    objects = []
    for name in (*emulator_build.COMMON, *emulator_build.CUDA):
        target = str(directory / f"emulator-{name}.o")
        source = str(emulator_build.SOURCES / name)
        subprocess.run([*compiler, *flags, "-c", source, "-o", target], check=True)
        objects.append(target)
    return objects


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sanitizers", STEPS)
def test_no_sanitizer_complains(tmp_path, generated, sanitizers):
    compiler = _build.find_compiler()
    probe = [*compiler, f"-fsanitize={sanitizers}", "-x", "c", "-", "-o", str(tmp_path / "probe")]
    code = "int main(void){return 0;}"
    if subprocess.run(probe, input=code, text=True, capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(compiler)} has no {sanitizers} sanitizer")
    if subprocess.run([tmp_path / "probe"], capture_output=True, check=False).returncode:
        pytest.skip(f"the {sanitizers} sanitizer cannot run on this kernel's address layout")
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}"]
    flags += [] if sanitizers == "thread" else ["-fno-sanitize-recover=all"]
    if sanitizers == "thread":  # it knows only some address ranges
        flags += ["-DKE_DEVICE_BASE=0x4000000000ull", "-DKE_DEVICE_SPAN=0x2000000000ull"]
    objects = emulator_objects(tmp_path, compiler, flags)
    include = ["-isystem", str(_build.find_header().parent)]
    include += ["-iquote", str(generated), "-iquote", str(_build.SOURCES)]
    sources = [str(_build.SOURCES / name) for name in SOURCES]
    target = str(tmp_path / "program")
    command = [*compiler, *flags, *include, "-rdynamic", "-o", target, str(PROGRAM)]
    subprocess.run([*command, *sources, *objects, "-ldl"], check=True)

    emulator.create_state(tmp_path / "gpus", emulator.parse_gpus("1x64MiB"))
    environment = os.environ | {emulator.ENV_STATE: str(tmp_path / "gpus")}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # what a process keeps for its life is no leak
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
