"""Tests of the owner on a real GPU (``pytest -m gpu``). They have not yet run on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_processes import Worker

from kiwi_core import preload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LONG_S = 300.0
MIB = 1 << 20


@pytest.fixture
def program(tmp_path: Path, library: Path) -> Iterator[Worker]:
    more = {"KIWI_SOCKET_DIR": str(tmp_path)}
    worker = Worker(more | preload.environment(library, before=os.environ))
    worker.do("init(); from owner_calls import *", LONG_S)
    yield worker
    worker.close()


def test_random_programs_keep_every_byte(program: Worker) -> None:
    program.do("prepare()")
    assert program.get("stress(1, 120)", LONG_S) > 3


def test_memory_that_the_program_maps_itself_comes_back(program: Worker) -> None:
    program.do("from vmm_calls import *; prepare()")
    program.do(
        "s = Segment(64 * MIB); held = [xla(512 * MIB, 1), xla(6 * MIB, 2), make(70_000, 3)]"
    )
    program.do("held.append(s.grow(0, 8, 4)); two = reserve(512 * MIB)", LONG_S)
    program.do("map_at(two, 512 * MIB, held[0].handle); access(two, 512 * MIB)")
    program.do("held.append(Allocation(two, 512 * MIB, held[0].digest))")
    for _ in range(5):
        program.do("swap(); same(*held)", LONG_S)
    program.do("s.shrink(3); unmap(held[1].address, held[1].size); swap(); swap()", LONG_S)
    program.do("map_at(held[1].address, 6 * MIB, held[1].handle)")
    program.do("access(held[1].address, 6 * MIB); same(held[0], held[1], held[2])", LONG_S)


@pytest.mark.parametrize("kind", ["make", "xla"])
def test_what_the_driver_says_to_a_device_that_reads_by_itself(program: Worker, kind: str) -> None:
    """Without the library it accepts this for memory of ``cuMemAlloc``."""
    program.do(f"from vmm_calls import *; a = {kind}(8 * MIB, 1); sync_memops(a.address)")
    program.do("swap(); same(a)")
    assert program.get("books()['shared']") == 8 * MIB


def test_copies_ahead_are_right_and_a_page_out_after_them_copies_nothing(program: Worker) -> None:
    program.do("from vmm_calls import *; held = [make(1024 * MIB, 1), xla(512 * MIB, 2)]", LONG_S)
    program.do("prepare(); until(lambda: arena()['pinned'] >= books()['owned'], 'pinned', 120)")
    for seed in range(3, 6):
        program.do("arm()")
        assert program.get("ahead()", LONG_S)
        program.do("fault('copy_out', 0, -1); assert out() == 'moved'; fault('copy_out', 0, 0)")
        program.do("assert back() == 'moved'; disarm(); same(*held)", LONG_S)
        program.do(f"write(held[0], {seed}, 0, MIB); swap(); same(*held)", LONG_S)


def test_paged_out_memory_is_free_for_others(program: Worker) -> None:
    other = Worker({})
    try:
        other.do("init()", LONG_S)
        program.do("held = make(2048 * MIB, 1)", LONG_S)
        before = other.get("used()")
        assert program.get("out()", LONG_S) == "moved"
        assert before - other.get("used()") >= 2000 * MIB
        assert program.get("back()", LONG_S) == "moved"
        program.do("same(held)", LONG_S)
    finally:
        other.close()
