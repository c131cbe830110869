"""Worker processes that make every call to the driver or NVML that can hang.

A call about another process can hang for ever (a stopped target, a peer of NCCL, a bug), and a call
that hangs cannot be taken back. So the daemon makes none: it hands each call to a worker, one at a
time, with a time limit, and only awaits the answer. A worker whose call passes its limit is killed.
The driver finishes what it had begun, and another worker can ask how that came out.
"""

from __future__ import annotations

from kiwi_core.movers.errors import MOVER_DIED, Busy, Hung
from kiwi_core.movers.pool import Movers
from kiwi_core.movers.remote import RemoteDriver, RemoteGpu

__all__ = ["MOVER_DIED", "Busy", "Hung", "Movers", "RemoteDriver", "RemoteGpu"]
