"""Tests of Kiwi's own narrow functions for a process that uses a GPU, on both drivers."""

from __future__ import annotations

from cuda_processes import Worker

SETUP = """
import ctypes
from kiwi_core.errors import GpuError
from kiwi_core.gpu import memory, nvml
uuid = nvml.gpus()[0].uuid
gpu = memory.open_gpu(uuid)
def code(call, *args):
    try: call(*args)
    except GpuError as error: return error.code
"""
SIZE = 4 << 20


def test_bytes_go_in_and_come_out(worker: Worker) -> None:
    """Copies go through pinned memory and through pageable memory."""
    worker.do(
        SETUP + f"n = {SIZE}\n"
        "device, stream = memory.allocate(n), memory.new_stream()\n"
        "pinned = memory.host_allocate(n)\n"
        "import mmap\n"
        "mapped = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "ordinary = ctypes.addressof(ctypes.c_char.from_buffer(mapped))\n"
        "def there_and_back(host, value):\n"
        "    memory.fill(device, value, n)\n"
        "    ctypes.memset(host, 0, n)\n"
        "    memory.copy_out(host, device, n, stream); memory.synchronize(stream)\n"
        "    first = ctypes.string_at(host, n) == bytes([value]) * n\n"
        "    ctypes.memset(host, value + 1, n)\n"
        "    memory.copy_in(host, device, n, stream); memory.synchronize(stream)\n"
        "    ctypes.memset(host, 0, n)\n"
        "    memory.copy_out(host, device, n, stream); memory.synchronize()\n"
        "    return first and ctypes.string_at(host, n) == bytes([value + 1]) * n\n"
    )
    assert worker.get("there_and_back(pinned, 3)") is True
    assert worker.get("there_and_back(ordinary, 5)") is True
    worker.do("memory.host_free(pinned); memory.end_stream(stream); memory.free(device)")
    worker.do("gpu.close()")


def test_errors_have_codes(worker: Worker) -> None:
    worker.do(SETUP)
    assert worker.get("code(memory.open_gpu, 'GPU-' + '0' * 8)") == "no-such-gpu"
    assert worker.get("code(memory.allocate, 1 << 50)") == "no-gpu-memory"
    assert worker.get("code(memory.free, 12345)") == "invalid-value"
