"""The role of the program whose memory Kiwi's library moves while a machine proves itself.

It takes memory in the ways of frameworks, and notices each byte that is not as it was. Whatever it
finds wrong is a ``GpuError`` "proof".
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import threading
from dataclasses import dataclass
from typing import Any, Final

from kiwi_core.bench.work.bus import Bus
from kiwi_core.errors import GpuError
from kiwi_core.gpu import memory
from kiwi_core.gpu.memory import call, cuda

_SMALL_BYTES: Final = (512, 70_000, 1 << 20)
"""Sizes that share a page of the GPU with others, and that do not."""

_WORDS_MAX: Final = 1 << 18
"""Words that each thread changes, again and again."""


@dataclass
class _Piece:
    """Memory whose contents are known."""

    address: int
    size: int
    digest: bytes = b""
    handle: int = 0
    """Of the program's own mapping; 0: allocated by the driver's ordinary call."""


class ProvingProgram(Bus):
    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[_Piece] = []
        """Those that are in place."""
        self._two_ways: tuple[_Piece, ...] = ()
        """Its own mappings, which ``alias`` and ``unmap`` change."""
        self._workers: list[_Worker] = []
        self._stream: Any = None
        self._graph: Any = None
        self._target: _Piece | None = None

    # --- memory that must come back -------------------------------------------------------------

    def take_pieces(self, size_bytes: int) -> int:
        """Take pieces of up to ``size_bytes``, allocated and mapped. Return their sum."""
        sizes = [*_SMALL_BYTES, size_bytes]
        self._pieces += [_Piece(memory.allocate(size), size) for size in sizes]
        self._two_ways = (_mapped(size_bytes), _mapped(_granularity()))
        self._pieces += self._two_ways
        for number, piece in enumerate(self._pieces):
            _write(piece, number)
        return sum(piece.size for piece in self._pieces)

    def same(self) -> None:
        """Raise if a byte has changed."""
        for piece in self._pieces:
            if _digest(piece) != piece.digest:
                raise _wrong(f"{piece.size} bytes came back with other contents")

    def write(self, seed: int) -> None:
        for number, piece in enumerate(self._pieces):
            _write(piece, seed + number)

    # --- mappings -------------------------------------------------------------------------------

    def alias(self) -> None:
        """Map memory at a second address, change it there, and give its handle back."""
        first = self._two_ways[0]
        at = _reserve(first.size)
        _map(at, first.size, first.handle)
        second = _Piece(at, first.size)
        if _digest(second) != first.digest:
            raise _wrong("memory is not the same at its second address")
        _write(second, 99)
        first.digest = second.digest
        self._pieces.append(second)
        call("releasing memory", cuda().cuMemRelease, first.handle)

    def unmap(self) -> None:
        """Unmap two pieces: the other address keeps the one, its handle the other."""
        for piece in self._two_ways:
            _unmap(piece)
            self._pieces.remove(piece)

    def map_again(self) -> None:
        piece = self._two_ways[1]
        piece.address = _reserve(piece.size)
        _map(piece.address, piece.size, piece.handle)
        self._pieces.append(piece)

    # --- threads --------------------------------------------------------------------------------

    def start_threads(self, count: int) -> None:
        context = call("reading the context", cuda().cuCtxGetCurrent)
        self._workers = [_Worker(context, seed) for seed in range(count)]

    def stop_threads(self) -> int:
        """Return how many rounds all of them made. Raise if a word of theirs is wrong."""
        for worker in self._workers:
            worker.go_on = False
        for worker in self._workers:
            worker.join()
            if worker.failed is not None:
                raise worker.failed
        return sum(worker.rounds for worker in self._workers)

    # --- graphs ---------------------------------------------------------------------------------

    def capture(self) -> None:
        """Begin a capture, with a first node in it."""
        self._target = self._target or _Piece(memory.allocate(1 << 20), 1 << 20)
        self._stream = self._stream or memory.new_stream()
        mode = cuda().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call("beginning a capture", cuda().cuStreamBeginCapture, self._stream, mode)
        self._fill(0, 17)

    def end_capture(self) -> None:
        self._fill(1 << 19, 23)
        graph = call("ending a capture", cuda().cuStreamEndCapture, self._stream)
        self._graph = call("making a graph", cuda().cuGraphInstantiate, graph, 0)

    def _fill(self, offset: int, value: int) -> None:
        assert self._target is not None
        args = (self._target.address + offset, value, 1 << 19, self._stream)
        call("filling GPU memory", cuda().cuMemsetD8Async, *args)

    def launch(self) -> None:
        """Launch the graph over zeros, and raise if it did not do what was captured."""
        assert self._target is not None
        memory.fill(self._target.address, 0, self._target.size)
        call("launching a graph", cuda().cuGraphLaunch, self._graph, self._stream)
        memory.synchronize(self._stream)
        half = 1 << 19
        if _read(self._target) != bytes([17]) * half + bytes([23]) * half:
            raise _wrong("a graph wrote something else after it was moved")

    def close(self) -> None:
        for worker in self._workers:
            worker.go_on = False
        super().close()


class _Worker(threading.Thread):
    """Counts in GPU memory: each round copies all words to a second place and back, and adds one to
    those of its own."""

    def __init__(self, context: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self._context, self._seed = context, seed
        self.go_on, self.rounds = True, 0
        self.failed: GpuError | None = None
        self.start()

    def run(self) -> None:
        try:
            call("entering the context", cuda().cuCtxSetCurrent, self._context)
            self._work()
        except GpuError as error:
            self.failed = error

    def _work(self) -> None:
        size = 4 * _WORDS_MAX
        here, there = memory.allocate(size), memory.allocate(size)
        stream = memory.new_stream()
        while self.go_on:
            value = self._seed << 24 | self.rounds & 0xFFFFFF
            fill = cuda().cuMemsetD32Async
            call("filling GPU memory", fill, here, value, _WORDS_MAX, stream)
            copy = cuda().cuMemcpyDtoDAsync
            call("copying in the GPU", copy, there, here, size, stream)
            memory.synchronize(stream)
            if _read(_Piece(there, size)) != value.to_bytes(4, "little") * _WORDS_MAX:
                self.failed = _wrong("a thread read other words than it had written")
                return
            self.rounds += 1
        memory.free(here)
        memory.free(there)


def _wrong(what: str) -> GpuError:
    return GpuError("proof", f"{what[:1].upper()}{what[1:]}.")


def _write(piece: _Piece, seed: int) -> None:
    content = random.Random(seed).randbytes(piece.size)
    piece.digest = hashlib.blake2b(content).digest()
    host = (ctypes.c_char * piece.size).from_buffer_copy(content)
    stream = memory.new_stream()
    memory.copy_in(ctypes.addressof(host), piece.address, piece.size, stream)
    memory.synchronize(stream)
    memory.end_stream(stream)


def _read(piece: _Piece) -> bytes:
    host = (ctypes.c_char * piece.size)()
    stream = memory.new_stream()
    memory.copy_out(ctypes.addressof(host), piece.address, piece.size, stream)
    memory.synchronize(stream)
    memory.end_stream(stream)
    return host.raw


def _digest(piece: _Piece) -> bytes:
    return hashlib.blake2b(_read(piece)).digest()


# --- the program's own mappings, as JAX and PyTorch's expandable segments make them ---------------


def _mapped(size: int) -> _Piece:
    size = -(-size // _granularity()) * _granularity()
    handle = int(call("creating memory", cuda().cuMemCreate, size, _wanted(), 0))
    at = _reserve(size)
    _map(at, size, handle)
    return _Piece(at, size, b"", handle)


def _wanted() -> Any:
    wanted = cuda().CUmemAllocationProp()
    wanted.type = cuda().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cuda().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    wanted.requestedHandleTypes = (
        cuda().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    return wanted


def _granularity() -> int:
    least = cuda().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    read = cuda().cuMemGetAllocationGranularity
    return int(call("reading the granularity", read, _wanted(), least))


def _reserve(size: int) -> int:
    return int(call("reserving addresses", cuda().cuMemAddressReserve, size, 0, 0, 0))


def _map(at: int, size: int, handle: int) -> None:
    call("mapping memory", cuda().cuMemMap, at, size, 0, handle, 0)
    access = cuda().CUmemAccessDesc()
    access.location = _wanted().location
    access.flags = cuda().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("allowing access", cuda().cuMemSetAccess, at, size, [access], 1)


def _unmap(piece: _Piece) -> None:
    call("unmapping memory", cuda().cuMemUnmap, piece.address, piece.size)
    call("giving addresses back", cuda().cuMemAddressFree, piece.address, piece.size)
