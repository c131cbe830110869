"""Ordinary host memory that is mapped and touched, by several threads, near a GPU or not."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_ALIGN_BYTES: Final = 2 << 20
"""Size of a huge page, so that two threads never touch the same one."""


class Mapped:
    """Anonymous memory with a request for huge pages. Nothing is allocated until it is touched. It
    is aligned only to the page."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        handle = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(handle)
        del handle  # otherwise the mapping cannot be closed

    def touch(self, offset_bytes: int, size_bytes: int, value: int = 1) -> None:
        """Write to every byte; other threads run meanwhile."""
        ctypes.memset(self.address + offset_bytes, value, size_bytes)

    def equal(self, data: bytes) -> bool:
        return self._map[: len(data)] == data

    def close(self) -> None:
        self._map.close()


def pieces(size_bytes: int, count: int) -> list[tuple[int, int]]:
    """Return at most ``count`` (offset, size) that cover ``size_bytes``, cut at each 2 MiB."""
    each = -(-size_bytes // count // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES or PIECE_ALIGN_BYTES
    return [(at, min(each, size_bytes - at)) for at in range(0, size_bytes, each)]


def in_threads(work: Callable[[int, int], None], parts: list[tuple[int, int]]) -> None:
    """Call ``work(offset, size)`` for each part in its own thread. Raises the first error."""
    if len(parts) == 1:
        work(*parts[0])
        return
    with ThreadPoolExecutor(len(parts)) as threads:
        for done in [threads.submit(work, *part) for part in parts]:
            done.result()
