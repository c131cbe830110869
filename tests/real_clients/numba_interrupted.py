"""A program of a user of numba-cuda whose calls are interrupted at the gate.

    numba_interrupted.py SIZE_MIB

A line on the input names what to do; the answer says whether it was interrupted.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import device_memset

numbers = np.random.default_rng(1).integers(0, 255, int(sys.argv[1]) << 20, dtype=np.uint8)
array = cuda.to_device(numbers)
stream = cuda.stream()


def copy_out() -> bool:
    return np.array_equal(array.copy_to_host(), numbers)


def copy_in() -> bool:
    array.copy_to_device(numbers, stream=stream)
    return True


def allocate() -> bool:
    cuda.device_array(1 << 20, dtype=np.uint8)
    return True


def fill() -> bool:
    device_memset(array, 7, 16, stream=stream)
    array[:16].copy_to_device(numbers[:16], stream=stream)
    stream.synchronize()
    return True


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    # As Kiwi's extension does in a kernel.
    interruptible = ctypes.CDLL(None).kiwi_preload_interruptible
    interruptible(ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p))
    answer({"pid": os.getpid()})
    for line in iter(sys.stdin.readline, ""):
        try:
            answer({"good": globals()[line.strip()]()})
        except KeyboardInterrupt:
            answer({"interrupted": line.strip()})


main()
