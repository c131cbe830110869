"""Tests of the library under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import subprocess

import pytest
from preload_world import Odd, compile_c, run
from sanitizers import need_sanitizers
from tested_library import PARTS

from kiwi_core import compiled, preload
from kiwi_core.preload import _build

SCENARIOS = {
    "address,undefined": "closed drains armed signals captures stress forks forks-before".split(),
    "thread": "closed drains armed captures stress".split(),
}
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}


def runtimes(sanitizers, directory):
    """Return the libraries to preload before Kiwi's; skip the test if there are none."""
    compiler = compiled.find_compiler()
    need_sanitizers(compiler, sanitizers, directory)
    found = []
    for name in RUNTIMES[sanitizers]:
        asked = [*compiler, f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if "/" not in path:  # clang links its runtimes into programs
            pytest.skip(f"{name} is not a library of its own here")
        found.append(path)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sanitizers", SCENARIOS)
def test_no_sanitizer_complains(world, tmp_path, sanitizers):
    first = runtimes(sanitizers, tmp_path)
    library = tmp_path / preload.NAME
    _build.build(library, sanitize=sanitizers, tested=PARTS)
    odd = Odd(tmp_path / "odd", library)
    settings = {
        "LD_PRELOAD": ":".join([*first, str(library)]),
        "ASAN_OPTIONS": "detect_leaks=0",  # memory that a process keeps for its life is no leak
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    environment = odd.environment | settings
    for scenario in SCENARIOS[sanitizers]:
        done = run(odd.directory / "gate", scenario, environment=environment)
        assert (done.returncode, done.stdout) == (0, "ok\n"), (scenario, done.stderr[-6000:])
    done = run(odd.directory / "race", environment=environment)
    assert (done.returncode, done.stdout) == (0, "passed 800\n"), done.stderr[-6000:]
    done = run(odd.directory / "odd", environment=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "new-form kiwi right 1\n" in done.stdout
    if sanitizers != "thread":  # that one reserves the addresses of the emulated driver
        program = compile_c("linked.c", tmp_path / "linked", world.libraries.libcuda)
        done = run(program, environment=world.plain | settings)
        assert (done.returncode, done.stdout) == (0, "passed 3\n"), done.stderr[-6000:]
