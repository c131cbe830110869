"""Where a daemon has GPU memory copied to by the checkpoint pager: the driver's own storage, or, if
asked for and if the driver can, keepers' (custom storage, ADR 25)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.pager.checkpoint import CheckpointPager
from kiwi_core.pager.keepers import Keepers
from kiwi_core.pager.stored import UNPROVEN, StoredPager, why_not
from kiwi_core.states import Storage
from kiwi_core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from kiwi_core.config import Config
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.linked import Links

LEAST_BYTES: Final = GIB
LEAST_FRACTION: Final = 32
"""A program that has less, of a GPU that is small less than this part of it, gets no keeper: whose
context takes about half a gigabyte, while the driver moves that in a fraction of a second."""


@dataclass
class StorageChoice:
    """``note``: what users are to know about it; "" nothing. ``directory`` has the keepers' files;
    what an earlier daemon has out in it comes back whatever is chosen now."""

    wanted: bool
    directory: Path
    note: str = ""
    stored: StoredPager | None = None

    def pager(
        self,
        gpu: GpuInfo,
        config: Config,
        links: Links,
        budget_bytes: Callable[[int], int],
        remember: Callable[[Target, Mapping[ProcessRef, int]], None],
        other_roots: Callable[[], Collection[ProcessRef]],
    ) -> CheckpointPager:
        if not self.wanted and not any(self.directory.glob("*.record")):
            return CheckpointPager(gpu.uuid, config, remember=remember, other_roots=other_roots)
        keepers = Keepers(self.directory, gpu.uuid)
        self.stored = StoredPager(
            gpu.uuid,
            config,
            keepers=keepers,
            wanted=self.wanted,
            budget_bytes=lambda kept_bytes: self._budget_bytes(budget_bytes, kept_bytes, keepers),
            least_bytes=min(LEAST_BYTES, gpu.total_bytes // LEAST_FRACTION),
            aside=lambda: {link.ref for link in links.everybody() if link.connected},
            crowded=lambda: len(other_roots()) > 1,
            prepare=partial(_find_hash, keepers) if self.wanted else lambda: None,
            remember=remember,
            other_roots=other_roots,
        )
        return self.stored

    def idle_bytes(self) -> int:
        """RAM that keepers have beside what is out."""
        return self.stored.idle_bytes() if self.stored is not None else 0

    def close(self) -> None:
        """After everybody was brought back: ends the keepers that keep nothing."""
        if self.stored is not None:
            self.stored.close()

    def _budget_bytes(self, whole: Callable[[int], int], kept_bytes: int, keepers: Keepers) -> int:
        """What the driver and the libraries have out is not the keepers' to take."""
        assert self.stored is not None
        sizes = self.stored.export_footprints()
        known = keepers.states()
        others_bytes = sum(size for ref, size in sizes.items() if ref not in known)
        return max(0, whole(kept_bytes + others_bytes) - others_bytes)


def chosen(storage: Storage, directory: Path) -> StorageChoice:
    """Of this machine, whose driver is initialised."""
    if storage is Storage.DRIVER:
        return StorageChoice(False, directory)
    if missing := why_not():
        note = f"Custom storage was asked for, and this machine has none. {missing}"
        return StorageChoice(False, directory, f"{note} The driver keeps what is paged out.")
    return StorageChoice(True, directory, UNPROVEN)


def _find_hash(keepers: Keepers) -> None:
    """It may have to be compiled first; without it keepers copy everything each time."""
    try:
        keepers.library = str(preload.library())
    except preload.Unavailable:
        keepers.library = ""
