"""Instructions that a program executes in the preloaded library, counted by callgrind. No load on
the machine changes them."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PATIENCE_S = 600.0


def costs(command: Sequence[str], environment: Mapping[str, str], profile: Path) -> dict[str, int]:
    """Run a program; return the instructions below its ``main``, by shared object."""
    valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}"]
    subprocess.run(
        [*valgrind, "--toggle-collect=main", *command],
        env=dict(environment), capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return costs_by_object(profile.read_text().splitlines())


def costs_by_object(lines: Sequence[str]) -> dict[str, int]:
    """Return instructions by shared object, from a callgrind profile. The line below a ``calls=``
    line belongs to the callee, and is counted there."""
    names: dict[str, str] = {}
    found: dict[str, int] = {}
    here, skip = "", False
    for line in lines:
        if match := re.match(r"ob=(\(\d+\))(?: (.*))?", line):
            names.setdefault(match[1], match[2] or "")
            here = names[match[1]]
        elif match := re.match(r"cob=(\(\d+\)) (.+)", line):
            names.setdefault(match[1], match[2])
        elif line.startswith("calls="):
            skip = True
        elif match := re.match(r"[+\-*]?\d*(?: [+\-*]?\d+)* (\d+)$", line):
            if not skip:
                found[here] = found.get(here, 0) + int(match[1])
            skip = False
    return found
