"""The pager with custom storage on a real GPU, of a driver for CUDA 13.4 or newer:
``pytest -m gpu tests/pager/stored``. It has run nowhere yet; what comes out belongs into ADR 25."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from contract import PagerContract, moved, soon_ns
from cuda_processes import wait_until
from stored_world import RealStoredWorld

from kiwi_core.gpu import nvml
from kiwi_core.pager.stored import why_not
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RealStoredWorld]:
    if missing := why_not():
        pytest.skip(missing)
    world = RealStoredWorld(nvml.gpus()[0].uuid, tmp_path / "keepers")
    yield world
    world.close()


class TestRealStored(PagerContract):
    # These need an injected fault.
    test_a_refused_page_out_leaves_it_running = None  # type: ignore[assignment]
    test_a_loss_is_told_and_stays = None  # type: ignore[assignment]


def test_only_what_changed_is_copied_again(world: RealStoredWorld) -> None:
    session = world.start(256 * MIB)
    before = session.digest()
    copied = []
    for _ in range(3):
        moved(world.pager.page_out(session.target, soon_ns()))
        assert world.record(session) is not None
        moved(world.pager.page_in(session.target, soon_ns()))
        copied.append(world.pager.keeper(session.root)["copied_bytes"])
        assert session.digest() == before
    assert copied[2] - copied[1] < copied[0] // 4


def test_a_new_caller_finds_the_keeper(world: RealStoredWorld) -> None:
    session = world.start(256 * MIB)
    before = session.digest()
    caller = world.new_pager()
    moved(caller.page_out(session.target, soon_ns()))
    footprints = caller.export_footprints()
    caller.kill()
    world.pager.import_footprints(footprints)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.kills
@pytest.mark.parametrize("call", ["page_out", "page_in"])
def test_what_becomes_of_a_program_whose_keeper_is_killed(
    world: RealStoredWorld, call: str
) -> None:
    """Documented nowhere: point 2 of ADR 22. Reports what the driver says afterwards; only on a
    machine that may be lost."""
    session = world.start(1024 * MIB)
    if call == "page_in":
        moved(world.pager.page_out(session.target, soon_ns()))
    asker = world.new_pager(wanted=False)
    code = f"__import__('kiwi_core.gpu.driver').gpu.driver.checkpoint_state({session.pid}).name"
    world.pager.begin(call, session.target, soon_ns())
    wanted = "CHECKPOINTING" if call == "page_out" else "RESTORING"
    wait_until(lambda: asker.worker.get(code) == wanted, wanted)
    world.kill_keeper(session)
    seen = []
    until = time.monotonic() + 10
    while time.monotonic() < until:
        state = asker.worker.get(code)
        if not seen or seen[-1] != state:
            seen.append(state)
        time.sleep(0.05)
    session.kill()
    print(f"keeper killed while {wanted}: the driver then said {seen}")
    assert seen
