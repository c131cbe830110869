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
