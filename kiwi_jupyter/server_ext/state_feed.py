"""The state as every reader knows it, and the changes that wait to be sent to each reader.

Lives in the server's event loop; nothing here blocks or does I/O. A reader that is too slow for its
buffer loses it and gets a snapshot instead, so that a bad connection costs a bounded amount.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from kiwi_jupyter.server_ext import diff
from kiwi_jupyter.server_ext.aged_status import aged
from kiwi_jupyter.server_ext.model import Delta, Gpu, GpuDelta, Heartbeat, Server, Snapshot, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RING_MAX: Final = 512
"""Most deltas kept for readers that come back: minutes of a busy machine, at a few per second."""

RING_MAX_BYTES: Final = 4 << 20
"""Most bytes of these deltas: with 1,000 sessions, a delta can be long."""

BUFFER_MAX: Final = 64
"""Most deltas that wait for one reader; beyond this a snapshot is shorter."""

HEARTBEAT_S: Final = 10.0
"""Interval of heartbeats: a browser notices within a few of them that its server is gone."""


class EncodedDelta:
    """A delta, encoded once for all readers (and once more for readers who may not change
    settings).
    """

    __slots__ = ("_masked", "delta", "encoded")

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self.encoded = msgspec.json.encode(delta)
        self._masked: bytes | None = None

    def bytes_for(self, may_set: bool) -> bytes:
        if may_set:
            return self.encoded
        if self._masked is None:
            # Such a reader may change nothing, whatever the daemon allows this server.
            gpus = {}
            for uuid, change in (self.delta.gpus or {}).items():
                masked = change
                if change.set is not None and change.set.get("may_set"):
                    masked = replace(change, set={**change.set, "may_set": False})
                gpus[uuid] = masked
            server = self.delta.server and replace(self.delta.server, may_set=False)
            masked_delta = replace(self.delta, server=server, gpus=self.delta.gpus and gpus)
            self._masked = msgspec.json.encode(masked_delta)
        return self._masked


class StateFeed:
    """The feed. ``wall`` is the clock of all times in it."""

    def __init__(self, server: Server, *, wall: Callable[[], float] = time.time) -> None:
        self.epoch = secrets.token_hex(8)
        self.seq = 0
        self._wall = wall
        self._server = server
        self._gpus: dict[str, Gpu] = {}
        self._received_at: dict[str, float] = {}
        self._ring: deque[EncodedDelta] = deque()
        self._ring_bytes = 0
        self._subscriptions: set[Subscription] = set()

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    # --- what is new ----------------------------------------------------------------------------

    def publish(self, gpus: Mapping[str, tuple[Gpu, float]], server: Server) -> None:
        """Take the state of everything: by UUID, each GPU and when its daemon sent it."""
        changed: dict[str, GpuDelta] = {}
        for uuid, (gpu, received_at) in gpus.items():
            old = self._gpus.get(uuid)
            new = gpu if old is None else diff.steadied(gpu, old)
            if (change := diff.changes(old, new)) is not None:
                changed[uuid] = change
            self._gpus[uuid] = new
            self._received_at[uuid] = received_at
        gone = [uuid for uuid in self._gpus if uuid not in gpus]
        for uuid in gone:
            del self._gpus[uuid], self._received_at[uuid]
        news = server if server != self._server else None
        self._server = server
        if not changed and not gone and news is None:
            return
        self.seq += 1
        delta = EncodedDelta(
            Delta(
                seq=self.seq,
                now=self._wall(),
                server=news,
                gpus=changed or None,
                gpus_gone=gone or None,
            )
        )
        self._ring.append(delta)
        self._ring_bytes += len(delta.encoded)
        while len(self._ring) > RING_MAX or self._ring_bytes > RING_MAX_BYTES:
            self._ring_bytes -= len(self._ring.popleft().encoded)
        for subscription in self._subscriptions:
            subscription.offer(delta)

    # --- what is so -----------------------------------------------------------------------------

    def state(self, *, may_set: bool, history_s: float | None = None) -> State:
        """Return the state. ``history_s`` limits the history to entries that lasted into that
        time.
        """
        now = self._wall()
        gpus = [aged(gpu, now, now - self._received_at[uuid]) for uuid, gpu in self._gpus.items()]
        gpus.sort(key=lambda gpu: (gpu.index, gpu.uuid))
        if history_s is not None:
            gpus = [_recent(gpu, now - history_s) for gpu in gpus]
        if not may_set:
            gpus = [replace(gpu, may_set=False) for gpu in gpus]
        server = replace(self._server, may_set=self._server.may_set and may_set)
        return State(epoch=self.epoch, seq=self.seq, now=now, server=server, gpus=gpus)

    # --- readers --------------------------------------------------------------------------------

    def subscribe(self, *, may_set: bool, epoch: str = "", seq: int = -1) -> Subscription:
        """Add a reader, which may have seen everything up to ``seq`` of ``epoch``."""
        subscription = Subscription(self, may_set, self._missed(epoch, seq))
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def _missed(self, epoch: str, seq: int) -> list[EncodedDelta] | None:
        """Return the deltas that a reader lacks; ``None`` if they are not here any more, or the
        numbers are impossible.
        """
        if epoch != self.epoch or not 0 <= seq <= self.seq:
            return None
        oldest = self._ring[0].delta.seq if self._ring else self.seq + 1
        if seq < oldest - 1 or self.seq - seq > BUFFER_MAX:
            return None
        return [news for news in self._ring if news.delta.seq > seq]

    def heartbeat(self) -> bytes:
        return msgspec.json.encode(Heartbeat(seq=self.seq, now=self._wall()))


class Subscription:
    """One reader's place in the stream; ``missed`` as ``StateFeed.subscribe`` found it."""

    def __init__(self, feed: StateFeed, may_set: bool, missed: list[EncodedDelta] | None) -> None:
        self._feed = feed
        self._may_set = may_set
        self._lost = missed is None
        """Deltas are missing here, so that the reader needs a snapshot."""
        self._waiting: deque[EncodedDelta] = deque(missed or ())
        self._some = asyncio.Event()
        if self._lost or self._waiting:
            self._some.set()

    @property
    def is_ready(self) -> bool:
        """Return whether ``next`` has something other than a heartbeat."""
        return self._some.is_set()

    def offer(self, news: EncodedDelta) -> None:
        if not self._lost:
            self._waiting.append(news)
            if len(self._waiting) > BUFFER_MAX:
                self._waiting.clear()
                self._lost = True
        self._some.set()

    async def next(self, timeout_s: float = HEARTBEAT_S) -> bytes:
        """Return the next message, encoded; a heartbeat if there is none within ``timeout_s``."""
        if not self._some.is_set():
            with suppress(asyncio.TimeoutError):  # not the builtin one before Python 3.11
                await asyncio.wait_for(self._some.wait(), timeout_s)
        # in a busy loop, the timeout may fire although a delta has come
        if not self._some.is_set():
            return self._feed.heartbeat()
        if self._lost:
            self._lost = False
            state = self._feed.state(may_set=self._may_set)
            fields = {name: getattr(state, name) for name in state.__struct_fields__}
            message = msgspec.json.encode(Snapshot(**fields))
        else:
            message = self._waiting.popleft().bytes_for(self._may_set)
        if not self._waiting:
            self._some.clear()
        return message


def _recent(gpu: Gpu, since: float) -> Gpu:
    kept = [one for one in gpu.history if one.ended_at is None or one.ended_at >= since]
    return gpu if len(kept) == len(gpu.history) else replace(gpu, history=kept)
