"""Keeps the garbage collector from touching the GPU outside bursts.

A cyclic structure that held GPU memory (an exception's frames, a model) is freed whenever the
collector happens to run, perhaps in a cell that only uses the CPU. Its destructor would then call
the driver while this process's memory may be paged out, and block until somebody requests the GPU.
So between bursts all existing objects are set aside (``gc.freeze``, a constant-time operation).
Meanwhile the collector sees only the objects that CPU cells allocate.
"""

from __future__ import annotations

import gc


class GcGuard:
    """Called by ``Burst`` under its lock."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._frozen = False

    def burst_ended(self) -> None:
        if self._enabled and not self._frozen and gc.get_freeze_count() == 0:
            gc.freeze()  # unless the user froze something, which must stay frozen
            self._frozen = True

    def burst_began(self) -> None:
        if self._frozen:
            self._frozen = False
            gc.unfreeze()
