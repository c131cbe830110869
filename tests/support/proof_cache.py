"""A user's cache with both libraries in it, in which no machine has proven itself yet."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import kiwi_emulator as emulator
from kiwi_core.preload import ready
from kiwi_core.preload._paths import ENV_LIBRARY

if TYPE_CHECKING:
    from pathlib import Path


def unproven(directory: Path) -> dict[str, str]:
    """Make the cache in ``directory``; return the environment that leads programs to it."""
    library, emulated = ready.ensure(), emulator.build().libcuda.parent
    shutil.copytree(emulated, directory / "kiwi" / emulated.name)
    return {ENV_LIBRARY: str(library), "XDG_CACHE_HOME": str(directory)}
