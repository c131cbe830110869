"""What PyTorch has free in its cache is not copied. Nothing of this has run on a real GPU yet.
``pytest -m gpu tests/gpu/inprocess``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker

from kiwi_core import preload

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
LONG_S = 300.0
MIB = 1 << 20

PROGRAM = """
from owner_calls import *
import torch
from kiwi_jupyter.kernel.unused import UnusedMemory
torch.manual_seed(3)
ended = UnusedMemory()
def words(mib):
    return torch.randint(-2**62, 2**62, (mib << 17,), device="cuda")
kept = [words(mib) for mib in (1, 30, 200)]
sums = [one.sum().item() for one in kept]
def right():
    return [one.sum().item() for one in kept] == sums
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Worker]:
    pytest.importorskip("torch", reason="PyTorch is not installed in this Python")
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])  # Kiwi may not be installed
    more = {"PYTHONPATH": os.pathsep.join(paths), "KIWI_SOCKET_DIR": str(tmp_path)}
    more["KIWI_VERIFY"] = "1"
    worker = Worker(more | preload.environment(preload.library(), before=os.environ))
    worker.do(PROGRAM, LONG_S)
    yield worker
    worker.close()


def test_what_torch_has_free_is_not_copied(program: Worker) -> None:
    """Also: the snapshot itself makes no call that ends what it tells."""
    program.do("junk = words(400); del junk; ended.burst_ended(); swap()", LONG_S)
    assert program.get("moved()['unused']", LONG_S) >= 390 * MIB
    assert program.get("right()", LONG_S)
    program.do("more = words(300); of_more = more.sum().item(); swap()", LONG_S)
    assert program.get("more.sum().item() == of_more and right()", LONG_S)


def test_a_kernel_that_still_runs_when_its_memory_is_freed(program: Worker) -> None:
    program.do(
        "for _ in range(20):\n"
        "    junk = words(100)\n"
        "    kept[1] += junk[: kept[1].numel()] - junk[: kept[1].numel()]\n"
        "    del junk\n"
        "ended.burst_ended(); swap()",
        LONG_S,
    )
    assert program.get("right()", LONG_S)


def test_the_memory_of_a_graph_is_copied(program: Worker) -> None:
    program.do(
        "source = words(64)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    between = source * 3\n"
        "    result = between + 1\n"
        "del between\n"
        "graph.replay(); before = result.sum().item()\n"
        "ended.burst_ended(); swap()",
        LONG_S,
    )
    assert program.get("result.sum().item() == before", LONG_S)
    program.do("graph.replay()", LONG_S)
    assert program.get("result.sum().item() == before and right()", LONG_S)


def test_how_long_a_look_takes(program: Worker) -> None:
    """A thousand tensors, as a large model has."""
    program.do("held = [words(1) for _ in range(1000)]; del held[::2]", LONG_S)
    took_s = program.get(
        "(began := time.perf_counter(), ended.burst_ended(), time.perf_counter() - began)[2]",
        LONG_S,
    )
    assert took_s < 0.1
    program.do("swap()", LONG_S)
    assert program.get("right()", LONG_S)
