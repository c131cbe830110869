"""A program on the GPU: ``gpu_work.py MIB SECONDS``. It fills memory, reads from it again and
again, and compares every byte at the end. Prints one line of JSON."""

import json
import os
import sys
import time

from cuda.bindings import driver as cuda

BLOCK = 1 << 20


def check(result):
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


mib, seconds = int(sys.argv[1]), float(sys.argv[2])
check(cuda.cuInit(0))
device = check(cuda.cuDeviceGet(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
block = os.urandom(BLOCK)
memory = int(check(cuda.cuMemAlloc(mib * BLOCK)))
for number in range(mib):
    check(cuda.cuMemcpyHtoD(memory + number * BLOCK, block, BLOCK))
word, longest_s, end_s = bytearray(8), 0.0, time.monotonic() + seconds
while (began_s := time.monotonic()) < end_s:
    check(cuda.cuMemcpyDtoH(word, memory, 8))
    longest_s = max(longest_s, time.monotonic() - began_s)
    time.sleep(0.01)
found, wrong = bytearray(BLOCK), 0
for number in range(mib):
    check(cuda.cuMemcpyDtoH(found, memory + number * BLOCK, BLOCK))
    wrong += found != block
print(
    json.dumps(
        {
            "host": os.uname().nodename,
            "uuid": bytes(check(cuda.cuDeviceGetUuid(device)).bytes).hex(),
            "wrong": wrong,
            "longest_pause_s": round(longest_s, 1),
        }
    )
)
