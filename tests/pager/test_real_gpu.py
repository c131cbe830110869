"""Tests of the checkpoint pager on a real GPU: ``pytest -m gpu tests/pager``.

The contract is the one that the emulator passes; a difference is a bug of the emulator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from contract import PagerContract, moved, soon_ns
from cuda_processes import Worker
from worlds import RealWorld

from kiwi_core.gpu import nvml, processes
from kiwi_core.pager.api import Target
from kiwi_core.units import MIB, SessionId

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def world() -> Iterator[RealWorld]:
    world = RealWorld(nvml.gpus()[0].uuid)
    yield world
    world.close()


class TestRealGpu(PagerContract):
    # These need an injected fault.
    test_a_refused_page_out_leaves_it_running = None  # type: ignore[assignment]
    test_a_loss_is_told_and_stays = None  # type: ignore[assignment]


def test_parent_and_child_move_together(world: RealWorld) -> None:
    session = world.start(256 * MIB, child_bytes=128 * MIB)
    before = session.digest()
    for _ in range(3):
        moved(world.pager.page_out(session.target, soon_ns()))
        assert world.state(session.pid) == world.state(session.child_pid) == "CHECKPOINTED"
        moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.parametrize("stage", ["suspend", "page_out"])
def test_a_new_caller_finishes_for_one_that_was_killed(world: RealWorld, stage: str) -> None:
    session = world.start(256 * MIB)
    before = session.digest()
    caller = world.new_pager()
    moved(getattr(caller, stage)(session.target, soon_ns()))
    footprints = caller.export_footprints()
    caller.kill()
    world.pager.import_footprints(footprints)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_running_loop_keeps_its_bytes(world: RealWorld) -> None:
    session = world.start(256 * MIB)
    before = session.digest()
    session.loop()
    for _ in range(5):
        moved(world.pager.page_out(session.target, soon_ns()))
        moved(world.pager.page_in(session.target, soon_ns()))
        session.wait_rounds(5)
    assert session.digest() == before


def test_work_shows_as_busy(world: RealWorld) -> None:
    session = world.start(256 * MIB)
    session.loop()
    seen = []
    for _ in range(20):
        session.wait_rounds(2000)
        seen.append(world.pager.observe(session.target).busy)
        if seen[-1]:
            return
    assert seen[-1] is None, "NVML can say, and says that nobody worked"


TRAINING = """
import torch

def train(steps):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(256, 512, device="cuda")
        loss = torch.nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_training_loop_does_not_notice(world: RealWorld) -> None:
    worker = Worker({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    world.take(worker)
    worker.do(TRAINING, within_s=300)
    undisturbed = worker.get("train(2000)", within_s=300)
    root = processes.ref_of(worker.pid)
    assert root is not None
    target = Target(SessionId("torch"), root)
    worker.send("train(2000)")
    swaps = 0
    while not worker.answered(0.2):
        moved(world.pager.page_out(target, soon_ns()))
        moved(world.pager.page_in(target, soon_ns()))
        swaps += 1
    assert worker.answer() == undisturbed
    assert swaps > 0
