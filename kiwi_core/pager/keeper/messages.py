"""What a daemon and a keeper say to each other: one request, one reply, on a connection for both.

Both run as one user and are of one version, or of two that follow each other: unknown fields are
ignored, missing ones have defaults. A frame is its length (4 bytes, big endian) and JSON.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from kiwi_core.errors import GpuError, PeerError

if TYPE_CHECKING:
    import socket

FRAME_MAX_BYTES: Final = 64 << 10
"""The longest reply is a sentence and a few numbers."""

_LENGTH: Final = struct.Struct("!I")

Way = Literal["in", "moving-out", "out", "moving-in", "stuck"]
"""Where the program's memory is, as far as the keeper goes: ``stuck`` is for ever, a move that has
begun and can neither be ended nor given up."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """How are you? Answered at any time, also in the middle of a move."""


class Aim(msgspec.Struct, frozen=True, tag="aim"):
    """Have so much RAM ready, pinned, as far as the machine can spare it; in the background."""

    size_bytes: int


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Have so much RAM ready now, pinned or not; or say why not."""

    size_bytes: int


class Out(msgspec.Struct, frozen=True, tag="out"):
    """Move the program's memory out. It is locked, and what it needs at most is reserved."""


class In(msgspec.Struct, frozen=True, tag="in"):
    """Bring it back. There is room in the GPU."""


class Trim(msgspec.Struct, frozen=True, tag="trim"):
    """Give your RAM back, where nothing is out."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """End, if nothing is out."""


Request = Look | Aim | Reserve | Out | In | Trim | End


class State(msgspec.Struct, frozen=True, tag="state"):
    """``pid`` and ``start_ticks`` are the program's. ``out_bytes``: what was moved out, and is
    still; ``arena_bytes``: RAM that it has, of which ``pinned_bytes`` are pinned. ``copied_bytes``
    and ``same_bytes``: of all that it has moved out so far, what was copied and what need not be.
    ``ready``: it has its context. ``trouble``: what went wrong in the background last."""

    pid: int
    start_ticks: int
    way: Way
    keeper_pid: int = 0
    ready: bool = False
    hashing: bool = False
    out_bytes: int = 0
    arena_bytes: int = 0
    pinned_bytes: int = 0
    copied_bytes: int = 0
    same_bytes: int = 0
    trouble: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A ``GpuError`` in parts. Not ``begun``: the program is as it was."""

    code: str
    message: str
    remedy: str = ""
    driver_code: int | None = None
    begun: bool = False

    def error(self) -> GpuError:
        return GpuError(self.code, self.message, self.remedy, driver_code=self.driver_code)


Reply = State | Failed

_requests: Final = msgspec.json.Decoder(Request)
_replies: Final = msgspec.json.Decoder(Reply)


def send(sock: socket.socket, message: Request | Reply) -> None:
    """Raises ``OSError``."""
    data = msgspec.json.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_request(sock: socket.socket) -> Request | None:
    """``None``: the other end has closed. Raises ``PeerError`` for garbage, and ``OSError``."""
    data = _frame(sock)
    request: Request | None = None if data is None else _decoded(_requests, data)
    return request


def receive_reply(sock: socket.socket) -> Reply:
    """Raises ``PeerError`` for garbage or where the other end has closed, and ``OSError``."""
    data = _frame(sock)
    if data is None:
        raise PeerError("closed", "The keeper ended before it answered.")
    reply: Reply = _decoded(_replies, data)
    return reply


def _frame(sock: socket.socket) -> bytes | None:
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= FRAME_MAX_BYTES:
        raise PeerError("frame", f"A frame of {length} bytes; {FRAME_MAX_BYTES} is the most.")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        more = sock.recv(size - len(found))
        if not more:
            return None
        found += more
    return found


def _decoded(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's, too
        raise PeerError("message", f"Not a message of a keeper's: {error}") from error
