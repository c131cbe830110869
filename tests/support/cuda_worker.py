"""A CUDA program under a test's control: it runs the Python it is sent, one line of JSON each way.

Everything below is plain ``cuda.bindings`` and ``pynvml``, as in a user's program.
It is started with the emulator's environment, or on a machine with a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
import time
import traceback
from typing import Any

MIB = 1 << 20
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # other output must not look like an answer

from cuda.bindings import driver  # noqa: E402


class CudaError(Exception):
    """A failed call; the text is the result's name, which tests compare."""


def ck(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise CudaError(result[0].name)
    return result[1] if len(result) == 2 else result[1:] or None


def name_of(call: Any, *args: Any) -> str:
    """Make a call and return the name of its result."""
    return str(call(*args)[0].name)


def init(device: int = 0) -> None:
    ck(driver.cuInit(0))
    context = ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(device))))
    ck(driver.cuCtxSetCurrent(context))


def alloc(size: int) -> int:
    return int(ck(driver.cuMemAlloc(size)))


def free(address: int) -> None:
    ck(driver.cuMemFree(address))


PIECE = 16 * MIB
"""Bytes that one call copies at most."""
BLOCK = (1 << 16) + 1
"""Bytes of a pattern before it repeats: pages of a session of 256 MiB all differ. Random bytes for
each page took as long as everything else that most tests do."""


def pieces(size: int) -> list[tuple[int, int]]:
    return [(at, min(PIECE, size - at)) for at in range(0, size, PIECE)]


def repeated(seed: int, size: int) -> bytes:
    """Return the pattern of ``seed``, long enough for ``size`` bytes from any place in a block."""
    return random.Random(seed).randbytes(BLOCK) * (size // BLOCK + 2)


def write(address: int, data: bytes | memoryview) -> None:
    ck(driver.cuMemcpyHtoD(address, data, len(data)))


def read(address: int, size: int) -> bytes:
    data = bytearray(size)
    ck(driver.cuMemcpyDtoH(data, address, size))
    return bytes(data)


def fill(address: int, seed: int, size: int) -> str:
    """Write the pattern of ``seed`` again and again; return what ``digest`` of it is."""
    whole = hashlib.sha256()
    # New memory for each piece took longer than its way to the GPU and its digest.
    known = memoryview(repeated(seed, min(size, PIECE)))
    for at, length in pieces(size):
        data = known[at % BLOCK :][:length]
        write(address + at, data)
        whole.update(data)
    return whole.hexdigest()


def digest(address: int, size: int) -> str:
    whole, buffer = hashlib.sha256(), bytearray(min(size, PIECE))
    for at, length in pieces(size):
        ck(driver.cuMemcpyDtoH(buffer, address + at, length))
        whole.update(memoryview(buffer)[:length])
    return whole.hexdigest()


def used() -> int:
    free_bytes, total = ck(driver.cuMemGetInfo())
    return int(total) - int(free_bytes)


_SIGNATURES = {
    "fill_u32": "QQI",
    "add_u32": "QQI",
    "xorshift_u32": "QQI",
    "checksum_u64": "QQQ",
    "spin_ns": "Q",
}
_functions: dict[str, Any] = {}


def launch(kernel: str, *args: int, stream: Any = 0) -> None:
    """Launch one of the emulator's built-in kernels."""
    import ctypes

    if not _functions:
        module = ck(driver.cuModuleLoadData(b"kiwi-emulated-module\0"))
        for name in _SIGNATURES:
            _functions[name] = ck(driver.cuModuleGetFunction(module, name.encode()))
    types = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32}
    kinds = tuple(types[c] for c in _SIGNATURES[kernel])
    ck(driver.cuLaunchKernel(_functions[kernel], 1, 1, 1, 1, 1, 1, 0, stream, (args, kinds), 0))


def sync() -> None:
    ck(driver.cuCtxSynchronize())


class Process:
    """Another process, as ``cuda.core.checkpoint.Process`` has it. Importing ``cuda.core`` takes
    longer than most tests."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def state(self) -> str:
        state = driver.CUprocessState(ck(driver.cuCheckpointProcessGetState(self.pid)))
        return str(state.name).removeprefix("CU_PROCESS_STATE_").lower()

    @property
    def restore_thread_id(self) -> int:
        return int(ck(driver.cuCheckpointProcessGetRestoreThreadId(self.pid)))

    def lock(self, timeout_ms: int = 0) -> None:
        ck(driver.cuCheckpointProcessLock(self.pid, lock_args(timeout_ms)))

    def checkpoint(self) -> None:
        ck(driver.cuCheckpointProcessCheckpoint(self.pid, None))

    def restore(self) -> None:
        ck(driver.cuCheckpointProcessRestore(self.pid, None))

    def unlock(self) -> None:
        ck(driver.cuCheckpointProcessUnlock(self.pid, None))


def checkpoint_of(pid: int) -> Process:
    return Process(pid)


def lock_args(timeout_ms: int) -> Any:
    args = driver.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    return args


def suspend(pid: int, timeout_ms: int = 30_000) -> None:
    process = checkpoint_of(pid)
    process.lock(timeout_ms)
    process.checkpoint()


def resume(pid: int) -> None:
    process = checkpoint_of(pid)
    process.restore()
    process.unlock()


def let_go(pid: int) -> bool:
    """Unlock a locked process; return whether its memory is out, in which case nothing is done."""
    process = checkpoint_of(pid)
    if process.state == "locked":
        process.unlock()
    return bool(process.state == "checkpointed")


def put_away(pid: int) -> bool:
    """Page a process out, so that it may be killed; return true."""
    suspend(pid, timeout_ms=5_000)
    return True


class Loop:
    """A loop that adds 1 to every word on the device and checks that nothing else changed them."""

    def __init__(self, address: int, words: int, built_in_kernel: bool = True) -> None:
        self.address, self.words, self.rounds = address, words, 0
        self._kernel = built_in_kernel  # else memsets, which a real GPU has too
        self.error = ""
        self._stop = threading.Event()
        ck(driver.cuMemsetD32(address, 0, words))
        self._context = ck(driver.cuCtxGetCurrent())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            ck(driver.cuCtxSetCurrent(self._context))
            while not self._stop.is_set():
                if self._kernel:
                    launch("add_u32", self.address, self.words, 1)
                else:
                    ck(driver.cuMemsetD32Async(self.address, self.rounds + 1, self.words, 0))
                self.rounds += 1
                got = read(self.address, self.words * 4)
                if got != self.rounds.to_bytes(4, "little") * self.words:
                    raise AssertionError(f"wrong contents after {self.rounds} rounds")
        except BaseException as e:  # noqa: BLE001 - told by stop()
            self.error = repr(e)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        if self.error:
            raise AssertionError(self.error)
        return self.rounds


class Stuck:
    """A host function in ``stream`` (by default one of its own), which keeps the GPU busy until
    ``end``. A kernel that takes a time may have ended when a test looks."""

    def __init__(self, stream: Any = None) -> None:
        import ctypes

        self._go = threading.Event()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._wait)
        self._stream = ck(driver.cuStreamCreate(1)) if stream is None else stream
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        ck(driver.cuLaunchHostFunc(self._stream, driver.CUhostFn(address), 0))

    def _wait(self, _data: object) -> None:
        self._go.wait(60)

    def let_go(self) -> None:
        self._go.set()

    def end(self) -> None:
        self.let_go()
        ck(driver.cuStreamSynchronize(self._stream))


def become_anew(*before: str) -> None:
    """Replace this program by a new run of itself (exec): the process is the same, and has not used
    CUDA yet. ``before``: arguments of the interpreter. The test gets its answer first."""
    answers.write(json.dumps({"value": None}) + "\n")
    answers.flush()
    os.dup2(answers.fileno(), 1)
    os.execv(sys.executable, [sys.executable, *before, __file__])


def main() -> None:
    space = globals()
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request["kind"] == "exec":
                exec(request["code"], space)
                answer = {"value": None}
            else:
                answer = {"value": eval(request["code"], space)}
        except BaseException as e:  # noqa: BLE001 - told to the test
            detail = traceback.format_exc()
            answer = {"error": type(e).__name__, "text": str(e), "detail": detail}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    assert time  # for the code that tests send
    main()
