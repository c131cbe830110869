"""The command line in a process of its own, and the result of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(process.returncode, out, err)


def start_kiwi(*args: str, **env: str) -> subprocess.Popen[str]:
    """Start ``kiwi ARGS…`` with ``env`` added to the environment, in a process group of its own, so
    that Ctrl-C can be sent to the whole group."""
    return subprocess.Popen(
        [sys.executable, "-m", "kiwi_core.cli", *args],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | env, start_new_session=True,
    )  # fmt: skip
