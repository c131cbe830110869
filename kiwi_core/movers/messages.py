"""The messages between daemon and mover: four bytes of length, then a frame of msgpack."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kiwi_core.errors import GpuError

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

    @classmethod
    def of(cls, error: GpuError) -> Failure:
        return cls(error.code, error.message, error.remedy, error.driver_code)

    def error(self) -> GpuError:
        return GpuError(self.code, self.message, self.remedy, driver_code=self.driver_code)


class Seen(msgspec.Struct):
    """The answer to the call ``look``: the fields of ``GpuLook``, with the driver's errors apart.
    ``free_bytes`` is ``None`` where NVML was not asked."""

    free_bytes: int | None = None
    bytes_by_pid: dict[int, int] = {}
    names_users: bool = False
    states: dict[int, int] = {}
    errors: dict[int, Failure] = {}


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
