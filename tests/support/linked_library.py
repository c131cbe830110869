"""A stand-in for the preloaded library, in Python: it owns device memory through the driver's VMM
calls, gates the calls that use it, and has the role ``pager`` on the daemon's socket.

It runs inside of ``cuda_worker.py`` processes. ``faults`` scripts the results of the next orders.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
import time
from typing import Any

from cuda.bindings import driver

GRANULE = 2 << 20


def ck(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:] or None


class Memory:
    """A range of addresses, with or without physical memory behind it."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = -(-size // GRANULE) * GRANULE
        self.address = ck(driver.cuMemAddressReserve(self.size, 0, 0, 0))
        self.handle: Any = None
        self.copy = bytearray()
        if not self.back():
            ck(driver.cuMemAddressFree(self.address, self.size))
            raise MemoryError
        for at in range(0, self.size, 1 << 20):
            word = ((seed << 16) + (at >> 20)).to_bytes(4, "little")
            length = min(1 << 20, self.size - at)
            ck(driver.cuMemcpyHtoD(int(self.address) + at, word * (length // 4), length))

    def back(self) -> bool:
        """Allocate and map the memory; return false if there is none."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        status, handle = driver.cuMemCreate(self.size, properties, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return False
        ck((status,))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ck(driver.cuMemMap(self.address, self.size, 0, handle, 0))
        ck(driver.cuMemSetAccess(self.address, self.size, [access], 1))
        self.handle = handle
        if self.copy:
            ck(driver.cuMemcpyHtoD(self.address, bytes(self.copy), self.size))
            self.copy = bytearray()
        return True

    def away(self) -> None:
        self.copy = bytearray(self.size)
        ck(driver.cuMemcpyDtoH(self.copy, self.address, self.size))
        ck(driver.cuMemUnmap(self.address, self.size))
        ck(driver.cuMemRelease(self.handle))
        self.handle = None

    def digest(self) -> str:
        data = bytearray(self.size)
        ck(driver.cuMemcpyDtoH(data, self.address, self.size))
        return f"{int(self.address)} {hashlib.sha256(data).hexdigest()}"


class Library:
    def __init__(
        self, path: str, *, unowned: dict[str, int] | None = None, owns: bool = True
    ) -> None:
        """Connect to ``path``. Without ``owns`` the library is only a gate."""
        self.path, self.unowned, self.owns = path, unowned or {}, owns
        self.memories: list[Memory] = []
        self.faults: dict[str, list[str]] = {}
        """Scripted results of the next orders, in order, by action; see ``_meet``."""
        self.released = threading.Event()
        self.gates: list[bool] = []
        self.orders: list[str] = []
        self.rooms: dict[int, Any] = {}
        self.welcomes: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.reconnects = True
        self._said = threading.Lock()
        self._changed = threading.Condition()
        self._held = self._out = self._armed = False
        self._inside = 0
        self._request = 0
        self._context = ck(driver.cuCtxGetCurrent())
        self._socket: socket.socket | None = None
        self._welcomed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        if not self._welcomed.wait(60):
            raise RuntimeError("no welcome")

    # --- the program ----------------------------------------------------------------------------

    def take(self, size: int, seed: int) -> None:
        """Take memory; ask for room while there is none and some is promised."""
        while True:
            try:
                with self:
                    self.memories.append(Memory(size, seed))
            except MemoryError:
                if not self.want_room(size)["granted"]:
                    raise
            else:
                break
        self.tell()

    def take_pieces(self, size: int, seed: int) -> None:
        """Take memory in pieces, which can be moved one by one."""
        for number, at in enumerate(range(0, size, GRANULE)):
            self.take(min(GRANULE, size - at), seed * 100 + number)

    def digest(self) -> str:
        with self:
            return "|".join(memory.digest() for memory in self.memories)

    def __enter__(self) -> None:
        """Enter a gated call."""
        with self._changed:
            asked = False
            while self._held or self._armed:
                if self._armed and not asked:
                    asked = True
                    self.say({"type": "want-lease"})
                self._changed.wait(0.2)
                asked = asked and self._armed
            self._inside += 1
        ck(driver.cuCtxSetCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def want_room(self, size: int, within_s: float = 60.0) -> dict[str, Any]:
        with self._changed:
            self._request += 1
            request = self._request
            self.say({"type": "want-room", "request": request, "bytes": size})
            if not self._changed.wait_for(lambda: request in self.rooms, within_s):
                raise RuntimeError("no answer about room")
            answer: dict[str, Any] = self.rooms[request]
            return answer

    # --- the connection -------------------------------------------------------------------------

    def say(self, message: dict[str, Any]) -> None:
        with self._said:
            if self._socket is not None:
                try:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    return

    def tell(self) -> None:
        owned = sum(memory.size for memory in self.memories)
        state = "out" if self._out else "held" if self._held else "resident"
        self.say({
            "type": "pager-state", "state": state,
            "resident_bytes": owned - self._out_bytes(),
            "paged_out_bytes": self._out_bytes(),
            "unowned_bytes": sum(self.unowned.values()), "unowned": self.unowned,
        })  # fmt: skip

    def drop(self) -> None:
        """Drop the connection."""
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        ck(driver.cuCtxSetCurrent(self._context))
        while True:
            try:
                self._talk()
            except (OSError, ValueError) as error:
                self.errors.append(repr(error))
            with self._said:
                self._socket = None
            with self._changed:
                self._armed = False
                if self._held and not self._out and self.owns:
                    self._held = False
                self._changed.notify_all()
            while not self.reconnects:
                time.sleep(0.01)
            time.sleep(0.05)

    def _talk(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self.path)
            with self._said:
                self._socket = connection
            hello = {"type": "hello", "protocol": 1, "role": "pager", "client": "test"}
            self.say({**hello, "name": "linked", "owns": self.owns})
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "welcome":
            self.welcomes.append(message)
            self.tell()
            self._welcomed.set()
        elif kind == "error":
            self.errors.append(message["code"])
        elif kind == "gate":
            with self._changed:
                self.gates.append(message["open"])
                self._armed = not message["open"]
                self._changed.notify_all()
        elif kind == "pager-do":
            self._do(message)
        elif kind == "room":
            with self._changed:
                self.rooms[message["request"]] = message
                self._changed.notify_all()

    def _do(self, order: dict[str, Any]) -> None:
        action = order["action"]
        self.orders.append(action)
        began_s = time.monotonic()
        scripted = self.faults.get(action, [])
        outcome = self._meet(scripted.pop(0), order) if scripted else self._perform(order)
        if outcome is None:
            return
        self.tell()
        done = {"type": "pager-done", "op": order["op"], "outcome": "moved", "bytes": 0}
        self.say({**done, "elapsed_ns": round((time.monotonic() - began_s) * 1e9), **outcome})

    def _meet(self, fault: str, order: dict[str, Any]) -> dict[str, Any] | None:
        word, _, reason = fault.partition(" ")
        if word == "refuse":
            return {"outcome": "refused", "reason": reason, "detail": "scripted"}
        if word == "stick":  # fails half-way, and the way back fails, too
            self._close(order["within_ns"] / 1e9)
            self._go_out(len(self.memories) // 2)
            return {"outcome": "refused", "reason": reason, "detail": "scripted"}
        if word == "lose":
            return {"outcome": "lost", "detail": "scripted"}
        if word == "die":
            self._perform(order)
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if word == "hang":
            self.released.wait()
        if word == "drop":
            self.drop()
        if word == "garbage":
            self.say({"type": "pager-done", "op": order["op"], "outcome": "perhaps"})
            return None
        outcome = self._perform(order)
        if word == "silent":
            self.tell()
            return None
        return outcome

    def _perform(self, order: dict[str, Any]) -> dict[str, Any]:
        action = order["action"]
        must_close = action in ("hold", "page-out") and not self._held
        if must_close and not self._close(order["within_ns"] / 1e9):
            return {"outcome": "refused", "reason": "lock-timeout", "detail": "a call goes on"}
        if action == "page-out":
            self._go_out()
            return {"bytes": self._out_bytes()}
        if action == "page-in":
            moved = self._come_in() if self._out else 0
            if moved is None:
                return {"outcome": "refused", "reason": "no-room", "detail": "no memory"}
            self._out = False
            self._open()
            return {"bytes": moved}
        if action == "free":
            self._open()
        if action == "yield" and not self._held:
            return {"outcome": "refused", "reason": "driver", "detail": "the gate is open"}
        return {"bytes": 0}

    def _out_bytes(self) -> int:
        return sum(memory.size for memory in self.memories if memory.handle is None)

    def _go_out(self, most: int | None = None) -> None:
        self._out = True
        for memory in self.memories[:most]:
            if memory.handle is not None:
                memory.away()

    def _come_in(self) -> int | None:
        came: list[Memory] = []
        for memory in self.memories:
            if memory.handle is not None:
                continue
            if not memory.back():
                for one in came:
                    one.away()
                return None
            came.append(memory)
        return sum(one.size for one in came)

    def _close(self, within_s: float) -> bool:
        with self._changed:
            self._held = True
            if self._changed.wait_for(lambda: not self._inside, within_s):
                return True
            self._held = False
            self._changed.notify_all()
            return False

    def _open(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()
