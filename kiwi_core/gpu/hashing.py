"""Hashes of GPU memory, made on the GPU: which leaves of 2 MiB are what they were.

The code is the preloaded library's (``kiwi_core/preload/src/hash.h`` says what it promises), lent
as text; a keeper uses it on another process's memory. Every call raises ``GpuError``; the thread
must have entered the GPU.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import memory
from kiwi_core.gpu.memory import call, cuda

if TYPE_CHECKING:
    from collections.abc import Callable

LEAF_BYTES: Final = 2 << 20
DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 40992
_THREADS: Final = 256
_TRIED_LEAVES: Final = 2
_PARAMETERS: Final = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


class LeafHasher:
    """``text`` is the PTX, ``keys`` are this process's own; ``room_leaves`` is how many can be
    hashed at a time. It is not to be trusted before ``agrees`` has said so."""

    def __init__(self, text: bytes, keys: bytes, room_leaves: int) -> None:
        self._room_leaves = max(room_leaves, _TRIED_LEAVES)
        module = call("loading the hash", cuda().cuModuleLoadData, text + b"\0")
        self._function = call("finding the hash", cuda().cuModuleGetFunction, module, _NAME)
        self._keys = memory.allocate(KEY_BYTES)
        self._results = memory.host_allocate(self._room_leaves * DIGEST_BYTES)
        call("copying the keys", cuda().cuMemcpyHtoD, self._keys, keys, KEY_BYTES)

    def digests(self, address: int, leaves: int, stream: Any) -> list[bytes]:
        """Of the ``leaves`` from ``address`` on, in order; waits for ``stream``."""
        found = bytearray()
        for first in range(0, leaves, self._room_leaves):
            count = min(leaves - first, self._room_leaves)
            self._launch(address + first * LEAF_BYTES, count, stream)
            memory.synchronize(stream)
            found += ctypes.string_at(self._results, count * DIGEST_BYTES)
        return [bytes(found[at : at + DIGEST_BYTES]) for at in range(0, len(found), DIGEST_BYTES)]

    def _launch(self, address: int, leaves: int, stream: Any) -> None:
        values = (address, self._results, self._keys)
        call(
            "hashing", cuda().cuLaunchKernel, self._function,
            leaves, 1, 1, _THREADS, 1, 1, 0, stream, (values, _PARAMETERS), 0,
        )  # fmt: skip

    def agrees(self, reference: Callable[[bytes], bytes], noise: bytes) -> bool:
        """Does the GPU say what the CPU says, of ``noise`` and of the same with one bit changed?
        Uses 4 MiB of GPU memory for a moment."""
        other = bytearray(noise)
        other[noise[0] * 8191] ^= 1 << (noise[1] % 8)
        both = noise + bytes(other)
        address, stream = memory.allocate(len(both)), memory.new_stream()
        try:
            call("copying noise", cuda().cuMemcpyHtoD, address, both, len(both))
            seen = self.digests(address, _TRIED_LEAVES, stream)
        finally:
            memory.end_stream(stream)
            memory.free(address)
        return seen == [reference(noise), reference(bytes(other))] and seen[0] != seen[1]


_NAME: Final = b"kiwi_hash_leaves"


def loaded(
    text: bytes, keys: bytes, room_leaves: int, reference: Callable[[bytes], bytes], noise: bytes
) -> LeafHasher | None:
    """A hasher that has passed its self-test; ``None`` where this GPU or driver has none that does:
    then everything is copied each time."""
    try:
        hasher = LeafHasher(text, keys, room_leaves)
        return hasher if hasher.agrees(reference, noise) else None
    except GpuError:
        return None
