"""Tests of the library's cost in instructions, which does not depend on the machine's load.

``benchmarks/bench_preload_gate.py`` measures the time, and ``tools/gpu/gate.py`` the share of
a training step on a real GPU.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from instructions import costs
from preload_world import PROGRAMS, compile_c

from kiwi_core import preload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from preload_world import World

pytestmark = pytest.mark.skipif(
    shutil.which("valgrind") is None, reason="valgrind counts the instructions"
)

MOST = {"copy": 40, "wait": 40, "record": 40, "launch": 60}
"""Largest number of the library's own instructions in a call. A launch has eleven arguments, which
its wrapper hands on."""
MOST_OF_A_LAUNCH = 1.005
"""What a launch may take of what it takes without Kiwi, where ``cuda.bindings`` makes it on the
emulated driver: 14,000 instructions. PyTorch takes more for each, and so does a real driver, so the
ratio of a real program is better."""
PAGERS = {"owning": {}, "gate": {"KIWI_PRELOAD_OWN": "0"}}


@pytest.fixture
def per_call(world: World, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Return a function that runs a program and tells the instructions of one of its calls, all and
    the library's. What happens once is in no call: many calls less few of them are counted."""
    world.library = preload.library()  # the library that programs use

    def count(command: list[str], few: int, environment: dict[str, str]) -> dict[str, float]:
        fixed = environment | {"PYTHONHASHSEED": "0"}  # two runs then execute the same instructions
        found = []
        for calls in (few, 3 * few):
            words = [str(calls) if word == "COUNT" else word for word in command]
            by_object = costs(words, fixed, tmp_path / "callgrind.out")
            library = sum(n for name, n in by_object.items() if name.endswith(preload.NAME))
            found.append({"all": sum(by_object.values()), "library": library})
        return {key: (found[1][key] - found[0][key]) / (2 * few) for key in found[0]}

    return count


@pytest.mark.parametrize("pager", PAGERS)
@pytest.mark.parametrize("call", MOST)
def test_instructions_per_call(
    world: World, tmp_path: Path, per_call: Callable[..., dict[str, float]], call: str, pager: str
) -> None:
    program = str(compile_c("overhead.c", tmp_path / "overhead", "-O2"))
    environment = world.environment | PAGERS[pager]
    added = per_call([program, call, "COUNT"], 500, environment)["library"]
    assert 10 < added < MOST[call]  # zero would mean that the library was not loaded


def test_a_call_takes_nothing_more_in_other_libraries(
    world: World, tmp_path: Path, per_call: Callable[..., dict[str, float]]
) -> None:
    """The emulated driver answers a wait for nothing in the same number of instructions each
    time."""
    program = str(compile_c("overhead.c", tmp_path / "overhead", "-O2"))
    plain, loaded = (per_call([program, "wait", "COUNT"], 500, e)["all"] for e in (
        world.plain, world.environment,
    ))  # fmt: skip
    assert 10 < loaded - plain < MOST["wait"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pager", PAGERS)
def test_a_launch_from_python_takes_hardly_more_than_without_kiwi(
    world: World, per_call: Callable[..., dict[str, float]], pager: str
) -> None:
    program = [sys.executable, str(PROGRAMS / "launches.py"), "COUNT", "64"]
    found = per_call(program, 640, world.environment | PAGERS[pager])
    assert found["library"] > 10
    assert found["all"] / (found["all"] - found["library"]) <= MOST_OF_A_LAUNCH
