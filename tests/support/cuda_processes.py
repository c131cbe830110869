"""Start ``cuda_worker.py`` processes from tests, and talk to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PATIENCE_S = 60.0
"""Time limit of one answer: the machines that run tests are small and busy."""
ENDS_WITHIN_S = 60.0
"""Time limit for the end of a program whose input has ended: Python and the driver, if busy."""
WORKER = Path(__file__).with_name("cuda_worker.py")
EMULATED = "KIWI_EMULATOR_STATE"
"""Same as ``emulator.ENV_STATE``. (Workers also import this module, and may not find Kiwi.)"""


class WorkerError(Exception):
    """The code that a worker ran raised; ``kind`` and the text are those of its exception."""

    def __init__(self, kind: str, text: str, detail: str) -> None:
        super().__init__(f"{kind}: {text}\n{detail}")
        self.kind, self.text = kind, text


class WorkerGoneError(Exception):
    """The worker ended before it answered."""


class Worker:
    def __init__(self, environment: dict[str, str], *prefix: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.emulated = EMULATED in os.environ | environment
        self._environment = environment
        self._asked_to_end = False
        self._answers: list[dict[str, Any] | None] = []
        self._owed = 0
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._put(json.loads(line))
        self._put(None)

    def _put(self, answer: dict[str, Any] | None) -> None:
        with self._arrived:
            self._answers.append(answer)
            self._arrived.notify_all()

    @property
    def usable(self) -> bool:
        """Return whether the worker lives and has answered all questions."""
        return self.returncode is None and self._owed == 0

    def send(self, code: str, kind: str = "eval") -> None:
        """Send code without waiting for the answer, which ``answer()`` returns; that also raises
        ``WorkerGoneError``."""
        assert self._process.stdin is not None
        self._owed += 1
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"kind": kind, "code": code}) + "\n")
            self._process.stdin.flush()

    def answered(self, within_s: float = 0.0) -> bool:
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._answers), within_s)

    def answer(self, within_s: float = PATIENCE_S) -> Any:
        if not self.answered(within_s):
            raise AssertionError(f"worker {self.pid} did not answer within {within_s} s")
        with self._arrived:
            answer = self._answers[0]
            if answer is not None:  # the end mark stays
                self._answers.pop(0)
                self._owed -= 1
        if answer is None:
            raise WorkerGoneError(f"worker {self.pid} is gone")
        if "error" in answer:
            raise WorkerError(answer["error"], answer["text"], answer["detail"])
        return answer["value"]

    def get(self, code: str, within_s: float = PATIENCE_S) -> Any:
        self.send(code)
        return self.answer(within_s)

    def do(self, code: str, within_s: float = PATIENCE_S) -> None:
        self.send(code, "exec")
        self.answer(within_s)

    def fails(self, code: str, within_s: float = PATIENCE_S) -> str:
        """Run code that must fail; return the text of its exception."""
        try:
            self.do(code, within_s)
        except WorkerError as e:
            return e.text
        raise AssertionError(f"this did not fail: {code}")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end_input(self) -> None:
        """Ask the worker to end normally."""
        assert self._process.stdin is not None
        self._asked_to_end = True
        self._process.stdin.close()

    def leave(self, within_s: float = ENDS_WITHIN_S) -> bool:
        """End the worker's input once, wait for its end, and return whether it has ended."""
        if not self._asked_to_end:
            with contextlib.suppress(BrokenPipeError):
                self.end_input()
            self.ended(within_s)
        return self.returncode is not None

    def ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def returncode(self) -> int | None:
        """Return the exit code; ``None``: the worker lives."""
        return self._process.poll()

    @property
    def may_be_killed(self) -> bool:
        return self.emulated and may_be_killed(self._environment)

    def close(self) -> None:
        """End the worker. On a real GPU a program ends by itself if it can: killing a running one
        that was restored has hung hosts (NVIDIA/cuda-checkpoint#53). See ``end_on_a_gpu`` for a
        program that may be held. Most emulated drivers have no such fault, and a kill is
        quicker."""
        if self.returncode is None and (self.may_be_killed or not self.leave()):
            self.kill()
        self._reader.join(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def may_be_killed(environment: dict[str, str]) -> bool:
    """Return whether a running program that was restored may be killed: on a real GPU it may
    not."""
    import kiwi_emulator as emulator

    state = (os.environ | environment).get(EMULATED)
    if not state or not os.path.exists(state):
        return bool(state)
    try:
        return not emulator.has_quirk(Path(state), "kill_takes_host_down")
    except emulator.StateError:
        return True  # no emulated machine


class Program(Protocol):
    """A process with its children."""

    @property
    def pids(self) -> list[int]: ...

    def leave(self) -> bool: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def end_on_a_gpu(programs: Iterable[Program], environment: dict[str, str]) -> None:
    """End programs, some of which may be locked or paged out, without killing one that runs on the
    GPU: a locked program is unlocked and ends by itself, one that is paged out may be killed, and
    one that does not end is paged out first."""
    helper = Worker(environment)
    with contextlib.suppress(WorkerError, WorkerGoneError):  # a machine without a GPU
        helper.do("ck(driver.cuInit(0))")
    for program in programs:
        if _out(helper, program, "let_go"):
            program.kill()
        elif not program.leave():
            _out(helper, program, "put_away")
        program.close()
    helper.close()


def _out(helper: Worker, program: Program, call: str) -> bool:
    """Return whether all of the program's memory is out of the GPU after ``call``; false if that is
    not known."""
    with contextlib.suppress(AssertionError, WorkerError, WorkerGoneError, BrokenPipeError):
        return all(helper.get(f"{call}({pid})") for pid in program.pids)
    return False


def wait_until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.005)
