"""A program that takes the rest of the GPU to the last block, and later compares every byte.

    filling_job.py

It fills the GPU and prints a JSON line, waits for a line of input, reads everything back, and
prints how many bytes are in blocks that differ. Each block of 2 MiB holds a number of its own.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

from roundtrip_job import check

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST_BYTES, BLOCK_BYTES = 1 << 30, 1 << 21
"""Sizes of the first and the last allocations. The driver takes large memory 2 MiB at a time."""
PIECE_BYTES = 1 << 26
OUT_OF_MEMORY = 2


class Filling:
    """All memory that the driver gives, in allocations of decreasing size."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cu = driver
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
        self.parts: list[tuple[int, int]] = []
        self._take_all()
        for number, address in enumerate(self._blocks()):
            check(driver.cuMemsetD32(address, _value(number), BLOCK_BYTES // 4))
        check(driver.cuMemcpyDtoH(bytearray(4), self.parts[-1][0], 4))  # waits for the last one

    def _take_all(self) -> None:
        size = LARGEST_BYTES
        while size >= BLOCK_BYTES:
            code, address = self.cu.cuMemAlloc(size)
            if int(code) == OUT_OF_MEMORY:
                size //= 2
            else:
                self.parts.append((int(check((code, address))), size))

    def _blocks(self) -> Iterator[int]:
        for base, size in self.parts:
            yield from range(base, base + size, BLOCK_BYTES)

    def size(self) -> int:
        return sum(size for _, size in self.parts)

    def wrong_bytes(self) -> int:
        """Return the bytes of all blocks that are not as they were written."""
        wrong, number = 0, 0
        back = bytearray(PIECE_BYTES)
        for address, length in self._pieces():
            piece = memoryview(back)[:length]
            check(self.cu.cuMemcpyDtoH(piece, address, length))
            for offset in range(0, length, BLOCK_BYTES):
                wanted = _value(number).to_bytes(4, "little") * (BLOCK_BYTES // 4)
                # As bytes: views are compared byte by byte, which took minutes for 12 GiB.
                same = bytes(piece[offset : offset + BLOCK_BYTES]) == wanted
                wrong += 0 if same else BLOCK_BYTES
                number += 1
        return wrong

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for base, size in self.parts:
            for offset in range(0, size, PIECE_BYTES):
                yield base + offset, min(PIECE_BYTES, size - offset)


def _value(number: int) -> int:
    """Return a value without equal bytes at equal places in neighbouring blocks."""
    return (number * 2_654_435_761 + 1) & 0xFFFF_FFFF


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    # A program that is over its limit exits normally: on some drivers a restored process must not
    # be killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    filling = Filling()
    _say(bytes=filling.size(), allocations=len(filling.parts))
    if sys.stdin.readline():
        _say(bytes=filling.size(), wrong_bytes=filling.wrong_bytes())


if __name__ == "__main__":
    main()
