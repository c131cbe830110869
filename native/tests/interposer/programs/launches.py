"""Launch a kernel by ``cuda.bindings`` over and over: ``launches.py COUNT EVERY`` waits for the
stream after each EVERY launches, and prints the processor time of one launch in ns."""

import ctypes
import sys
import time

from cuda.bindings import driver


def ck(result):
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None


def main(count, every):
    ck(driver.cuInit(0))
    ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(0))))
    p, s = ck(driver.cuMemAlloc(4096)), ck(driver.cuStreamCreate(1))
    m = ck(driver.cuModuleLoadData(b"kiwi-emulated-module\0"))
    f = ck(driver.cuModuleGetFunction(m, b"fill_u32"))
    args = ((p, 1, 7), (None, ctypes.c_uint64, ctypes.c_uint32))
    began = time.thread_time_ns()
    for i in range(count):
        driver.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, args, 0)
        if i % every == every - 1:
            ck(driver.cuStreamSynchronize(s))
    ck(driver.cuStreamSynchronize(s))
    print((time.thread_time_ns() - began) / count)


main(int(sys.argv[1]), int(sys.argv[2]))
