"""Compiling C under the sanitizers, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kiwi_core import preload
from kiwi_core.preload import _build

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES = Path(preload.__file__).parent / "src"


def compile_with(sanitizers: str, directory: Path, sources: Sequence[Path]) -> str:
    """The program that ``sources`` make; skips the test where there are no such sanitizers."""
    compiler = _build.find_compiler()
    probe = directory / "probe"
    command = [*compiler, f"-fsanitize={sanitizers}", "-x", "c", "-", "-o", str(probe)]
    code = "int main(void){return 0;}"
    if subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(compiler)} has no {sanitizers} sanitizer")
    if subprocess.run([probe], capture_output=True, check=False).returncode:
        pytest.skip(f"the {sanitizers} sanitizer cannot run on this kernel's address layout")
    target = directory / "program"
    fatal = [] if sanitizers == "thread" else ["-fno-sanitize-recover=all"]
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", *fatal]
    includes = ["-iquote", str(SOURCES), "-isystem", str(_build.find_header().parent)]
    subprocess.run(
        [*compiler, *flags, *includes, "-o", str(target), *map(str, sources)], check=True
    )
    return str(target)
