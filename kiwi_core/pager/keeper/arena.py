"""RAM for what is out: pieces one after the other, each touched when it is made, so that it is
there, and pinned in the background, so that it is fast.

Pieces stay where they are until all are given back: what was copied to an offset can be compared
with what is in the GPU later. Only one thread may grow, pin or give back at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import host, memory
from kiwi_core.gpu.hashing import LEAF_BYTES
from kiwi_core.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_MAX_BYTES: Final = 256 * MIB
"""A move waits for one that is being pinned: tens of milliseconds. A whole number of leaves."""

SPARED: Final = 8
"""One part in so many of the machine is left alone by what is only for speed."""

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED: Final = 1
"""From linux/mempolicy.h: a full node falls back to another."""


@dataclass
class _Piece:
    address: int
    size_bytes: int
    mapping: mmap.mmap
    pinned: bool = False


class Arena:
    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self.node = -1
        """Where new pieces should be; -1: anywhere."""

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self._pieces)

    @property
    def pinned_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self._pieces if piece.pinned)

    def missing_bytes(self, size_bytes: int) -> int:
        return max(0, -(-size_bytes // LEAF_BYTES) * LEAF_BYTES - self.size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Raises ``GpuError("no-host-memory")``, before anything is taken, where the machine or its
        control group has not got so much."""
        missing_bytes = self.missing_bytes(size_bytes)
        available_bytes = host.available_host_bytes() if missing_bytes else 0
        if missing_bytes > available_bytes:
            raise GpuError(
                "no-host-memory",
                f"{format_bytes(missing_bytes)} more of system RAM would be needed, which has "
                f"{format_bytes(available_bytes)} left.",
            )
        while self.grow_once(size_bytes):
            pass

    def to_spare(self, size_bytes: int) -> bool:
        """Can the machine spare what is missing, and still have a good part left?"""
        found = host.host_memory()
        left_bytes = found.available_bytes - self.missing_bytes(size_bytes)
        return left_bytes >= found.total_bytes // SPARED

    def grow_once(self, size_bytes: int) -> bool:
        """Adds one piece on the way to ``size_bytes``; false: there is nothing to add."""
        missing_bytes = self.missing_bytes(size_bytes)
        if not missing_bytes:
            return False
        self._pieces.append(_mapped(min(missing_bytes, PIECE_MAX_BYTES), self.node))
        return True

    def pin_once(self) -> bool:
        """Pins one piece; false: all are. Raises ``GpuError``: this one cannot be."""
        piece = next((piece for piece in self._pieces if not piece.pinned), None)
        if piece is None:
            return False
        memory.host_register(piece.address, piece.size_bytes)
        piece.pinned = True
        return True

    def give_back(self) -> None:
        """The last first, so that an error leaves the rest as it was."""
        while self._pieces:
            piece = self._pieces[-1]
            if piece.pinned:
                memory.host_unregister(piece.address)
            self._pieces.pop()
            piece.mapping.close()

    def spans(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """``(address, size_bytes)`` of the parts that ``size_bytes`` from ``offset`` on lie in."""
        begins = 0
        for piece in self._pieces:
            ends = begins + piece.size_bytes
            if size_bytes > 0 and offset < ends:
                part_bytes = min(size_bytes, ends - offset)
                yield piece.address + offset - begins, part_bytes
                offset, size_bytes = offset + part_bytes, size_bytes - part_bytes
            begins = ends


def gpu_node(pci_bus_id: str, root: Path = Path("/")) -> int:
    """The NUMA node that the GPU is at; -1: the machine does not say."""
    try:
        return int((root / "sys/bus/pci/devices" / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _mapped(size_bytes: int, node: int) -> _Piece:
    """Raises ``GpuError("no-host-memory")``."""
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise GpuError("no-host-memory", f"RAM cannot be had: {error.strerror}.") from error
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _prefer(address, size_bytes, node)
    ctypes.memset(address, 0, size_bytes)
    return _Piece(address, size_bytes, mapping)


def _prefer(address: int, size_bytes: int, node: int) -> None:
    """Only for speed: what the kernel refuses is left."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 64:
        return
    mask = ctypes.c_uint64(1 << node)
    ctypes.CDLL(None).syscall(
        number, ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MPOL_PREFERRED,
        ctypes.byref(mask), ctypes.c_ulong(64), 0,
    )  # fmt: skip
