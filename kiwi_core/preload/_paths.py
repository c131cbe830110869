"""Paths of the libraries, and definitions that the whole package needs. A kernel imports this when
it starts, so this module imports little."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "libkiwi_preload.so"
GATE_NAME = "libkiwi_gate.so"
"""File name of the same library under the driver's own SONAME, libcuda.so.1."""
ALIAS_NAME = "libkiwi_gate_alias.so"
"""File name of an empty library with the SONAME libcuda.so, which needs libcuda.so.1: some programs
load the driver by that name."""
HERE = Path(__file__).parent
SOURCES = HERE / "src"
"""Directory of the C sources: a wheel has them in the package, a checkout in ``native``."""
if not SOURCES.is_dir():
    SOURCES = HERE.parents[1] / "native/src"
ENV_LIBRARY = "KIWI_PRELOAD_LIBRARY"
OWN_BY_PAGER = {"auto": "auto", "checkpoint": "0", "inprocess": "1"}
"""Values of ``ENV_OWN``, by those of KIWI_PAGER."""
ENV_OWN = "KIWI_PRELOAD_OWN"
"""Variable of the library. "0": it is the gate only, and leaves memory to the driver; "1": it asks
to own the memory; "auto": it leaves that to the daemon."""
_ASAN_MAY_COME_LATER = "verify_asan_link_order=0"
"""Option of the address sanitizer. gcc links its runtime as a library, which otherwise ends each
program in which another library comes first."""
SHIPPED = HERE / "lib"
"""Directory of a wheel's libraries, with a subdirectory for each machine."""


def environment(library: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a program run under the library; ``before`` is the program's
    environment without them."""
    others = [name for name in re.split(r"[: ]+", before.get("LD_PRELOAD", "")) if name]
    ours = [str(library), *(name for name in others if os.path.basename(name) != NAME)]
    asan = [*before.get("ASAN_OPTIONS", "").split(":"), _ASAN_MAY_COME_LATER]
    return {
        "LD_PRELOAD": ":".join(ours),
        "KIWI_PRELOAD": "1",
        "ASAN_OPTIONS": ":".join(dict.fromkeys(filter(None, asan))),
    }
