"""One line of ``kiwi doctor``, and a question to another Python process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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


_NO_MODULE: Final = re.compile(r"No module named '([\w.]+)'")


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


class UnansweredError(Exception):
    """A question to another Python process has no answer. The text says why, ``remedy`` what to
    do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def probe(source: str, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """Run ``source`` in a separate process and return the JSON of its last line. Raise
    ``UnansweredError``."""
    try:
        done = subprocess.run(
            interpreter.source(source, *args), cwd=interpreter.DIRECTORY, env=env,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S,
            check=True,
        )  # fmt: skip
        return json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        raise UnansweredError(
            f"no answer within {PROBE_TIMEOUT_S:.0f} s",
            "Run it again when the machine is less busy. If it stays so, a start-up file of Python "
            "or a directory on PYTHONPATH does not answer.",
        ) from None
    except OSError as error:
        raise UnansweredError(
            f"{sys.executable} cannot be started: {error.strerror}",
            "Make this Python and the directories above it readable for you, or use another one.",
        ) from None
    except subprocess.CalledProcessError as error:
        raise _failed((error.stderr or "").strip().splitlines()) from None
    except ValueError:
        raise UnansweredError(
            "its answer cannot be read",
            "A start-up file of Python or IPython writes to the output: see what it prints.",
        ) from None


def _failed(said: list[str]) -> UnansweredError:
    """Return why a Python failed whose last words are ``said``."""
    why = said[-1].strip() if said else "it ended without a word"
    if found := _NO_MODULE.search(why):
        return UnansweredError(f"{found[1]} is not installed here", f"pip install {found[1]}")
    if "PermissionError" in why or "Permission denied" in why:
        return UnansweredError(why, "Make these files readable for you.")
    return UnansweredError(
        why, "Mend what this says; the same happens when a kernel or server starts."
    )
