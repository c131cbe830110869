"""System RAM: what keepers have counts, and what it does not allow is left to the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until

from kiwi_core.states import Reason
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from stored_world import StoredWorld


def test_a_budget_that_is_full_leaves_the_move_to_the_driver(world: StoredWorld) -> None:
    session = world.start(8 * MIB)
    before = session.digest()
    world.pager.close()
    pager = world.new_pager(budget_bytes=4 * MIB)
    for _ in range(2):
        moved(pager.page_out(session.target, soon_ns()))
        moved(pager.page_in(session.target, soon_ns()))
    other = world.start_without_keeper(8 * MIB)
    moved(pager.page_out(other.target, soon_ns()))
    assert world.record(other) is None
    moved(pager.page_in(other.target, soon_ns()))
    assert session.digest() == before


def test_what_others_keep_only_to_save_copies_goes_first(world: StoredWorld) -> None:
    pager = world.new_pager(budget_bytes=24 * MIB)
    first, second = world.start_without_keeper(16 * MIB), world.start_without_keeper(16 * MIB)
    digests = [first.digest(), second.digest()]
    moved(pager.page_out(first.target, soon_ns()))
    assert world.record(first) is not None
    arena_bytes = pager.keeper(first.root)["arena_bytes"]
    assert pager.worker.get("pager.idle_bytes()") == arena_bytes - 16 * MIB
    moved(pager.page_in(first.target, soon_ns()))
    assert pager.worker.get("pager.idle_bytes()") == arena_bytes, "its next way out needs no more"
    moved(pager.page_out(second.target, soon_ns()))
    assert world.record(second) is not None, "the first one's RAM was given back"
    assert pager.keeper(first.root)["arena_bytes"] == 0
    moved(pager.page_out(first.target, soon_ns()))
    assert world.record(first) is None, "the second one's is in use: the driver moved this one"
    for session in (first, second):
        moved(pager.page_in(session.target, soon_ns()))
    assert [first.digest(), second.digest()] == digests


def test_ram_that_is_reserved_already_is_there(world: StoredWorld) -> None:
    """The machine has none left, but the keeper has taken what it needs."""
    session = world.start(8 * MIB)
    pager = world.new_pager(host_bytes=0)
    moved(pager.page_out(session.target, soon_ns()))
    assert world.record(session) is not None
    moved(pager.page_in(session.target, soon_ns()))
    other = world.start_without_keeper(8 * MIB)
    driver = world.new_pager(host_bytes=0, wanted=False)
    refused(driver.page_out(other.target, soon_ns()), Reason.NO_HOST_MEMORY)


def test_a_gpu_too_full_for_a_keeper(world: StoredWorld) -> None:
    """It needs a context: without room for one the driver moves the memory."""
    session = world.start_without_keeper(world.memory_bytes - world.context_bytes)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.record(session) is None
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_what_filled_the_rest_of_the_gpu_comes_back(world: StoredWorld) -> None:
    """The keeper's own context is nobody who could take the room meanwhile."""
    session = world.start(8 * MIB)
    size_bytes = world.free_bytes()
    session.get(f"globals().update(q=alloc({size_bytes}))")
    session.get(f"fill_all(q, 9, {size_bytes})")
    before = session.get(f"digest_all(q, {size_bytes})")
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.record(session) is not None
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.get(f"digest_all(q, {size_bytes})") == before


@pytest.mark.parametrize("least_bytes", [0, 32 * MIB])
def test_keepers_are_got_ready_ahead(world: StoredWorld, least_bytes: int) -> None:
    """By looking, in the background; for what is too small to be worth it there is none."""
    session = world.start_without_keeper(8 * MIB)
    pager = world.new_pager(ahead=True, least_bytes=least_bytes)
    pager.observe(session.target)
    if least_bytes:
        moved(pager.page_out(session.target, soon_ns()))
        assert not world.keepers()
        moved(pager.page_in(session.target, soon_ns()))
        return
    wait_until(lambda: bool(world.keepers()), "a keeper")

    def pinned() -> bool:
        pager.observe(session.target)
        return bool(pager.keeper(session.root, 60)["pinned_bytes"] >= 8 * MIB)

    wait_until(pinned, "its RAM is pinned")
