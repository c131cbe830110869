"""The kernel's part and the library's together: PyTorch's free memory is not copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from preload_world import World

STANDIN = Path(__file__).parents[2] / "support" / "standin_torch"
MIB = 1 << 20


@pytest.fixture
def world(tmp_path: Path, library: Path) -> Iterator[World]:
    world = World(tmp_path, library, "1x256MiB")
    yield world
    world.close()


@pytest.fixture
def p(program):
    p = program(KIWI_VERIFY="1")
    p.do(f"sys.path.insert(0, {str(STANDIN)!r}); import torch")
    p.do("from kiwi_jupyter.kernel.unused import UnusedMemory; ended = UnusedMemory()")
    p.do("data = random.Random(1).randbytes(9 * MIB)")
    p.do("first, second = torch.empty(9 * MIB), torch.empty(30 * MIB)")
    p.do("first.fill(data); second.fill(data)")
    return p


def unused_by(p, code):
    before = p.get("moved()['unused']")
    p.do(code)
    return p.get("moved()['unused']") - before


def test_what_torch_has_free_is_not_copied(p):
    assert unused_by(p, "ended.burst_ended(); swap()") == 10 * MIB  # 11 are left of the segment
    p.do("assert first.read() == data; second.free(); ended.burst_ended()")
    assert unused_by(p, "swap()") == 40 * MIB
    p.do("assert first.read() == data; check()")


def test_memory_that_is_used_again_is_copied(p):
    p.do("second.free(); ended.burst_ended(); third = torch.empty(25 * MIB); third.fill(data)")
    assert unused_by(p, "swap(); assert third.read()[: len(data)] == data") == 0


def test_pools_of_cuda_graphs_are_copied(p):
    p.do("pooled = torch.empty(20 * MIB, (1, 0)); pooled.fill(data); pooled.free(); first.free()")
    assert unused_by(p, "ended.burst_ended(); swap()") == 20 * MIB
    p.do("assert pooled.read()[: len(data)] == data")  # as a graph would, that is launched again


def test_a_program_that_does_not_know_of_it_is_copied_whole(p):
    p.do("second.free()")
    assert unused_by(p, "swap(); assert first.read() == data") == 0
