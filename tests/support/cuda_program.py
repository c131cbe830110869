"""A program on a GPU, emulated or real, for the tests of pager and daemon.

``CudaProgram`` holds device memory with a pattern made from a seed, checks its contents, and can
work in a loop of copies and memsets that checks what it reads. It may have a child that does the
same. It uses only plain ``cuda.bindings`` copies and memsets, so it runs on any driver. The tests
control it over pipes, by ``cuda_processes.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal

from cuda_processes import ENDS_WITHIN_S, Worker, wait_until

_SETUP = """
init()
p = alloc({size})
fill(p, {seed}, {size})
"""

_CHILD = """
from cuda_processes import Worker
child = Worker({{}})
child.do({setup!r})
"""

_LOOP = """
class Rounds:
    '''Writes, copies and reads back a small buffer, over and over; counts and checks.'''

    def __init__(self):
        self.buffer = alloc(2 << 16)
        self.count, self.error, self.stopped = 0, "", False
        self.context = ck(driver.cuCtxGetCurrent())
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            ck(driver.cuCtxSetCurrent(self.context))
            while not self.stopped:
                value = self.count % 251
                ck(driver.cuMemsetD8(self.buffer, value, 1 << 16))
                ck(driver.cuMemcpyDtoD(self.buffer + (1 << 16), self.buffer, 1 << 16))
                if read(self.buffer + (1 << 16), 1 << 16) != bytes([value]) * (1 << 16):
                    raise AssertionError(f"wrong bytes in round {self.count}")
                self.count += 1
                time.sleep(0.002)  # longer than the calls: others need the processors, too
        except BaseException as error:
            self.error = repr(error)

rounds = Rounds()
"""


class CudaProgram:
    """A program with GPU memory. ``leader``: it runs in a terminal session of its own, as Jupyter's
    kernels do."""

    def __init__(
        self,
        environment: dict[str, str],
        size_bytes: int,
        *,
        seed: int = 1,
        child_bytes: int = 0,
        leader: bool = False,
    ) -> None:
        self.size_bytes, self.child_bytes = size_bytes, child_bytes
        self._worker = Worker(environment, *(("setsid",) if leader else ()))
        self.child_pid = 0
        if size_bytes:
            self._worker.do(_SETUP.format(size=size_bytes, seed=seed))
        if child_bytes:
            self.start_child(child_bytes, seed=seed + 1)

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def pids(self) -> list[int]:
        """Return the pids of the program and its child."""
        return [pid for pid in (self.pid, self.child_pid) if pid]

    def start_child(self, size_bytes: int, *, seed: int = 2) -> None:
        self.child_bytes = size_bytes
        self._worker.do(_CHILD.format(setup=_SETUP.format(size=size_bytes, seed=seed)))
        self.child_pid = int(self._worker.get("child.pid"))

    def get(self, code: str) -> object:
        """Evaluate a Python expression in the program, with the names of ``cuda_worker.py``."""
        return self._worker.get(code)

    def digest(self) -> str:
        """Return a digest of all contents and addresses, with the child's; read from the device."""
        own = f"(p, digest(p, {self.size_bytes}))"
        parts = [self._worker.get(own)] if self.size_bytes else []
        if self.child_pid:
            child = f"(p, digest(p, {self.child_bytes}))"
            parts.append(self._worker.get(f"child.get({child!r})"))
        return repr(parts)

    def touch(self) -> None:
        """Make a driver call without waiting for its end."""
        self._worker.send(f"digest(p, min({self.size_bytes}, 4096))")

    def touched(self, within_s: float = 0.0) -> bool:
        """Return whether the call has ended; a held call has not."""
        return self._worker.answered(within_s)

    def finish_touch(self) -> None:
        self._worker.answer()

    def loop(self) -> None:
        """Start to work, until the program ends."""
        self._worker.do(_LOOP)
        self.wait_rounds(1)

    def rounds(self) -> int:
        """Return the number of rounds, without a driver call. Fail on a wrong byte or failed
        call."""
        count, error = self._worker.get("(rounds.count, rounds.error)")
        assert not error, error
        return int(count)

    def wait_rounds(self, more: int) -> None:
        until = self.rounds() + more
        wait_until(lambda: self.rounds() >= until, f"{more} more rounds of {self.pid}")

    def kill_child(self) -> None:
        self._worker.do("child.kill()")

    def kill(self) -> None:
        """Kill the program itself, but not its child."""
        self._worker.kill()

    def leave(self) -> bool:
        """Ask the program and its child to end; return whether both have ended."""
        return self._worker.leave() and self._child_ended()

    def _child_ended(self) -> bool:
        """Return whether the child, whose input is a pipe from its parent, has ended."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _exists(self.child_pid), "the end of the child", ENDS_WITHIN_S)
        return not _exists(self.child_pid)

    def close(self) -> None:
        """See ``Worker.close``."""
        self._worker.close()
        if self.child_pid and (self._worker.may_be_killed or not self._child_ended()):
            # The child ends with its parent's pipe unless the driver holds it.
            try:
                os.kill(self.child_pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            wait_until(lambda: not _exists(self.child_pid), f"the end of {self.child_pid}")


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
