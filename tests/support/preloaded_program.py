"""A plain CUDA program under Kiwi's preloaded library; its code knows nothing of Kiwi."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda_processes import Worker

from kiwi_core import preload
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from daemon import Daemon


class PreloadedProgram(Worker):
    """``env`` adds to the environment."""

    def __init__(self, daemon: Daemon, **env: str) -> None:
        environment = daemon.cuda_env | env
        super().__init__(environment | preload.environment(preload.library(), environment))
        self.do("init()")

    def take(self, size_mib: int, seed: int = 1) -> None:
        """Allocate memory and fill it with the pattern of ``seed``."""
        self.do(f"size = {size_mib * MIB}; p = alloc(size); before = fill(p, {seed}, size)")

    def intact(self) -> bool:
        """Return whether the memory that was taken last is unchanged. Waits for the GPU."""
        return bool(self.get("digest(p, size) == before"))
