"""One line of ``kiwi doctor``, and a question to another Python process."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kiwi_core import interpreter

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_TIMEOUT_S: Final = 30.0
"""IPython's and Jupyter's configuration takes some seconds on a slow machine."""


class Level(str, Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but not for everything or not as well as it could; the remedy says how."""
    FAIL = "fail"
    """Kiwi cannot work here until the remedy is done."""


@dataclass(frozen=True)
class Finding:
    """``area`` names in a word or two what was checked; ``remedy`` says what to do (OK: empty)."""

    level: Level
    area: str
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Finding:
    return Finding(Level.OK, area, text)


def warn(area: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARN, area, text, remedy)


def fail(area: str, text: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, area, text, remedy)


def probe(source: str, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """Run ``source`` in a separate process and return the JSON of its last line. Raise ``OSError``,
    ``ValueError``, or ``subprocess.SubprocessError`` with the output of the process.
    """
    done = subprocess.run(
        interpreter.source(source, *args), cwd=interpreter.DIRECTORY, env=env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S,
        check=True,
    )  # fmt: skip
    return json.loads((done.stdout.strip().splitlines() or [""])[-1])
