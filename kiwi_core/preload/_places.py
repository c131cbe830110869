"""Paths of the libraries, and definitions that the whole package needs. A kernel imports this when
it starts, so this module imports little."""

from __future__ import annotations

import os
import re
import stat
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
ENV_LIBRARY = "KIWI_PRELOAD_LIBRARY"
SHIPPED = HERE / "lib"
"""Directory of a wheel's libraries, with a subdirectory for each machine."""


class Unavailable(RuntimeError):  # noqa: N818 (a state of this machine, not a mistake)
    """No library exists for this machine, and none can be built on it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message, self.remedy = message, remedy


def environment(library: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a program run under the library; ``before`` is the program's
    environment without them."""
    others = [name for name in re.split(r"[: ]+", before.get("LD_PRELOAD", "")) if name]
    ours = [str(library), *(name for name in others if os.path.basename(name) != NAME)]
    return {"LD_PRELOAD": ":".join(ours), "KIWI_PRELOAD": "1"}


def check_owner(*places: Path) -> None:
    """Raise ``OSError`` if another user could put a library into one of ``places``: every user of
    the cache would run that code."""
    for place in filter(os.path.lexists, places):
        if why := why_unsafe(os.lstat(place)):
            raise PermissionError(f"{place}: {why}")


def why_unsafe(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid not in (0, os.getuid()):
        return "it belongs to another user"
    return "others can write to it" if found.st_mode & stat.S_IWOTH else ""


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kiwi"
