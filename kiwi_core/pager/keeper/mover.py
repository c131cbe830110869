"""Moves one program's GPU memory, from before the beginning to the end.

Nothing leads back once the driver has begun, so whatever can fail is done before: the record, the
RAM, the context. What fails after it leaves the program ``stuck``, which is said and never mended.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import custom_storage, driver, memory
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.hashing import LEAF_BYTES
from kiwi_core.pager.keeper import reference
from kiwi_core.pager.keeper.arena import Arena, gpu_node
from kiwi_core.pager.keeper.copies import HostCopy
from kiwi_core.pager.keeper.messages import Failed, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.hashing import LeafHasher
    from kiwi_core.gpu.memory import OwnGpu
    from kiwi_core.pager.keeper.messages import Way
    from kiwi_core.pager.keeper.record import Place

CLOSE_WITHIN_S: Final = 5.0
"""For a piece of RAM that is being pinned."""

MOVING: Final = frozenset({"moving-out", "moving-in"})


class Mover:
    """Calls come from any thread; ``state`` answers at once, the others one after the other."""

    def __init__(self, gpu_uuid: str, place: Place, library: str) -> None:
        self._gpu_uuid = gpu_uuid
        self._place = place
        self._library = library
        self._arena = Arena()
        self._copy = HostCopy(self._arena)
        self._gpu: OwnGpu | None = None
        self._hasher: LeafHasher | None = None
        self._lock = threading.Lock()
        self._way: Way = "in"
        self._out_bytes = 0
        self._aim_bytes = 0
        self._wake = threading.Event()
        self._trouble = ""

    def state(self) -> State:
        return State(
            pid=self._place.ref.pid,
            start_ticks=self._place.ref.start_ticks,
            way=self._way,
            keeper_pid=os.getpid(),
            ready=self._gpu is not None,
            hashing=self._hasher is not None,
            out_bytes=self._out_bytes,
            arena_bytes=self._arena.size_bytes,
            pinned_bytes=self._arena.pinned_bytes,
            copied_bytes=self._copy.copied_bytes,
            same_bytes=self._copy.same_bytes,
            trouble=self._trouble,
        )

    @property
    def idle(self) -> bool:
        return self._way == "in"

    def close(self) -> bool:
        """No move begins from here on, if none has; false: something is out, or on its way."""
        if not self._lock.acquire(timeout=CLOSE_WITHIN_S):
            return False
        if self.idle:
            return True
        self._lock.release()
        return False

    # --- RAM ------------------------------------------------------------------------------------

    def aim(self, size_bytes: int) -> None:
        self._aim_bytes = size_bytes
        self._wake.set()

    def reserve(self, size_bytes: int) -> None:
        """Raises ``GpuError``."""
        with self._lock:
            self._enter()
            self._arena.reserve(size_bytes)
        self._wake.set()  # what it has now is to be pinned

    def trim(self) -> None:
        """Gives back what it has, where nothing is out."""
        with self._lock:
            self._aim_bytes = 0
            if self._way != "in" or self._gpu is None:
                return
            self._enter()
            self._copy.forget()
            self._arena.give_back()

    def work_in_background(self) -> None:
        """For a thread of its own: opens the GPU, then has ready what was aimed at; for ever."""
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                while self._once():
                    pass
                self._trouble = ""
            except GpuError as error:
                self._trouble = str(error)  # tried again when somebody asks again

    def _once(self) -> bool:
        with self._lock:
            self._enter()
            if self._arena.missing_bytes(self._aim_bytes) and self._arena.to_spare(self._aim_bytes):
                self._arena.grow_once(self._aim_bytes)
                return True
            return self._arena.pin_once()

    def _enter(self) -> None:
        """Makes the context the first time. Raises ``GpuError``."""
        if self._gpu is None:
            gpu = memory.open_gpu(self._gpu_uuid)
            total_bytes = memory.total_bytes()
            self._arena.node = gpu_node(gpu.pci_bus_id)
            self._hasher = reference.hasher(self._library, total_bytes // LEAF_BYTES)
            self._gpu = gpu
        self._gpu.enter()

    # --- moves ----------------------------------------------------------------------------------

    def out(self) -> Failed | None:
        """What the program needs at most is reserved."""
        with self._lock:
            if self._way != "in" and not self._became_another():
                return _not_now(self._way, "out")
            try:
                self._enter()
                self._record("moving-out")
                operation = custom_storage.begin_checkpoint(self._place.ref.pid)
            except GpuError as error:
                self._way = "in"
                self._place.remove("record")
                return _failed(error)
            return self._to_the_end("out", lambda: self._take(operation))

    def bring_in(self) -> Failed | None:
        """There is room in the GPU for what is out and for the program's context."""
        with self._lock:
            if self._way != "out":
                return _not_now(self._way, "in")
            try:
                self._enter()
                self._record("moving-in")
                operation = custom_storage.begin_restore(self._place.ref.pid)
            except GpuError as error:
                self._way = "out"
                self._write_down("out")
                return _failed(error)
            return self._to_the_end("in", lambda: self._bring(operation))

    def _became_another(self) -> bool:
        """Its memory was out, and now it has some in the GPU: the process became another program
        by ``exec``. What was kept is nobody's."""
        state = driver.checkpoint_state(self._place.ref.pid)
        if state is not CheckpointState.LOCKED:
            return False
        self._copy.forget()
        self._way, self._out_bytes = "in", 0
        return True

    def _take(self, operation: custom_storage.Operation) -> None:
        sizes = [-(-piece.size_bytes // LEAF_BYTES) * LEAF_BYTES for piece in operation.memory]
        while self._arena.grow_once(sum(sizes)):
            pass  # never, if what was reserved is what NVML counted
        self._copy.take(operation.memory, self._hasher)
        operation.complete()
        self._out_bytes = sum(piece.size_bytes for piece in operation.memory)

    def _bring(self, operation: custom_storage.Operation) -> None:
        self._copy.bring(operation.memory)
        operation.complete()
        self._out_bytes = 0

    def _to_the_end(self, way: Way, move: Callable[[], None]) -> Failed | None:
        try:
            move()
        except Exception as error:  # noqa: BLE001 - whatever it was: nothing leads back
            self._stuck()
            code = error.driver_code if isinstance(error, GpuError) else None
            return Failed(
                "stuck", f"The move had begun and cannot be ended: {error}", "", code, True
            )
        self._way = way
        if way == "in":
            self._place.remove("record")
        else:
            self._write_down(way)
        return None

    def _record(self, way: Way) -> None:
        try:
            self._place.write(way, self._out_bytes)
        except OSError as error:
            raise GpuError(
                "no-record",
                f"What becomes of the process cannot be written down: {error.strerror}.",
                "Free some disk space in Kiwi's state directory.",
            ) from error
        self._way = way

    def _stuck(self) -> None:
        self._way = "stuck"
        self._write_down("stuck")

    def _write_down(self, way: Way) -> None:
        """After the fact: what stands there from before the move is as good, as long as it is known
        whether this process lives."""
        try:
            self._place.write(way, self._out_bytes)
        except OSError as error:
            self._trouble = f"The record cannot be written: {error.strerror}."


def _failed(error: GpuError) -> Failed:
    return Failed(error.code, error.message, error.remedy, error.driver_code)


def _not_now(way: Way, wanted: str) -> Failed:
    return Failed(
        "not-now", f"Its memory is {way}; it cannot be moved {wanted}.", begun=way in MOVING
    )
