"""Starting and talking to `cuda_worker.py` processes from tests."""

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0
"""For one answer: the machines that run tests are small and busy."""
WORKER = Path(__file__).with_name("cuda_worker.py")


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
        self._answers: list[dict[str, Any] | None] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._put(json.loads(line))
        self._put(None)

    def _put(self, answer: dict[str, Any] | None) -> None:
        with self._arrived:
            self._answers.append(answer)
            self._arrived.notify_all()

    def send(self, code: str, kind: str = "eval") -> None:
        """Without waiting for the answer: ``answer()`` fetches it."""
        assert self._process.stdin is not None
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
            if answer is not None:  # the mark of the end stays
                self._answers.pop(0)
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
        """Runs code that must fail; returns the text of its exception."""
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
        """Asks it to end the normal way."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def returncode(self) -> int | None:
        """``None``: it lives."""
        return self._process.poll()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._reader.join(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def wait_until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.005)
