"""The role of a program that is a session of a daemon, like a notebook's kernel."""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.bench.work import pinned
from kiwi_core.bench.work.bus import Bus
from kiwi_core.client import Client
from kiwi_core.errors import GpuError, KiwiError, PeerError
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Acquire

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP: Final = 20


class BenchSession(Bus):
    ENDS_WITHIN_S = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    def connect(self, socket_path: str, name: str) -> None:
        self._client = Client(Path(socket_path), name=name, client="kiwi bench", reconnect=False)
        self._client.connect()

    def lease(self, echo_path: str, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of bare round trips and leases, taken in turns. The end of a lease is
        not timed."""
        asked = encode(Acquire(burst=1000))
        found: dict[str, list[float]] = {"bare": [], "grant": []}
        with socket.socket(socket.AF_UNIX) as bare:
            bare.connect(echo_path)
            for _ in range(WARM_UP + rounds):
                at = time.perf_counter()
                bare.sendall(asked)
                bare.recv(4096)
                found["bare"].append(time.perf_counter() - at)
                at = time.perf_counter()
                self.client.acquire(timeout_s=10.0)
                found["grant"].append(time.perf_counter() - at)
                self.client.end_burst()
        return {name: samples[WARM_UP:] for name, samples in found.items()}

    def first_cell(
        self, uuid: str, size_bytes: int, timeout_s: float, pinning_s: float
    ) -> int | None:
        """Take the GPU and memory; the first time, make a context. Then wait until all that is held
        has pinned memory to go to, at most ``pinning_s``; return how many bytes have it, or
        ``None`` if the driver moves them."""
        with self._cell(timeout_s):
            if self._gpu is None:
                self.open(uuid)
            self.hold(size_bytes)
        pinned_bytes = pinned.until_pinned(pinning_s)
        return pinned_bytes if pinned_bytes is None else min(pinned_bytes, self._held_bytes)

    def cell(self, timeout_s: float, change: bool) -> dict[str, Any]:
        """Take the GPU, use all memory held, and give the GPU back. ``seconds``: from the request
        to the grant; ``moves``: what the daemon moved for it."""
        began = time.perf_counter()
        with self._cell(timeout_s):
            waited_s = time.perf_counter() - began
            moves = self._moves_since(began)
            intact = self.intact()
            if change:
                self.change()
        return {"seconds": waited_s, "moves": moves, "intact": intact}

    def _moves_since(self, began: float) -> list[tuple[str, int, float]]:
        """Return direction, bytes and seconds of each move of the daemon, for any session."""
        swaps = self.client.status().swaps
        since_s = time.perf_counter() - began
        return [
            (str(one.direction), one.bytes_moved, one.seconds)
            for one in swaps
            if one.ago_s < since_s and one.seconds > 0
        ]

    def move_out(self, timeout_s: float) -> dict[str, float]:
        """Ask the daemon to move this program's memory out, and wait until that is done."""
        began = self._release(time.perf_counter() + timeout_s)
        while time.perf_counter() - began < timeout_s:
            for way, size, seconds in self._moves_since(began):
                if way == "out":
                    return {"bytes": size, "seconds": seconds}
            time.sleep(0.01)
        raise GpuError("not-moved", f"The daemon did not move it out within {timeout_s:.0f} s.")

    def _release(self, ends: float) -> float:
        """Request the daemon to move the memory out, and return at once. Right after a cell the GPU
        may still count as working for it: then the daemon refuses.
        """
        while True:
            began = time.perf_counter()
            try:
                self.client.release()
            except PeerError as refused:
                if refused.code != "in-burst" or began > ends:
                    raise
                time.sleep(0.05)
            else:
                return began

    def last_cell(self, timeout_s: float) -> None:
        """Free its memory, so that nothing has to be moved any more."""
        with self._cell(timeout_s):
            self.drop()

    @contextmanager
    def _cell(self, timeout_s: float) -> Iterator[None]:
        """Hold the lease."""
        self.client.acquire(timeout_s=timeout_s)
        try:
            yield
        finally:
            self.client.end_burst()

    def resident_bytes(self, limit_s: float) -> int:
        """Return the daemon's count of this session's bytes in the GPU, once it has looked."""
        ends_s = time.monotonic() + limit_s
        while True:
            sessions = self.client.status().sessions
            found = sum(one.resident_bytes for one in sessions if one.pid == os.getpid())
            if found >= self._held_bytes or time.monotonic() > ends_s:
                return max(found, self._held_bytes)
            time.sleep(0.02)

    def moved_by(self, wanted: str, limit_s: float) -> str:
        """Return who moves this program's memory, by the daemon, once that is ``wanted`` or
        ``limit_s`` is over."""
        ends_s = time.monotonic() + limit_s
        while True:
            sessions = self.client.status().sessions
            said = next((str(s.pager.value) for s in sessions if s.pid == os.getpid()), "nobody")
            if said == wanted or time.monotonic() > ends_s:
                return said
            time.sleep(0.05)

    def close(self) -> None:
        if self._client is not None:
            with suppress(KiwiError):
                self._client.goodbye(
                    self.ENDS_WITHIN_S - 15
                )  # brings its memory back, if it is out
            self._client.close()
        super().close()
