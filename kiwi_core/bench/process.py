"""The conductor's end of a worker: start it, give it orders with a time limit, end it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kiwi_core import interpreter
from kiwi_core.errors import GpuError, KiwiError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

START_S: Final = 60.0
"""Time for the first order: Python, the driver's start (3 s on big machines) and a context."""

_ENDS_WITHIN_S: Final = 120.0
"""More than any role takes to end."""


class BenchWorker:
    """A worker process, and a context manager that ends it. ``log`` gets its standard error, and is
    locked while it lives."""

    def __init__(self, role: str, env: Mapping[str, str], log: Path | None = None) -> None:
        self.role = role
        self._log = log
        self._buffer = b""
        self._ended = False
        self._useless = False
        with open(log if log is not None else os.devnull, "ab") as errors:
            if log is not None:
                # Held while the worker lives: the stage is cleared only after that.
                fcntl.flock(errors, fcntl.LOCK_SH)
            self._process = subprocess.Popen(
                interpreter.module("kiwi_core.bench.worker", role),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                env={**env}, start_new_session=True, cwd=interpreter.DIRECTORY,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return its exit status, negative if a signal ended it; ``None``: it lives."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once, wherever it waits."""
        self._process.kill()

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def ask(self, call: str, answer_s: float = START_S, **args: object) -> Any:
        """Give an order and return the answer. Raises ``KiwiError``: the worker's error, or that it
        did not answer in time (then it cannot be used any more)."""
        assert self._process.stdin is not None
        line = json.dumps({"call": call, "args": args}).encode() + b"\n"
        if self._useless:
            raise self._late(0.0)
        try:
            self._process.stdin.write(line)
        except OSError as error:
            raise self._gone() from error
        said = json.loads(self._line(answer_s))
        if (failed := said.get("error")) is not None:
            raise KiwiError(**failed)
        return said["value"]

    def _line(self, answer_s: float) -> bytes:
        assert self._process.stdout is not None
        ends_s = time.monotonic() + answer_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                self._useless = True  # another order would take a late answer for its own
                raise self._late(answer_s)
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._gone()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _late(self, answer_s: float) -> GpuError:
        within = f" within {answer_s:.0f} s" if answer_s else " to an earlier order"
        return GpuError(
            "no-answer",
            f"A process that measures ({self.role}) did not answer{within}.",
            "A driver call hangs or is very slow: look at dmesg.",
        )

    def _gone(self) -> GpuError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        words = self._log.read_text(errors="replace").strip().splitlines() if self._log else []
        last = f" It said: {words[-1][:300]}" if words else ""
        status = self._process.returncode
        return GpuError("worker-ended", f"A process that measures ended (status {status}).{last}")

    def close(self) -> None:
        """End the worker's input; kill it only if it takes longer than any role may. Killing a
        program that had been paged out has hung hosts (NVIDIA/cuda-checkpoint#53)."""
        if self._ended:
            return
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ended = True
        if self._process.stdout is not None:
            self._process.stdout.close()
