"""The source of a program for ``crowded_gpu`` that needs only the driver."""

from __future__ import annotations

CHECKSUMS = """
import hashlib, random
from cuda.bindings import driver as cuda
def check(result):
    if result[0]:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) > 1 else None
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
PIECE = 1 << 21
ballast, generator = check(cuda.cuMemAlloc(BALLAST_BYTES)), random.Random(11)
pieces = BALLAST_BYTES // PIECE
scratch, stream = check(cuda.cuMemAlloc(PIECE)), check(cuda.cuStreamCreate(1))
check(cuda.cuMemsetD8(ballast, 0, BALLAST_BYTES))
digests = {}
def write(number):
    data = generator.randbytes(PIECE)
    check(cuda.cuMemcpyHtoD(int(ballast) + number * PIECE, data, PIECE))
    digests[number] = hashlib.sha256(data).hexdigest()
def right(number):
    back = bytearray(PIECE)
    check(cuda.cuMemcpyDtoDAsync(scratch, int(ballast) + number * PIECE, PIECE, stream))
    check(cuda.cuStreamSynchronize(stream))
    check(cuda.cuMemcpyDtoH(back, scratch, PIECE))
    return hashlib.sha256(back).hexdigest() == digests[number]
well = True
for step in range(250):
    write(generator.randrange(pieces))
    well = well and right(generator.choice(sorted(digests)))
    small = [check(cuda.cuMemAlloc(size)) for size in (100, 5000, 300_000, 3_000_000)]
    for one in small:
        check(cuda.cuMemFree(one))
    pace()
well = well and all(right(number) for number in sorted(digests))
say(right=well, written=sorted(digests.items()))
"""
