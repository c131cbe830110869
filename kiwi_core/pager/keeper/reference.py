"""The hash, as the preloaded library has it: its text for the GPU, and the same on the CPU."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from kiwi_core.gpu import hashing
from kiwi_core.gpu.hashing import DIGEST_BYTES, KEY_BYTES, LEAF_BYTES

if TYPE_CHECKING:
    from kiwi_core.gpu.hashing import LeafHasher

_ROW_KEYS_BYTES: Final = 2056 * 4
_PRIME: Final = (1 << 61) - 1


class Reference:
    """``library`` is the file of the preloaded library, loaded like any other: its names are not
    seen by anybody else. Raises ``OSError`` or ``AttributeError`` where it cannot be used."""

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library, mode=os.RTLD_LOCAL)
        loaded.kiwi_preload_hash_text.restype = ctypes.c_char_p
        self._leaf = loaded.kiwi_preload_hash_leaf
        self.text: bytes = loaded.kiwi_preload_hash_text()
        self._keys = ctypes.create_string_buffer(KEY_BYTES + 16)
        self._keys_at = (ctypes.addressof(self._keys) + 15) // 16 * 16
        self.keys = _drawn()
        ctypes.memmove(self._keys_at, self.keys, KEY_BYTES)

    def digest(self, leaf: bytes) -> bytes:
        answer = ctypes.create_string_buffer(DIGEST_BYTES)
        self._leaf(leaf, ctypes.c_void_p(self._keys_at), answer)
        return answer.raw


def hasher(library: str, room_leaves: int) -> LeafHasher | None:
    """``None``: there is none that can be trusted; everything is copied each time."""
    if not library:
        return None
    try:
        reference = Reference(library)
    except (OSError, AttributeError):
        return None
    noise = os.urandom(LEAF_BYTES)
    return hashing.loaded(reference.text, reference.keys, room_leaves, reference.digest, noise)


def _drawn() -> bytes:
    """Keys that nobody else knows; those after the row keys are below 2^61 - 1."""
    raw = os.urandom(KEY_BYTES)
    words = memoryview(raw[_ROW_KEYS_BYTES:]).cast("Q")
    second = b"".join(((word & _PRIME) % _PRIME).to_bytes(8, "little") for word in words)
    return raw[:_ROW_KEYS_BYTES] + second
