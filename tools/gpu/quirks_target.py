"""A CUDA program whose next call is chosen from outside: the target of the probes of
``quirks.py``.

    quirks_target.py [--bytes N]      holds N bytes of noise, then obeys
    quirks_target.py --hog N          takes all free GPU memory but N bytes, until its input ends
    quirks_target.py --zombie         starts a CUDA program that ends, and never waits for it

Each line of its input names a call of ``Calls``; the answer is a JSON line with the driver's code.
The program may be killed, stopped, or die of a call at any time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
SPARE = 3
"""Number of objects that a call uses up: a call may be made while LOCKED and while CHECKPOINTED."""
SMALL_BYTES = 1 << 16

EMULATED_MODULE = b"kiwi-emulated-module\0"
SPIN_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin_ns(.param .u64 duration)
{
    .reg .pred %p<2>;
    .reg .u64 %t<5>;
    ld.param.u64 %t1, [duration];
    mov.u64 %t2, %globaltimer;
again:
    mov.u64 %t3, %globaltimer;
    sub.u64 %t4, %t3, %t2;
    setp.lt.u64 %p1, %t4, %t1;
    @%p1 bra again;
    ret;
}
\0"""


def check(result: Any) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code!r}")
    return values[0] if len(values) == 1 else values


class Calls:
    """Calls: each public method is a call that returns the driver's result, or a plain value."""

    def __init__(self, size: int) -> None:
        import ctypes

        from cuda.bindings import driver as cu

        self.cu, self.ctypes = cu, ctypes
        check(cu.cuInit(0))
        self.device = check(cu.cuDeviceGet(0))
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(self.device))))
        self._fill(size)
        self.small = bytearray(SMALL_BYTES)
        self.streams = [check(cu.cuStreamCreate(1)) for _ in range(SPARE)]
        self.stream = check(cu.cuStreamCreate(1))
        self.events = [check(cu.cuEventCreate(0)) for _ in range(SPARE)]
        self.event = check(cu.cuEventCreate(0))
        self.spares = [check(cu.cuMemAlloc(SMALL_BYTES)) for _ in range(SPARE)]
        self.pinned = int(check(cu.cuMemAllocHost(SMALL_BYTES)))
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.nvml.nvmlInit_v2()  # as PyTorch does when it looks for GPUs: it never shuts NVML down
        emulated = "KIWI_EMULATOR_STATE" in os.environ
        self.image = EMULATED_MODULE if emulated else SPIN_PTX
        self.kernel = self._load_kernel()
        if self.kernel is not None:
            check(self.cuLaunchKernel())
        check(cu.cuEventRecord(self.event, self.stream))  # the old event: done before any lock
        check(cu.cuCtxSynchronize())

    def _fill(self, size: int) -> None:
        """Fill memory with noise that repeats after a block, shifted, so that all pages differ."""
        block = random.Random(size).randbytes(MIB + 4096 + 1)
        self.size, self.data = size, int(check(self.cu.cuMemAlloc(size)))
        expected = hashlib.blake2b()
        for offset in range(0, size, MIB):
            shift = (offset // MIB) % 4096
            part = block[shift : shift + min(MIB, size - offset)]
            check(self.cu.cuMemcpyHtoD(self.data + offset, part, len(part)))
            expected.update(part)
        self.expected = expected.hexdigest()

    def _load_kernel(self) -> Any:
        """Return the kernel, or ``None`` if the driver cannot compile it: then only launches
        fail."""
        code, module = self.cu.cuModuleLoadData(self.image)
        if int(code) != 0:
            return None
        return check(self.cu.cuModuleGetFunction(module, b"spin_ns"))

    def _spin(self, seconds: float) -> Any:
        if self.kernel is None:
            raise RuntimeError("there is no kernel: its module could not be loaded")
        kernel_args = ((int(seconds * 1e9),), (self.ctypes.c_uint64,))
        return self.cu.cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, self.stream, kernel_args, 0)

    # --- calls that may come while the process is held ---

    def cuCtxSynchronize(self) -> Any:  # noqa: N802 - the driver's names
        return self.cu.cuCtxSynchronize()

    def cuStreamSynchronize(self) -> Any:  # noqa: N802
        return self.cu.cuStreamSynchronize(self.stream)

    def cuEventSynchronize(self) -> Any:  # noqa: N802
        return self.cu.cuEventSynchronize(self.event)

    def cuEventQuery(self) -> Any:  # noqa: N802
        return self.cu.cuEventQuery(self.event)

    def cuStreamQuery(self) -> Any:  # noqa: N802
        return self.cu.cuStreamQuery(self.stream)

    def cuMemAlloc(self) -> Any:  # noqa: N802
        return self.cu.cuMemAlloc(SMALL_BYTES)

    def cuMemFree(self) -> Any:  # noqa: N802
        return self.cu.cuMemFree(self.spares.pop())

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return self.cu.cuMemGetInfo()

    def cuMemsetD32(self) -> Any:  # noqa: N802
        return self.cu.cuMemsetD32(self.spares[0], 7, SMALL_BYTES // 4)

    def cuLaunchKernel(self) -> Any:  # noqa: N802
        return self._spin(0.0)

    def cuMemcpyDtoH(self) -> Any:  # noqa: N802
        return self.cu.cuMemcpyDtoH(self.small, self.data, min(SMALL_BYTES, self.size))

    def cuMemcpyHtoD(self) -> Any:  # noqa: N802
        return self.cu.cuMemcpyHtoD(self.spares[0], bytes(SMALL_BYTES), SMALL_BYTES)

    def cuEventCreate(self) -> Any:  # noqa: N802
        return self.cu.cuEventCreate(0)

    def cuEventRecord(self) -> Any:  # noqa: N802
        return self.cu.cuEventRecord(self.events[0], self.stream)

    def cuEventDestroy(self) -> Any:  # noqa: N802
        return self.cu.cuEventDestroy(self.events.pop())

    def cuStreamCreate(self) -> Any:  # noqa: N802
        return self.cu.cuStreamCreate(1)

    def cuStreamDestroy(self) -> Any:  # noqa: N802
        return self.cu.cuStreamDestroy(self.streams.pop())

    def cuModuleLoadData(self) -> Any:  # noqa: N802
        return self.cu.cuModuleLoadData(self.image)

    def cuMemAllocHost(self) -> Any:  # noqa: N802
        return self.cu.cuMemAllocHost(SMALL_BYTES)

    def cuDeviceGetAttribute(self) -> Any:  # noqa: N802
        kind = self.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return self.cu.cuDeviceGetAttribute(kind, self.device)

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return self.cu.cuCtxGetCurrent()

    def cuDevicePrimaryCtxRetain(self) -> Any:  # noqa: N802
        return self.cu.cuDevicePrimaryCtxRetain(self.device)

    def read_pinned(self) -> int:
        """Read pinned memory, without any call of the driver."""
        self.ctypes.string_at(self.pinned, SMALL_BYTES)
        return 0

    def nvmlInit(self) -> int:  # noqa: N802 - NVML's names
        return int(self.nvml.nvmlInit_v2())

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return int(self.nvml.nvmlDeviceGetCount_v2(self.ctypes.byref(self.ctypes.c_uint())))

    def nvmlDeviceGetMemoryInfo(self) -> int:  # noqa: N802
        device, figures = self.ctypes.c_void_p(), (self.ctypes.c_uint64 * 3)()
        code = self.nvml.nvmlDeviceGetHandleByIndex_v2(0, self.ctypes.byref(device))
        return int(code or self.nvml.nvmlDeviceGetMemoryInfo(device, figures))

    def copy_then_stream_sync(self) -> Any:
        """Make the calls of PyTorch's ``.item()``."""
        size = min(SMALL_BYTES, self.size)
        check(self.cu.cuMemcpyDtoHAsync(self.pinned, self.data, size, self.stream))
        return self.cu.cuStreamSynchronize(self.stream)

    def launch_then_ctx_sync(self) -> Any:
        check(self._spin(0.0))
        return self.cu.cuCtxSynchronize()

    # --- work, and the end ---

    def crash(self) -> None:
        """Die as if killed by a call of the driver, to test the probes."""
        self.ctypes.string_at(0)

    def spin_3s(self) -> Any:
        return self._spin(3.0)

    def spin_2s_then_ctx_sync(self) -> Any:
        check(self._spin(2.0))
        return self.cu.cuCtxSynchronize()

    def intact(self) -> int:
        """Return 1 if a byte of the noise has changed."""
        found, back = hashlib.blake2b(), bytearray(MIB)
        for offset in range(0, self.size, MIB):
            part = memoryview(back)[: min(MIB, self.size - offset)]
            check(self.cu.cuMemcpyDtoH(part, self.data + offset, len(part)))
            found.update(part)
        return 0 if found.hexdigest() == self.expected else 1

    def exit(self) -> None:
        """Exit without freeing the GPU memory."""
        sys.exit(0)


def _perform(call: Callable[[], Any]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        result = call()
        code = int(result[0]) if isinstance(result, tuple) else int(result)
    except RuntimeError as error:
        return {"code": -1, "why": str(error)}
    return {"code": code, "seconds": round(time.monotonic() - began_s, 6)}


def _interrupted(*_: object) -> None:
    print(json.dumps({"did": "SIGINT", "code": 0}), flush=True)


def _zombie() -> None:
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended: a zombie
    print(json.dumps({"ready": True, "zombie": child.pid}), flush=True)
    sys.stdin.read()


def _hog(leave: int) -> None:
    from cuda.bindings import driver as cu

    check(cu.cuInit(0))
    check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(0))))))
    step = 1 << 36
    while step >= MIB:
        free = int(check(cu.cuMemGetInfo())[0])
        fits = free - step >= leave and int(cu.cuMemAlloc(step)[0]) == 0
        step = step if fits else step // 2
    print(json.dumps({"ready": True, "free": int(check(cu.cuMemGetInfo())[0])}), flush=True)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=int, default=4 * MIB)
    parser.add_argument("--hog", type=int, metavar="N")
    parser.add_argument("--zombie", action="store_true")
    args = parser.parse_args()
    if args.hog is not None:
        return _hog(args.hog)
    if args.zombie:
        return _zombie()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash on purpose
    signal.signal(signal.SIGINT, _interrupted)
    calls = Calls(args.bytes)
    print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name:
            print(json.dumps({"did": name, **_perform(getattr(calls, name))}), flush=True)
    return None


if __name__ == "__main__":
    main()
