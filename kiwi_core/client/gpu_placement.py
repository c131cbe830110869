"""Chooses the GPU where a program that is about to start would wait least.

Servers and ``kiwi run`` use the number that daemons also give to batch systems: the wait of a
newcomer (``GpuStatus.newcomer_wait_s``). On a machine, one program is placed at a time, and its
GPU's daemon learns to expect it before the next program is placed. So programs that start together
spread over the GPUs.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_core.client.client import Client
from kiwi_core.config import PLACING_LOCK
from kiwi_core.errors import KiwiError
from kiwi_core.states import SessionState
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus

WITHIN_S: Final = 2.0
"""Time for all daemons to answer, which takes milliseconds. On a busy machine a kernel's own start
takes about as long; a daemon that hangs must not cost more than that."""

ASKERS: Final = 16
"""Daemons asked at once: no machine has more GPUs."""

UNNOTICED_S: Final = 1.0
"""Waits that differ by less are the same to people; other things decide then."""

EXPECTED_FOR_S: Final = 3600.0
"""A notebook that was opened and has not used its GPU within an hour does not count any more."""

LOCK_EVERY_S: Final = 0.01


def place(sockets: list[Path], key: str, *, within_s: float = WITHIN_S) -> GpuStatus | None:
    """Choose the GPU of one of ``sockets`` for the program ``key`` (a session's ``kernel_id``), and
    have its daemon expect it. Return ``None`` if there is no choice: fewer than two daemons, or
    none answers in time. Faults of a daemon raise nothing.
    """
    if len(sockets) < 2:
        return None
    directory = sockets[0].parent
    lock = _lock(directory, time.monotonic() + within_s)
    try:
        gpu = min(_usable(statuses(sockets, within_s)), key=rank, default=None)
        if gpu is not None:
            expect(directory / f"{gpu.uuid}.sock", key, EXPECTED_FOR_S)
        return gpu
    finally:
        if lock is not None:
            os.close(lock)


def rank(gpu: GpuStatus) -> tuple[float, int, int, int]:
    """Return the sort key of a GPU; the smallest is the best. Equal waits (to about a second):
    fewest programs, then most memory that is free or could be, then the lowest index.
    """
    wait_s = gpu.newcomer_wait_s
    felt = math.inf if wait_s is None else float(int(wait_s / UNNOTICED_S))
    idle = (one for one in gpu.sessions if one.state is SessionState.IDLE)
    room_bytes = gpu.memory.free_bytes + sum(one.resident_bytes for one in idle)
    return felt, programs_of(gpu), -room_bytes, gpu.index


def programs_of(gpu: GpuStatus) -> int:
    """Return the number of programs that share the GPU or are about to, each counted once."""
    return len(gpu.sessions) + len(gpu.outside) + gpu.expected


def statuses(sockets: Iterable[Path], within_s: float) -> list[GpuStatus]:
    """Return the statuses of the daemons that answer within ``within_s`` seconds."""
    askers = ThreadPoolExecutor(ASKERS, thread_name_prefix="kiwi-placing")
    try:
        asked = [askers.submit(_ask, path, within_s) for path in sockets]
        answered, _ = wait(asked, within_s)
        return [gpu for each in asked if each in answered and (gpu := each.result()) is not None]
    finally:
        askers.shutdown(wait=False, cancel_futures=True)


def expect(socket: Path, key: str, for_s: float, *, pid: int = 0, name: str = "") -> None:
    """Have the daemon at ``socket`` expect the program ``key``; 0 s: no longer. ``pid`` and
    ``name``: see ``Expect``. Does nothing if it does not answer."""
    with suppress(KiwiError), _observer(socket, WITHIN_S) as client:
        client.connect()
        client.expect(key, for_s, WITHIN_S, pid=pid, name=name)


def _ask(socket: Path, within_s: float) -> GpuStatus | None:
    with suppress(KiwiError), _observer(socket, within_s) as client:
        client.connect()
        return client.status(within_s)
    return None


def _observer(socket: Path, within_s: float) -> Client:
    return Client(
        socket, role=Role.OBSERVER, client="placing", reconnect=False, connect_timeout_s=within_s
    )


def _usable(gpus: list[GpuStatus]) -> list[GpuStatus]:
    """Return the real GPUs, else the emulated ones, which must not hide real ones."""
    return [gpu for gpu in gpus if not gpu.emulated] or gpus


def _lock(directory: Path, deadline_s: float) -> int | None:
    """Take the lock that the daemon has made for it, which every user may open, and return its
    descriptor. A caller that cannot get it in time goes on without it: a hostile process that keeps
    it makes placement worse, and stops nobody.
    """
    try:
        lock = os.open(directory / PLACING_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            time.sleep(LOCK_EVERY_S)
    return lock
