"""What is unchanged is not copied again: as hashes on the device tell, by the preloaded library's
own code, and byte by byte where that was asked for."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from contract import moved, soon_ns
from cuda_processes import Worker, wait_until

from kiwi_core import preload
from kiwi_core.gpu.hashing import LEAF_BYTES
from kiwi_core.pager.keeper.reference import Reference
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from stored_world import StoredWorld
    from worlds import RunningSession


@pytest.fixture
def world(make_world: Callable[..., StoredWorld]) -> StoredWorld:
    return make_world(hashing=True)


def out_and_in(world: StoredWorld, session: RunningSession) -> tuple[int, int]:
    """Bytes copied out, and bytes that were the same."""
    before = world.pager.keeper(session.root)
    moved(world.pager.page_out(session.target, soon_ns()))
    moved(world.pager.page_in(session.target, soon_ns()))
    after = world.pager.keeper(session.root)
    assert after["hashing"]
    keys = ("copied_bytes", "same_bytes")
    copied, same = (after[key] - before[key] for key in keys)
    return copied, same


def test_only_what_changed_is_copied_again(world: StoredWorld) -> None:
    session = world.start(16 * MIB)
    before = session.digest()
    assert out_and_in(world, session) == (16 * MIB, 0)
    assert out_and_in(world, session) == (0, 16 * MIB)
    assert session.digest() == before
    session.get(f"write(p + {5 * LEAF_BYTES} + 12345, b'!')")
    changed = session.digest()
    assert changed != before
    assert out_and_in(world, session) == (LEAF_BYTES, 14 * MIB)
    assert session.digest() == changed
    assert out_and_in(world, session) == (0, 16 * MIB)
    assert session.digest() == changed


def test_every_flipped_bit_is_found(world: StoredWorld) -> None:
    session = world.start(8 * MIB)
    out_and_in(world, session)
    rng = random.Random(7)
    for _ in range(8):
        at, bit = rng.randrange(8 * MIB), 1 << rng.randrange(8)
        session.get(f"write(p + {at}, bytes([read(p + {at}, 1)[0] ^ {bit}]))")
        before = session.digest()
        assert out_and_in(world, session) == (LEAF_BYTES, 6 * MIB)
        assert session.digest() == before


def test_what_is_no_whole_leaf_is_always_copied(world: StoredWorld) -> None:
    session = world.start(4 * MIB + 3 * 4096)
    before = session.digest()
    out_and_in(world, session)
    assert out_and_in(world, session) == (3 * 4096, 4 * MIB)
    assert session.digest() == before


def test_memory_that_came_and_went_meanwhile(world: StoredWorld) -> None:
    """Everything lies elsewhere now: what the kept copy has at the same place is compared only."""
    session = world.start(8 * MIB)
    session.get("globals().update(q=alloc(4 * MIB), r=alloc(4 * MIB))")
    session.get("(fill_all(q, 90, 4 * MIB), fill_all(r, 91, 4 * MIB))")
    out_and_in(world, session)
    session.get("(free(q), globals().update(q=alloc(8 * MIB)), fill_all(q, 92, 8 * MIB))")
    digests = "[digest_all(p, 8 * MIB), digest_all(q, 8 * MIB), digest_all(r, 4 * MIB)]"
    before = session.get(digests)
    for _ in range(2):
        out_and_in(world, session)
        assert session.get(digests) == before


def test_a_kept_copy_that_is_given_back_is_no_loss(world: StoredWorld) -> None:
    session = world.start(8 * MIB)
    before = session.digest()
    out_and_in(world, session)
    code = f"keepers.trim(ProcessRef({session.root.pid}, {session.root.start_ticks})).arena_bytes"
    assert world.pager.worker.get(code) == 0
    assert out_and_in(world, session) == (8 * MIB, 0)
    assert session.digest() == before


BLIND = """
import os, random
from kiwi_core.gpu import memory
from kiwi_core.gpu.custom_storage import MappedMemory
from kiwi_core.pager.keeper.arena import Arena
from kiwi_core.pager.keeper.copies import HostCopy

class Blind:
    def digests(self, address, leaves, stream):
        return [bytes(16)] * leaves

init()
os.environ["KIWI_VERIFY"] = {verify!r}
arena, size = Arena(), 6 * MIB
arena.reserve(size)
copy, piece = HostCopy(arena), MappedMemory(0, alloc(size), size, memory.new_stream())
fill(piece.address, 1, size)
copy.take((piece,), Blind())
memory.synchronize(piece.stream)
write(piece.address + 3 * MIB, b"!")
before = digest(piece.address, size)
copy.take((piece,), Blind())
memory.synchronize(piece.stream)
fill(piece.address, 2, size)
copy.bring((piece,))
memory.synchronize(piece.stream)
right = digest(piece.address, size) == before
"""


@pytest.mark.parametrize("verify", ["1", "0"])
def test_byte_compare_on_demand(world: StoredWorld, verify: str) -> None:
    """With a hash that says of everything that it is the same."""
    worker = Worker(world.environment)
    try:
        worker.do(BLIND.format(verify=verify))
        assert worker.get("right") is (verify == "1")
        assert worker.get("copy.copied_bytes // MIB") == (6 + 2 if verify == "1" else 6)
    finally:
        worker.close()


def test_a_gpu_that_hashes_wrongly_is_not_trusted(world: StoredWorld) -> None:
    """The self-test's reference is the library's code for the CPU."""
    reference = Reference(str(preload.library()))
    noise = random.Random(3).randbytes(LEAF_BYTES)
    assert reference.digest(noise) == reference.digest(noise)
    assert reference.digest(noise) != reference.digest(noise[:-1] + bytes([noise[-1] ^ 1]))
    code = """
init()
import random
from kiwi_core.gpu import hashing
from kiwi_core.pager.keeper.reference import Reference
reference = Reference({library!r})
noise = random.Random(5).randbytes(hashing.LEAF_BYTES)

def loaded(says):
    return hashing.loaded(reference.text, reference.keys, 4, says, noise) is not None
"""
    worker = Worker(world.environment)
    try:
        worker.do(code.format(library=str(preload.library())))
        assert worker.get("loaded(reference.digest)") is True
        assert worker.get("loaded(lambda leaf: bytes(16))") is False
        assert worker.get("hashing.loaded(b'no module', bytes(40992), 4, bytes, noise) is None")
    finally:
        worker.close()


def test_ram_is_pinned_ahead(make_world: Callable[..., StoredWorld]) -> None:
    world = make_world()
    session = world.start(8 * MIB)
    wait_until(
        lambda: world.pager.keeper(session.root)["pinned_bytes"] >= 8 * MIB, "the arena is pinned"
    )
