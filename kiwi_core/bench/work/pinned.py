"""How much host memory the preloaded library has pinned for this program.

Pinning takes about a second per gibibyte, in the background. A move that does not wait for it goes
through ordinary memory at half the speed, which users see only for a short time.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final, NamedTuple

_QUIET_S: Final = 3.0
"""Pieces are 1 GiB at most: if nothing more is pinned for this long, nothing more will be."""

_POLL_S: Final = 0.02


class _Seen(NamedTuple):
    """What the library reports. ``coming``: nothing has been refused so far."""

    coming: bool
    pinned_bytes: int
    wanted_bytes: int

    @property
    def done(self) -> bool:
        return not self.coming or self.pinned_bytes >= self.wanted_bytes


def until_pinned(limit_s: float) -> int | None:
    """Wait until all that may have to go out has pinned memory, ``limit_s`` is over, or no more
    comes (because of a limit of the system or the daemon). Return the bytes that are pinned;
    ``None`` if there is no library in this program."""
    library: Any = ctypes.PyDLL(None)
    if not hasattr(library, "kiwi_preload_pinned"):
        return None
    ends_s = time.monotonic() + limit_s
    quiet_s = time.monotonic() + _QUIET_S
    seen = _look(library)
    while not seen.done and time.monotonic() < min(ends_s, quiet_s):
        time.sleep(_POLL_S)
        last, seen = seen, _look(library)
        if seen.pinned_bytes != last.pinned_bytes:
            quiet_s = time.monotonic() + _QUIET_S
    return seen.pinned_bytes


def _look(library: Any) -> _Seen:
    pinned, pageable, wanted = (ctypes.c_uint64() for _ in range(3))
    coming = library.kiwi_preload_pinned(
        ctypes.byref(pinned), ctypes.byref(pageable), ctypes.byref(wanted)
    )
    return _Seen(bool(coming), pinned.value, wanted.value)
