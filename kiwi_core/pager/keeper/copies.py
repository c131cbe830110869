"""The host copy of a program's GPU memory: copied out, copied in, and kept for the next time."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from kiwi_core.gpu import memory
from kiwi_core.gpu.hashing import LEAF_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.gpu.custom_storage import MappedMemory
    from kiwi_core.gpu.hashing import LeafHasher
    from kiwi_core.pager.keeper.arena import Arena


class HostCopy:
    """In ``arena``, one GPU's memory after the other's. Copies are queued on the streams that the
    driver gave; completing the operation waits for them. Calls raise ``GpuError``."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._digests: list[bytes] = []
        """Of the leaf at each offset, as it was copied last; empty: nothing is kept."""
        self.copied_bytes = self.same_bytes = 0
        self._sizes: list[tuple[int, int]] = []

    def forget(self) -> None:
        """Nothing of it is worth anything any more."""
        self._digests = []

    def take(self, pieces: tuple[MappedMemory, ...], hasher: LeafHasher | None) -> None:
        """Out of the GPU: what is not known to be the same as last time."""
        before, self._digests = self._digests, []
        self._sizes = [(piece.device, piece.size_bytes) for piece in pieces]
        digests: list[bytes] = []
        offset = 0
        for piece in pieces:
            leaves = -(-piece.size_bytes // LEAF_BYTES)
            found = self._hashed(piece, hasher)
            first = offset // LEAF_BYTES
            same = [
                digest == before[first + i] if first + i < len(before) else False
                for i, digest in enumerate(found)
            ]
            same = self._verified(piece, offset, same)
            self._take_piece(piece, offset, same + [False] * (leaves - len(same)))
            digests += found + [b""] * (leaves - len(found))
            offset += leaves * LEAF_BYTES
        self._digests = digests

    def bring(self, pieces: tuple[MappedMemory, ...]) -> None:
        """Into the GPU, all of it."""
        if [(piece.device, piece.size_bytes) for piece in pieces] != self._sizes:
            raise ValueError("the driver asks for other pieces than it gave")
        offset = 0
        for piece in pieces:
            at = piece.address
            for address, size_bytes in self._arena.spans(offset, piece.size_bytes):
                memory.copy_in(address, at, size_bytes, piece.stream)
                at += size_bytes
            offset += -(-piece.size_bytes // LEAF_BYTES) * LEAF_BYTES

    def _hashed(self, piece: MappedMemory, hasher: LeafHasher | None) -> list[bytes]:
        whole = piece.size_bytes // LEAF_BYTES
        if hasher is None or not whole:
            return []
        return hasher.digests(piece.address, whole, piece.stream)

    def _take_piece(self, piece: MappedMemory, offset: int, same: list[bool]) -> None:
        for first, count in _runs(same):
            begins = first * LEAF_BYTES
            size_bytes = min(count * LEAF_BYTES, piece.size_bytes - begins)
            at = piece.address + begins
            for address, part_bytes in self._arena.spans(offset + begins, size_bytes):
                memory.copy_out(address, at, part_bytes, piece.stream)
                at += part_bytes
            self.copied_bytes += size_bytes
        self.same_bytes += sum(same) * LEAF_BYTES

    def _verified(self, piece: MappedMemory, offset: int, same: list[bool]) -> list[bool]:
        """``KIWI_VERIFY=1``: what the hashes say is the same is compared, byte by byte."""
        if os.environ.get("KIWI_VERIFY") != "1":
            return same
        scratch = ctypes.create_string_buffer(LEAF_BYTES)
        for i in (i for i, one in enumerate(same) if one):
            at = piece.address + i * LEAF_BYTES
            memory.copy_out(ctypes.addressof(scratch), at, LEAF_BYTES, piece.stream)
            memory.synchronize(piece.stream)
            kept = b"".join(
                ctypes.string_at(address, size_bytes)
                for address, size_bytes in self._arena.spans(offset + i * LEAF_BYTES, LEAF_BYTES)
            )
            same[i] = kept == scratch.raw
        return same


def _runs(same: list[bool]) -> Iterator[tuple[int, int]]:
    """``(first, count)`` of the leaves that follow each other and are not the same."""
    first = 0
    while first < len(same):
        if same[first]:
            first += 1
            continue
        end = first
        while end < len(same) and not same[end]:
            end += 1
        yield first, end - first
        first = end
