"""Compile C with sanitizers, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from sanitizers import need_sanitizers

from kiwi_core import compiled
from kiwi_core.preload import _build
from kiwi_core.preload._paths import SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence


def compile_with(sanitizers: str, directory: Path, sources: Sequence[Path]) -> str:
    """Compile ``sources`` and return the program; skip the test without such sanitizers."""
    compiler = compiled.find_compiler()
    need_sanitizers(compiler, sanitizers, directory)
    target = directory / "program"
    fatal = [] if sanitizers == "thread" else ["-fno-sanitize-recover=all"]
    flags = ["-std=gnu11", "-O0", "-g", "-pthread", f"-fsanitize={sanitizers}", *fatal]
    includes = ["-iquote", str(SOURCES), "-isystem", str(_build.find_header().parent)]
    subprocess.run(
        [*compiler, *flags, *includes, "-o", str(target), *map(str, sources)], check=True
    )
    return str(target)
