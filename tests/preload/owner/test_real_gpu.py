"""The owner on a real GPU (``pytest -m gpu``). Nothing of it has run on one yet."""

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
    more = {"KIWI_SOCKET_DIR": str(tmp_path), "KIWI_VERIFY": "1"}
    worker = Worker(more | preload.environment(library, before=os.environ))
    worker.do("init(); from owner_calls import *", LONG_S)
    yield worker
    worker.close()


def test_the_gpu_hashes_as_the_cpu_does(program: Worker) -> None:
    program.do("data, keys = random.Random(1).randbytes(3 * LEAF), random_keys(1)")
    program.do("leaves = [data[i * LEAF : (i + 1) * LEAF] for i in range(3)]")
    program.do("assert device_hash(data, keys) == [cpu_hash(leaf, keys) for leaf in leaves]")


def test_random_programs_keep_every_byte(program: Worker) -> None:
    program.do("prepare()")
    assert program.get("stress(1, 120)", LONG_S) > 3
    assert program.get("moved()['differed']") == 0


def test_unchanged_memory_goes_out_without_a_copy(program: Worker) -> None:
    program.do(
        "prepare(); held = [make(size, size) for size in (100, 70 * MIB, 700 * MIB)]", LONG_S
    )
    program.do("until_hashing(); swap(); same(*held)", LONG_S)
    before = program.get("moved()['copied']")
    program.do("swap(); same(*held)", LONG_S)
    assert program.get("moved()['copied']") == before
    program.do("write(held[2], 1, 333 * MIB, 1); swap(); same(*held); check()", LONG_S)
    assert program.get("moved()['copied']") == before + 2 * MIB


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
