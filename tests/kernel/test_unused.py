"""What the kernel says of PyTorch's free memory, and when it says nothing."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kiwi_jupyter.kernel.unused import REST, UnusedMemory, preloaded, unused_ranges

MIB = 1 << 20


def block(size: int, state: str = "inactive", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def segment(address: int, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"segment_pool_id": (0, 0), "is_expandable": False, "device": 0, "stream": 0}
    return {"address": address, "blocks": list(blocks)} | fields | more


class Library:
    """In place of the preloaded one."""

    def __init__(self, passed: int = 7) -> None:
        self.passed = passed
        self.heard: list[tuple[int, list[tuple[int, int]]]] = []

    def kiwi_preload_passed(self) -> int:
        return self.passed

    def kiwi_preload_free_ranges(self, passed: int, n: int, addresses: int, sizes: int) -> int:
        both = [(ctypes.c_uint64 * n).from_address(at) if n else () for at in (addresses, sizes)]
        self.heard.append((passed, list(zip(*both, strict=True))))
        return 1


class Torch(SimpleNamespace):
    """``took_s`` is how long a look takes."""

    def __init__(self, *segments: dict[str, Any]) -> None:
        super().__init__()
        self.segments = list(segments)
        self.initialised, self.recording, self.looks = True, False, 0
        self.now_s, self.took_s = 100.0, 0.0
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialised, memory_snapshot=self.look
        )
        self._C = SimpleNamespace(_cuda_isHistoryEnabled=lambda: self.recording)

    def look(self) -> list[dict[str, Any]]:
        self.looks += 1
        self.now_s += self.took_s
        return self.segments


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch(segment(1 << 30, block(3 * MIB, "active_allocated"), block(17 * MIB)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def unused(torch: Torch, library: Library) -> UnusedMemory:
    return UnusedMemory(lambda: library, lambda: torch.now_s, lambda: torch.now_s)


def test_free_blocks_are_told(unused: UnusedMemory, library: Library) -> None:
    unused.burst_ended()
    assert library.heard == [(7, [((1 << 30) + 3 * MIB, 17 * MIB)])]


def test_only_free_blocks_of_plain_segments() -> None:
    found = unused_ranges(
        [
            segment(1000, block(10), block(20, "active_allocated"), block(30)),
            segment(2000, block(10, "active_awaiting_free"), block(5, "active_pending_free")),
            segment(3000, block(10, address=3000), segment_pool_id=(1, 0)),  # a CUDA graph's
            segment(3500, block(10, address=3500), segment_pool_id=(0, 1)),  # a MemPool's
            segment(4000, block(10), is_expandable=True),
            segment(5000, block(10), block(20), segment_pool_id=[0, 0]),
            segment(6000, block(8, "inactive", address=6000), block(8, "a new word")),
        ]
    )
    assert list(zip(*map(list, found), strict=True)) == [
        (1000, 10),
        (1030, 30),
        (5000, 10),
        (5010, 20),
        (6000, 8),
    ]


@pytest.mark.parametrize("missing", ["segment_pool_id", "is_expandable"])
def test_a_segment_that_does_not_say_what_it_is_is_left_out(missing: str) -> None:
    one = segment(1000, block(10))
    del one[missing]
    assert not unused_ranges([one])[0]


def test_nothing_free_takes_back_what_was_said(
    unused: UnusedMemory, torch: Torch, library: Library
) -> None:
    torch.segments = []
    unused.burst_ended()
    assert library.heard == [(7, [])]


def test_torch_is_neither_imported_nor_initialised(
    unused: UnusedMemory, torch: Torch, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.initialised = False
    unused.burst_ended()
    assert torch.looks == 0
    monkeypatch.delitem(sys.modules, "torch")
    unused.burst_ended()
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # it is being imported just now
    unused.burst_ended()
    assert library.heard == []
    torch.initialised = True
    monkeypatch.setitem(sys.modules, "torch", torch)
    unused.burst_ended()
    assert library.heard


def test_who_records_allocations_does_not_find_our_looks(
    unused: UnusedMemory, torch: Torch
) -> None:
    torch.recording = True
    unused.burst_ended()
    assert torch.looks == 0
    del torch._C._cuda_isHistoryEnabled
    unused.burst_ended()
    assert torch.looks == 1


def test_nobody_looks_where_there_is_nothing_to_say(
    unused: UnusedMemory, torch: Torch, library: Library
) -> None:
    library.passed = 0
    unused.burst_ended()
    assert torch.looks == 0
    library.passed = 1
    unused.burst_ended()
    assert torch.looks == 1


def test_without_the_library_nobody_looks(torch: Torch) -> None:
    tried: list[None] = []
    unused = UnusedMemory(lambda: tried.append(None))
    for _ in range(3):
        unused.burst_ended()
    assert (torch.looks, len(tried)) == (0, 1)
    assert preloaded() is None  # these tests run without it


def test_looks_that_take_long_are_rare(unused: UnusedMemory, torch: Torch) -> None:
    torch.took_s = 0.02
    unused.burst_ended()
    torch.now_s += 0.02 * REST - 0.01
    unused.burst_ended()
    assert torch.looks == 1
    torch.now_s += 0.02
    unused.burst_ended()
    assert torch.looks == 2


def test_a_look_that_fails_is_the_last(
    unused: UnusedMemory, torch: Torch, library: Library
) -> None:
    def refuse() -> None:
        torch.looks += 1
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    torch.cuda.memory_snapshot = refuse
    unused.burst_ended()
    unused.burst_ended()
    assert (torch.looks, library.heard) == (1, [])


def test_an_interrupt_is_not_raised_into_what_comes_after_the_cell(
    unused: UnusedMemory, torch: Torch, library: Library
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    look, torch.cuda.memory_snapshot = torch.cuda.memory_snapshot, interrupted
    unused.burst_ended()
    assert library.heard == []
    torch.cuda.memory_snapshot = look
    unused.burst_ended()
    assert len(library.heard) == 1
