"""``kiwi bench``, or a part of it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daemon import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SHORT = """
import sys
from kiwi_core.bench import backends, limits, plan
backends.BACKENDS = (backends.CHECKPOINT,)
plan.Patience = lambda: plan.EMULATED
if {skip_limits}:
    limits.measure = lambda bench: None
{more}
from kiwi_core.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Program that runs the command line with one backend and with the short time limits of an emulated
GPU; on request without its first half."""

PATIENCE_S = 220.0


@dataclass
class BenchProcess:
    process: subprocess.Popen[str]
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip("\n"))

    @property
    def said(self) -> str:
        return "\n".join(self.errors)

    def wait_step(self, words: str) -> None:
        def come() -> bool:
            assert self.process.poll() is None, self.said
            return words in self.said

        wait_until(come, f"the step {words!r}; it said:\n{self.said}", PATIENCE_S)

    def finish(self) -> tuple[int, str, str]:
        """Return the exit code, the standard output and the standard error."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code, out, self.said


def start_bench(
    *arguments: str, env: dict[str, str] | None = None, skip_limits: bool = False, more: str = ""
) -> BenchProcess:
    """Start the bench; ``more`` is code that runs before the command."""
    code = SHORT.format(skip_limits=skip_limits, more=more)
    return BenchProcess(
        subprocess.Popen(
            [sys.executable, "-c", code, "bench", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})}, start_new_session=True,
        )
    )  # fmt: skip


def private_directory(temporary: Path) -> Path:
    """Return the directory that the bench has made."""
    (found,) = temporary.glob("kiwi-bench-*")
    return found
