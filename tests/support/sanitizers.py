"""Find which of the compiler's sanitizers work here."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def need_sanitizers(compiler: Sequence[str], sanitizers: str, directory: Path) -> None:
    """Skip the test if ``sanitizers`` (a value of ``-fsanitize=``) are missing or do not run."""
    probe = str(directory / "probe")
    command = [*compiler, f"-fsanitize={sanitizers}", "-x", "c", "-", "-o", probe]
    code = "int main(void){return 0;}"
    if subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(compiler)} has no {sanitizers} sanitizer")
    if subprocess.run([probe], capture_output=True, check=False).returncode:
        pytest.skip(f"the {sanitizers} sanitizer cannot run on this kernel's address layout")
