"""Checks that Kiwi's gate, and its own pager, can be loaded into programs here."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.cli.checks.finding import Finding, UnansweredError, ok, probe, warn
from kiwi_core.config import CHECKPOINT, ENV_PAGER, PAGERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AREA: Final = "pager"
_PROBE: Final = (
    "import ctypes, json; print(json.dumps(hasattr(ctypes.CDLL(None), 'kiwi_preload_version')))"
)


def check() -> Iterator[Finding]:
    yield from chosen(os.environ.get(ENV_PAGER, ""))
    try:
        library = preload.library()
    except preload.Unavailable as error:
        yield warn(
            AREA,
            f"{error.message} Programs here are unguarded: they share the GPU, but are never "
            "stopped in the middle of their work, so others wait until that is done.",
            error.remedy,
        )
        return
    yield loaded(library)
    yield from beside(os.environ.get("LD_PRELOAD", ""))


def chosen(value: str) -> Iterator[Finding]:
    if value and value not in PAGERS:
        yield warn(
            AREA,
            f"{ENV_PAGER} is {value!r}, which Kiwi does not know and ignores.",
            f"{ENV_PAGER} is one of {', '.join(PAGERS)}.",
        )


def loaded(library: Path) -> Finding:
    """Check that a Python like this one really loads it. Only this shows another architecture or C
    library, or a wrapper that strips LD_PRELOAD."""
    env = preload.environment(library, os.environ)
    try:
        if probe(_PROBE, env={**os.environ, **env}):
            return ok(AREA, f"{library}, Kiwi's gate, can be loaded into programs")
    except UnansweredError as error:
        return _not_loaded(library, str(error))
    return _not_loaded(library, "it is not there")


def _not_loaded(library: Path, why: str) -> Finding:
    libc = " ".join(platform.libc_ver()) or "an unknown C library"
    return warn(
        AREA,
        f"{library} is not loaded into {sys.executable} ({platform.machine()}, {libc}): {why}",
        "Programs run without it, unguarded: others wait until their work is done. Is LD_PRELOAD "
        "stripped, or is this another architecture or C library than Kiwi was installed for?",
    )


def beside(preloaded: str) -> Iterator[Finding]:
    """Look for a preloaded library that replaces CUDA functions too; most others do no harm."""
    others = [word for word in preloaded.replace(":", " ").split() if "kiwi_preload" not in word]
    for other in others:
        try:
            exports = hasattr(ctypes.CDLL(other), "cuMemAlloc_v2")
        except OSError:
            continue
        if exports:
            yield warn(
                AREA,
                f"LD_PRELOAD has {other}, which replaces CUDA functions as well.",
                f"Use only one of the two: unset LD_PRELOAD, or {ENV_PAGER}={CHECKPOINT}.",
            )
