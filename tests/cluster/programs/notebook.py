import os
import time

# %%
from cuda.bindings import driver as cuda

BLOCK, MIB = 1 << 20, 300


def check(result):
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


check(cuda.cuInit(0))
device = check(cuda.cuDeviceGet(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
block = os.urandom(BLOCK)
memory = int(check(cuda.cuMemAlloc(MIB * BLOCK)))
for number in range(MIB):
    check(cuda.cuMemcpyHtoD(memory + number * BLOCK, block, BLOCK))
# %%
word, longest_s, end_s = bytearray(8), 0.0, time.monotonic() + 6
while (began_s := time.monotonic()) < end_s:
    check(cuda.cuMemcpyDtoH(word, memory, 8))
    longest_s = max(longest_s, time.monotonic() - began_s)
    time.sleep(0.01)
print(f"longest pause: {longest_s:.1f} s")
# %%
found, wrong = bytearray(BLOCK), 0
for number in range(MIB):
    check(cuda.cuMemcpyDtoH(found, memory + number * BLOCK, BLOCK))
    wrong += found != block
print("wrong blocks:", wrong)
