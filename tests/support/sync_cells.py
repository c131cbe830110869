"""Sources of notebook cells in which every second driver call is a wait or a query.

A real driver crashes a program that waits while checkpointed, and so does the emulated one (profile
``worst``). Run ``gpu_cells.PRELUDE`` and ``SYNCHRONISING`` first, then ``make`` and one of
``LOOPS``. A loop runs until a file appears, and fails at the first wrong byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

THREADS: Final = 3

SYNCHRONISING = '''
import asyncio, itertools, threading
from concurrent.futures import ThreadPoolExecutor

class Synchronising:
    """Owns its stream, an event that is long over, and memory with known contents."""

    def __init__(self, mib, seed):
        self.memory, self.rounds = Memory(mib, seed), 0
        self.random = random.Random(seed)
        self.stream, self.old = check(cuda.cuStreamCreate(0)), check(cuda.cuEventCreate(0))
        check(cuda.cuEventRecord(self.old, self.stream))
        check(cuda.cuStreamSynchronize(self.stream))
        self.waits = itertools.cycle((
            cuda.cuCtxSynchronize,
            lambda: cuda.cuStreamSynchronize(self.stream),
            lambda: cuda.cuEventSynchronize(self.old),
            lambda: cuda.cuEventQuery(self.old),
            lambda: self.finished(cuda.cuStreamQuery(self.stream)),
            lambda: self.finished(cuda.cuStreamQuery(0)),
        ))
        self.works = itertools.cycle((self.fill, self.copy, self.upload))

    @staticmethod
    def finished(result):
        """Take work under way for an answer."""
        return (0,) if result[0] == cuda.CUresult.CUDA_ERROR_NOT_READY else result

    def fill(self):
        value = self.rounds % 251
        check(cuda.cuMemsetD8Async(self.memory.scratch, value, 4096, self.stream))

    def copy(self):
        source = self.memory.address + PIECE * self.random.randrange(len(self.memory.digests))
        check(cuda.cuMemcpyDtoDAsync(self.memory.scratch, source, PIECE, self.stream))

    def upload(self):
        check(cuda.cuMemcpyHtoD(self.memory.scratch, self.memory.buffer, 4096))

    def round(self):
        next(self.works)()
        check(next(self.waits)())
        self.rounds += 1
        if self.rounds % 64 == 0:
            check(cuda.cuStreamSynchronize(self.stream))
            self.memory.step(write=True)
        if self.rounds % 8 == 0:
            time.sleep(self.random.random() / 100)

    def some(self):
        check(cuda.cuCtxSetCurrent(self.memory.context))
        for _ in range(20):
            self.round()

    def until(self, stop):
        while not os.path.exists(stop):
            self.some()

def run_plain(all_, stop):
    while not os.path.exists(stop):
        for one in all_:
            one.some()

def run_pool(all_, stop):
    with ThreadPoolExecutor(len(all_)) as pool:
        for _ in pool.map(lambda one: one.until(stop), all_):
            pass

async def run_asyncio(all_, stop):
    async def one_of_them(one):
        loop = asyncio.get_running_loop()
        while not os.path.exists(stop):
            await loop.run_in_executor(None, one.some)
    await asyncio.gather(*map(one_of_them, all_))
'''

LOOPS: Final = {
    "plain": "run_plain(all_, {stop!r})",
    "pool": "run_pool(all_, {stop!r})",
    "asyncio": "await run_asyncio(all_, {stop!r})",
}


def make(mib: int, seed: int) -> str:
    """Return code that takes ``mib`` MiB in all."""
    each = mib // THREADS
    return f"all_ = [Synchronising({each}, {seed} + n) for n in range({THREADS})]"


def loop(how: str, stop: Path) -> str:
    return LOOPS[how].format(stop=str(stop))


VERDICT = (
    "print('INTACT' if all(one.memory.intact() for one in all_) else 'DAMAGED',"
    " sum(one.rounds for one in all_))"
)
