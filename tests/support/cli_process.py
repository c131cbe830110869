"""What a run of the command line came to."""

from __future__ import annotations

import subprocess
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
