"""Tests that count what a page-out and a page-in ask the movers. Each question takes a millisecond
or more, and people wait for it; a number that grows here needs a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import moved, soon_ns
from worlds import EmulatedWorld, GatedWorld, LinkedWorld

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from worlds import SharedWorlds

COUNT = """
asked = []

def counted(call):
    async def count(self, name, *args, deadline_s):
        asked.append(name)
        return await call(self, name, *args, deadline_s=deadline_s)
    return count

MoverPool.call = counted(MoverPool.call)
"""
CHILD = "from cuda_processes import Worker; children = globals().setdefault('children', [])\n"
CHILD += "children.append(Worker({})); children[-1].do('init(); c = alloc(1 << 20)')"


@pytest.mark.parametrize(
    ("kind", "processes", "out", "back"),
    [
        (EmulatedWorld, 1, 5, 4),
        (GatedWorld, 1, 5, 4),
        (LinkedWorld, 1, 3, 2),
        (GatedWorld, 3, 9, 8),
        (LinkedWorld, 3, 8, 7),
    ],
)
def test_calls(
    shared_worlds: SharedWorlds,
    kind: type[EmulatedWorld],
    processes: int,
    out: int,
    back: int,
) -> None:
    with shared_worlds.lend(kind) as world:
        session = world.start(4 * MIB)
        before = session.digest()
        for _ in range(processes - 1):
            session.do(CHILD)
        moved(world.pager.page_out(session.target, soon_ns()))  # finds out that it is the only GPU
        moved(world.pager.page_in(session.target, soon_ns()))
        world.pager.patch(COUNT)
        moved(world.pager.page_out(session.target, soon_ns()))
        asked_out = world.pager.worker.get("asked")
        world.pager.patch("asked.clear()")
        moved(world.pager.page_in(session.target, soon_ns()))
        asked_back = world.pager.worker.get("asked")
        assert session.digest() == before
        assert len(asked_out) <= out, asked_out
        assert len(asked_back) <= back, asked_back
