"""In place of PyTorch, where there is none: memory that is kept for the next tensor, over plain
driver calls, and ``torch.cuda.memory_snapshot`` in the shape that PyTorch documents.

A tensor is ``bytes``, uninitialised. What was freed stays in its segment, and is merged with free
neighbours, as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver

MIB = 1 << 20
SEGMENT_BYTES = 20 * MIB


def ck(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None


@dataclass
class Block:
    size: int
    state: str = "inactive"


@dataclass
class Segment:
    address: int
    pool: tuple[int, int]
    blocks: list[Block] = field(default_factory=list)


class Tensor:
    def __init__(self, segment: Segment, block: Block) -> None:
        self._segment, self._block = segment, block

    @property
    def size(self) -> int:
        return self._block.size

    def data_ptr(self) -> int:
        blocks = self._segment.blocks
        return self._segment.address + sum(b.size for b in blocks[: blocks.index(self._block)])

    def fill(self, data: bytes) -> None:
        ck(driver.cuMemcpyHtoD(self.data_ptr(), data, len(data)))

    def read(self) -> bytes:
        data = bytearray(self.size)
        ck(driver.cuMemcpyDtoH(data, self.data_ptr(), self.size))
        return bytes(data)

    def free(self) -> None:
        """No call to the driver."""
        self._block.state = "inactive"
        blocks = self._segment.blocks
        merged: list[Block] = []
        for block in blocks:
            if merged and merged[-1].state == block.state == "inactive":
                merged[-1].size += block.size
            else:
                merged.append(block)
        blocks[:] = merged


segments: list[Segment] = []
looks = 0
initialised = False


def empty(size: int, pool: tuple[int, int] = (0, 0)) -> Tensor:
    global initialised
    if not initialised:
        ck(driver.cuInit(0))
        context = ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))
        ck(driver.cuCtxSetCurrent(context))
        initialised = True
    size = -(-size // 512) * 512
    for segment in segments:
        for block in segment.blocks:
            if segment.pool == pool and block.state == "inactive" and block.size >= size:
                return _split(segment, block, size)
    total = max(size, SEGMENT_BYTES)
    segment = Segment(int(ck(driver.cuMemAlloc(total))), pool, [Block(total)])
    segments.append(segment)
    return _split(segment, segment.blocks[0], size)


def _split(segment: Segment, block: Block, size: int) -> Tensor:
    at = segment.blocks.index(block)
    if block.size > size:
        segment.blocks.insert(at + 1, Block(block.size - size))
        block.size = size
    block.state = "active_allocated"
    return Tensor(segment, block)


def _memory_snapshot() -> list[dict[str, Any]]:
    global looks
    looks += 1
    return [_described(segment) for segment in segments]


def _described(segment: Segment) -> dict[str, Any]:
    address, blocks = segment.address, []
    for block in segment.blocks:
        blocks.append(
            {
                "address": address,
                "size": block.size,
                "requested_size": block.size,
                "state": block.state,
                "frames": [],
            }
        )
        address += block.size
    used = sum(block.size for block in segment.blocks if block.state != "inactive")
    return {
        "device": 0,
        "address": segment.address,
        "total_size": address - segment.address,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": segment.pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


cuda = SimpleNamespace(is_initialized=lambda: initialised, memory_snapshot=_memory_snapshot)
_C = SimpleNamespace(_cuda_isHistoryEnabled=lambda: False)
