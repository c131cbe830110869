"""Says, when a burst ends, which GPU memory PyTorch has and does not use.

PyTorch keeps freed memory for its next tensors. Under the in-process pager such memory need not be
copied when this process is paged out, if the preloaded library knows of it (docs/preload.md). What
it is told holds until the next call to the driver that could use that memory; the library sees to
that. So it does not matter what else runs meanwhile, and nothing here is needed for anything to be
right: where it fails, everything is copied.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from array import array
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

REST: Final = 25
"""After a look there is none for so many times as long as it took: at most 4 % of the time."""

DEFAULT_POOL: Final = (0, 0)
"""Memory of other pools may be used by CUDA graphs although it counts as free."""

_log = logging.getLogger("kiwi.kernel")


class UnusedMemory:
    """Called by ``Burst`` under its lock; raises nothing, not even for Ctrl-C: the cell is over.

    ``library`` is tried when it is first needed. ``clock`` counts seconds, and ``busy`` those of
    this thread: what a look costs does not depend on who else keeps the machine busy.
    """

    def __init__(
        self,
        library: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        self._load = library or preloaded
        self._clock, self._busy = clock, busy
        self._library: Any = None
        self._not_before_s = 0.0
        self._given_up = False

    def burst_ended(self) -> None:
        if self._given_up:
            return
        try:
            self._tell()
        except KeyboardInterrupt:
            pass
        except Exception:  # noqa: BLE001 - another allocator, or a PyTorch that is not known yet
            self._given_up = True
            _log.debug("which memory PyTorch does not use cannot be told", exc_info=True)

    def _tell(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or self._clock() < self._not_before_s or not _may_look(torch):
            return
        if self._library is None:
            self._library = self._load()
        if self._library is None:
            self._given_up = True
            return
        passed = self._library.kiwi_preload_passed()  # before looking: what passes later ends it
        if passed == 0:
            return
        began_s = self._busy()
        addresses, sizes = unused_ranges(torch.cuda.memory_snapshot())
        self._library.kiwi_preload_free_ranges(
            passed, len(sizes), addresses.buffer_info()[0], sizes.buffer_info()[0]
        )
        self._not_before_s = self._clock() + REST * (self._busy() - began_s)


def preloaded() -> Any:
    """The preloaded library's functions; ``None``: it is not in this process."""
    library = ctypes.PyDLL(None)
    try:
        library.kiwi_preload_passed.restype = ctypes.c_uint64
        library.kiwi_preload_free_ranges.argtypes = (
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
    except AttributeError:
        return None
    return library


def _may_look(torch: Any) -> bool:
    """Whether its allocator is in use, and a look leaves no trace: who records the history of
    allocations would find our looks in it."""
    cuda = getattr(torch, "cuda", None)  # missing while torch is being imported
    if cuda is None or not cuda.is_initialized():
        return False
    recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return recording is None or not recording()


def unused_ranges(segments: Iterable[Mapping[str, Any]]) -> tuple[array[int], array[int]]:
    """Addresses and sizes of the free blocks of what ``torch.cuda.memory_snapshot`` returns.

    "Free" is ``inactive``: no tensor has it, and no stream that was told to PyTorch is still busy
    with it. Segments that do not say what they are are left out, and so are expandable ones, whose
    memory is not Kiwi's.
    """
    addresses, sizes = array("Q"), array("Q")
    for segment in segments:
        pool = segment.get("segment_pool_id")
        if pool is None or tuple(pool) != DEFAULT_POOL or segment.get("is_expandable", True):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                addresses.append(block.get("address", address))
                sizes.append(block["size"])
            address += block["size"]
    return addresses, sizes
