"""Sources of notebook cells that use the GPU through plain ``cuda.bindings``.

Run ``PRELUDE`` first. ``Memory(mib, seed)`` then takes device memory and fills it with random
bytes; the host keeps only a digest of each piece. ``work(seconds)`` is a long loop of small copies
that checks what it reads and, with ``write=True``, replaces pieces by new random bytes;
``intact()`` reads everything back.
"""

from __future__ import annotations

from pathlib import Path

PRELUDE = '''
import hashlib, os, random, sys, threading, time
from cuda.bindings import driver as cuda

PIECE = 1 << 20

def check(result):
    error, *values = result
    if error:
        raise RuntimeError(f"the driver says {error.name}")
    return values[0] if len(values) == 1 else values

def open_gpu():
    check(cuda.cuInit(0))
    context = check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))
    check(cuda.cuCtxSetCurrent(context))
    return context

class Memory:
    def __init__(self, mib, seed):
        self.context, self.random = open_gpu(), random.Random(seed)
        # Pieces are cuts of this: random bytes for each would take longer than what is tested.
        self.noise = memoryview(self.random.randbytes(2 * PIECE))
        self.address = int(check(cuda.cuMemAlloc((mib + 1) * PIECE)))
        self.scratch = self.address + mib * PIECE
        self.digests, self.buffer = [None] * mib, bytearray(PIECE)
        self.steps, self.longest_s = 0, 0.0
        for number in range(mib):
            self.write(number)

    def write(self, number):
        cut = self.random.randrange(PIECE)
        data = bytes(self.noise[cut:cut + PIECE])
        check(cuda.cuMemcpyHtoD(self.address + number * PIECE, data, PIECE))
        self.digests[number] = hashlib.sha1(data).digest()

    def right(self, number, through_scratch=False):
        source = self.address + number * PIECE
        if through_scratch:
            check(cuda.cuMemcpyDtoD(self.scratch, source, PIECE))
            source = self.scratch
        check(cuda.cuMemcpyDtoH(self.buffer, source, PIECE))
        return hashlib.sha1(self.buffer).digest() == self.digests[number]

    def step(self, write=False):
        began = time.monotonic()
        number = self.random.randrange(len(self.digests))
        if write and self.steps % 4 == 0:
            self.write(number)
        if not self.right(number, through_scratch=self.steps % 2 == 0):
            raise AssertionError(f"piece {number} is damaged")
        check(cuda.cuMemsetD8(self.scratch, self.steps % 251, 4096))
        self.steps += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def work(self, seconds=0.0, steps=0, write=False, until="", pause=0.02):
        """``seconds`` on the clock (suspensions included), ``steps``, until a file ``until``
        appears: whatever comes latest."""
        ends_at, last = time.monotonic() + seconds, self.steps + steps
        while (
            time.monotonic() < ends_at or self.steps < last or until and not os.path.exists(until)
        ):
            self.step(write)
            time.sleep(pause)

    def intact(self):
        return all(self.right(number) for number in range(len(self.digests)))
'''


def take(mib: int, seed: int) -> str:
    return f"memory = Memory({mib}, {seed})"


def work(
    seconds: float = 0.0, *, steps: int = 0, write: bool = False, until: Path | str = ""
) -> str:
    return (
        f"memory.work({seconds}, {steps}, {write}, {str(until)!r})\nprint('worked', memory.steps)"
    )


INTACT = "print('INTACT' if memory.intact() else 'DAMAGED')"
CPU = "print(sum(n * n for n in range(1000)))"
CPU_PRINTS = "332833500\n"
