"""The messages between daemon and mover: four bytes of length, then a frame of msgpack."""

from __future__ import annotations

from typing import Any, Final

import msgspec

HEAD_BYTES: Final = 4

FRAME_MAX_BYTES: Final = 16 << 20
"""The largest answer lists a GPU's utilisation samples: some hundred bytes for each process."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A function of ``calls.CALLS`` and its arguments."""

    name: str
    args: list[Any]


class Failure(msgspec.Struct, frozen=True):
    """A ``GpuError``, or an error in Kiwi, for which ``code`` is "fault"."""

    code: str
    message: str
    remedy: str = ""
    driver_code: int | None = None


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call. A first one, which answers no call, says that the mover is ready."""

    value: Any = None
    failure: Failure | None = None


_encoder = msgspec.msgpack.Encoder()


def frame(message: Call | CallAnswer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def body_bytes(head: bytes) -> int:
    """Return the length that ``head`` announces. Raise ``ValueError`` if no frame is so long."""
    size = int.from_bytes(head, "big")
    if size > FRAME_MAX_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return size
