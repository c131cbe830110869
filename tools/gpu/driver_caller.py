"""A program that makes driver calls about other processes, for a part that must not hang with them.

Each line of its input is a call, ``{"id": 1, "call": "lock", "pid": 7, "timeout_ms": 1000}``. Each
call runs in a thread of its own, so that a call that hangs blocks no other call (unless the driver
itself does). The answer is a line of its output: ``{"id": 1, "code": 0, "seconds": 0.002}``, where
``code`` is the driver's number. The end of its input ends the program at once, even if calls hang.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[..., tuple[int, Any]]

NS_PER_S = 10**9


def _number(result: Any) -> tuple[int, Any]:
    code, *values = result
    return int(code), None if int(code) or not values else int(values[0])


class DriverCalls:
    """The checkpoint API without Kiwi: the methods return the driver's codes unchanged."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cu = driver
        # Without persistence mode a restore needs an initialised caller.
        code = int(driver.cuInit(0)[0])
        if code:
            raise RuntimeError(f"cuInit answered {code}")

    def state(self, pid: int) -> tuple[int, Any]:
        return _number(self.cu.cuCheckpointProcessGetState(pid))

    def restore_tid(self, pid: int) -> tuple[int, Any]:
        return _number(self.cu.cuCheckpointProcessGetRestoreThreadId(pid))

    def lock(self, pid: int, timeout_ms: int = 0) -> tuple[int, Any]:
        """Lock a process; ``timeout_ms`` 0 waits without a limit."""
        args = self.cu.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        return _number(self.cu.cuCheckpointProcessLock(pid, args))

    def checkpoint(self, pid: int) -> tuple[int, Any]:
        return _number(self.cu.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> tuple[int, Any]:
        return _number(self.cu.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> tuple[int, Any]:
        return _number(self.cu.cuCheckpointProcessUnlock(pid, None))

    def nvml(self, uuid: str) -> tuple[int, Any]:
        """Return the free bytes of the GPU, and bytes by process id."""
        from kiwi_core.gpu import nvml

        return 0, {"free": nvml.memory(uuid).free_bytes, "by_pid": nvml.processes(uuid)}


class PagerCalls:
    """Kiwi's own page-out and page-in, over the same API."""

    def __init__(self) -> None:
        self.pagers: dict[str, Any] = {}
        self.lock = threading.Lock()

    def page_out(self, pid: int, uuid: str, within_s: float) -> tuple[int, Any]:
        return self._move("page_out", pid, uuid, within_s)

    def page_in(self, pid: int, uuid: str, within_s: float) -> tuple[int, Any]:
        return self._move("page_in", pid, uuid, within_s)

    def _pager(self, uuid: str) -> Any:
        """Return the one pager of this GPU: it remembers how much each process had."""
        from blocking_pager import BlockingPager

        with self.lock:
            if uuid not in self.pagers:
                self.pagers[uuid] = BlockingPager(uuid)
            return self.pagers[uuid]

    def _move(self, way: str, pid: int, uuid: str, within_s: float) -> tuple[int, Any]:
        from kiwi_core.gpu import processes
        from kiwi_core.pager.api import Moved, Target
        from kiwi_core.units import SessionId

        pager = self._pager(uuid)
        ref = processes.ref_of(pid)
        if ref is None:
            return -1, "the process has ended"
        deadline_ns = time.monotonic_ns() + int(within_s * NS_PER_S)
        outcome = getattr(pager, way)(Target(SessionId("bench"), ref), deadline_ns)
        if not isinstance(outcome, Moved):
            return -1, str(outcome)
        return 0, {"bytes": outcome.bytes_moved, "seconds": outcome.elapsed_ns / NS_PER_S}


_say_lock = threading.Lock()


def _say(**answer: Any) -> None:
    with _say_lock:
        print(json.dumps(answer), flush=True)


def _perform(call: Call, number: int, words: dict[str, Any]) -> None:
    began_s = time.monotonic()
    try:
        code, value = call(**words)
    except Exception as error:  # noqa: BLE001 - the answer to this call; others go on
        code, value = -1, f"{type(error).__name__}: {error}"[:500]
    _say(id=number, code=code, seconds=round(time.monotonic() - began_s, 6), value=value)


def main() -> None:
    driver_calls, pager_calls = DriverCalls(), PagerCalls()
    _say(ready=True, pid=os.getpid())
    for line in sys.stdin:
        words = json.loads(line)
        number, name = words.pop("id"), words.pop("call")
        call = getattr(driver_calls, name, None) or getattr(pager_calls, name)
        threading.Thread(target=_perform, args=(call, number, words), daemon=True).start()
    os._exit(0)  # a thread may hang in the driver: a normal exit would wait for it


if __name__ == "__main__":
    main()
