"""The pager with custom storage passes the contract, on the emulated driver of CUDA 13.4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from contract import PagerContract, moved, soon_ns

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from stored_world import StoredWorld


class TestStored(PagerContract):
    pass


def test_it_is_the_keeper_that_moves(world: StoredWorld) -> None:
    """What the contract cannot tell: the driver's own checkpoint would pass it, too."""
    session = world.start(8 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    record = world.record(session)
    assert record is not None
    assert (record.way, record.keeper_pid) == ("out", world.keeper_pid(session))
    said = world.pager.keeper(session.root)
    assert (said["way"], said["out_bytes"]) == ("out", 8 * MIB)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert world.record(session) is None
    assert session.digest() == before
