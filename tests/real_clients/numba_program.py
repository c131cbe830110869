"""A program of a user of numba-cuda: it works on arrays in the GPU until its input ends.

    numba_program.py SIZE_MIB SEED

Each array in the GPU has a twin in the host's memory that goes through the same steps, and each
step checks what it fetches. A line on the input is a question; a line of JSON is the answer. The
program knows nothing of Kiwi, and its environment does not have it.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import device_memset

MIB = 1 << 20
ARRAYS = 6
PARTS = 16
"""Number of parts of each array; one step works on a part of some arrays."""

PAUSE_S = 0.02
"""Between two steps, each of which takes as long: other processes need the processors, too."""

WORD = np.uint32


class Work:
    def __init__(self, size_mib: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        words = size_mib * MIB // (ARRAYS * PARTS * WORD().nbytes)
        self.twins = [self.numbers(words * PARTS) for _ in range(ARRAYS)]
        self.arrays = [cuda.to_device(twin) for twin in self.twins]
        self.up, self.down = cuda.stream(), cuda.stream()
        self.pinned = cuda.pinned_array(words, dtype=WORD)
        self.fetched = cuda.pinned_array(words, dtype=WORD)
        self.mapped = cuda.mapped_array(words, dtype=WORD)
        self.words, self.rounds = words, 0

    def numbers(self, count: int) -> np.ndarray:
        return self.random.integers(0, 1 << 32, count, dtype=WORD)

    def step(self) -> None:
        """Copy from host to device on one stream, then device to device, fill and copy back on
        another stream that waits for its event; also allocate and free."""
        (a, into), (b, part_of_b), (c, cleared) = (self.any_part() for _ in range(3))
        byte = int(self.random.integers(256))
        filled = np.full(self.words, byte * 0x01010101, WORD)
        self.pinned[:] = self.numbers(self.words)
        cuda.synchronize()
        self.arrays[a][into].copy_to_device(self.pinned, stream=self.up)
        device_memset(self.mapped, byte, self.mapped.nbytes, stream=self.up)
        written = cuda.event(timing=False)
        written.record(self.up)
        written.wait(self.down)
        scratch = cuda.device_array(self.words, dtype=WORD, stream=self.down)
        scratch.copy_to_device(self.arrays[a][into], stream=self.down)
        self.arrays[b][part_of_b].copy_to_device(scratch, stream=self.down)
        target = self.arrays[c][cleared]
        device_memset(target, byte, target.nbytes, stream=self.down)
        scratch.copy_to_host(self.fetched, stream=self.down)
        self.down.synchronize()
        written.synchronize()
        self.must_be_equal("fetched", self.fetched, self.pinned)
        self.must_be_equal("mapped", self.mapped, filled)
        self.twins[a][into] = self.pinned
        self.twins[b][part_of_b] = self.pinned
        self.twins[c][cleared] = filled
        self.rounds += 1

    def any_part(self) -> tuple[int, slice]:
        array, part = self.random.integers(ARRAYS), int(self.random.integers(PARTS))
        return int(array), slice(part * self.words, (part + 1) * self.words)

    def must_be_equal(self, what: str, got: np.ndarray, wanted: np.ndarray) -> None:
        if not np.array_equal(got, wanted):
            wrong = int(np.count_nonzero(got != wanted))
            raise AssertionError(f"round {self.rounds}: {wrong} words of {what} are wrong")

    # --- questions --------------------------------------------------------------------------------

    def sums(self) -> dict[str, object]:
        """Return the checksums of all arrays in the GPU, and the right ones."""
        return {
            "rounds": self.rounds,
            "gpu": [digest(array.copy_to_host()) for array in self.arrays],
            "host": [digest(twin) for twin in self.twins],
        }

    def spoilt_sums(self) -> dict[str, object]:
        """Change one byte of the last array in the GPU only; return the checksums."""
        byte = self.arrays[-1].view(np.uint8)[5:6]
        byte.copy_to_device(byte.copy_to_host() ^ np.uint8(1))
        return self.sums()


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array).hexdigest()


def main() -> None:
    work = Work(int(sys.argv[1]), int(sys.argv[2]))
    answer({"pid": os.getpid(), "gpu": cuda.get_current_device().name})
    while True:
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            question = sys.stdin.readline().strip()
            if not question:
                return
            answer(getattr(work, question)())
        work.step()


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


main()
