"""Convert bytes to messages and back: one JSON object per line, in UTF-8, with a length limit.

Whatever bytes come in, reading raises only ``PeerError``, and writing raises only ``CallerError``.
Nothing here touches a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec.structs import replace

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.messages import ClientMessage, DaemonMessage, Hello
from kiwi_core.wire.names import clean_name
from kiwi_core.wire.pager import PagerDone

if TYPE_CHECKING:
    from collections.abc import Iterator

_M = TypeVar("_M")


class FrameReader:
    """Cuts a stream of bytes into lines. One per connection; unusable after an error.

    A daemon gives ``request_max_bytes`` as the limit, a client ``frame_max_bytes``.
    """

    def __init__(self, max_bytes: int = DEFAULTS.frame_max_bytes) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._fault: PeerError | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the unfinished line; at most the limit."""
        return len(self._rest)

    def only_line(self, data: bytes) -> bytes | None:
        """Return the line if ``data`` is exactly one whole line in ASCII (it nearly always is),
        else ``None``: then call ``feed``, which returns the same. Changes nothing. Each grant takes
        this path."""
        if self._rest or self._fault is not None or len(data) > self._max_bytes:
            return None
        line, end, rest = data.partition(b"\n")
        # ``0 in line``: looking for ``b"\0"`` instead takes ten times as long.
        if rest or not end or not line.isascii() or 0 in line:
            return None
        return line

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines (without their end) that ``data`` completes; iterate to the end.

        Raises ``PeerError``, after the good lines before it, for a line that is longer than the
        limit ("too-large"), holds a NUL or is not UTF-8 ("malformed"), and on every later call.
        """
        if self._fault is not None:
            raise self._fault
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = b""
        for line in lines:
            self._check(line)
            yield line
        if len(self._rest) + len(rest) > self._max_bytes:
            raise self._break(_too_large(self._max_bytes))
        self._rest += rest

    def _check(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            raise self._break(_too_large(self._max_bytes))
        if b"\0" in line or not _is_utf8(line):
            raise self._break(
                PeerError(
                    "malformed",
                    "The other end sent a line that is not text in UTF-8.",
                    "Something that is not Kiwi is talking on this socket.",
                )
            )

    def _break(self, fault: PeerError) -> PeerError:
        self._rest = b""
        self._fault = fault
        return fault


def _is_utf8(line: bytes) -> bool:
    if line.isascii():
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _too_large(max_bytes: int) -> PeerError:
    return PeerError(
        "too-large",
        f"The other end sent a line of more than {max_bytes} bytes.",
        "Something that is not Kiwi, or a much newer Kiwi, is talking on this socket.",
    )


_REQUEST_MAX_BYTES: Final = DEFAULTS.request_max_bytes
_FRAME_MAX_BYTES: Final = DEFAULTS.frame_max_bytes
_encoder: Final = msgspec.json.Encoder()
_client_decoder: Final[msgspec.json.Decoder[ClientMessage]] = msgspec.json.Decoder(ClientMessage)
_daemon_decoder: Final[msgspec.json.Decoder[DaemonMessage]] = msgspec.json.Decoder(DaemonMessage)


_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""ValueError covers bad UTF-8 (and, since msgspec 0.21, its own errors); RecursionError covers deep
nesting."""


class _Tag(msgspec.Struct):
    type: str


_tag_decoder: Final = msgspec.json.Decoder(_Tag)


def _tags(union: object) -> frozenset[str]:
    members: tuple[type[msgspec.Struct], ...] = union.__args__  # type: ignore[attr-defined]
    return frozenset(str(member.__struct_config__.tag) for member in members)


CLIENT_TYPES: Final = _tags(ClientMessage)
DAEMON_TYPES: Final = _tags(DaemonMessage)


def encode(
    message: ClientMessage | DaemonMessage, max_bytes: int = DEFAULTS.frame_max_bytes
) -> bytes:
    """Return the line, with its end, that holds ``message``.

    Raises ``CallerError``: "too-large" past the limit, "malformed" for text that has no UTF-8 form
    (undecodable file names; see ``clean_name``). A float that is not finite becomes ``null``.
    """
    try:
        line = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise CallerError(
            "malformed",
            f"A message holds text that cannot be written as UTF-8: {error}.",
            "Rename the file or the notebook that it names.",
        ) from error
    if len(line) > max_bytes:
        raise CallerError(
            "too-large",
            f"A message of {len(line)} bytes is longer than the limit of {max_bytes}.",
            "Ask for less at once.",
        )
    return line + b"\n"


def decode_client(line: bytes) -> ClientMessage:
    """Return the client's message in ``line``, with cleaned names.

    Raises ``PeerError`` ("malformed", "unknown-type", "too-large").
    """
    message = _decode(_client_decoder, CLIENT_TYPES, line, _REQUEST_MAX_BYTES)
    if isinstance(message, Hello):
        return replace(
            message,
            client=clean_name(message.client),
            name=clean_name(message.name),
            kernel_id=clean_name(message.kernel_id),
        )
    if isinstance(message, PagerDone):
        return replace(message, detail=clean_name(message.detail))
    return message


def decode_daemon(line: bytes) -> DaemonMessage:
    """Return the daemon's message in ``line``. Raises ``PeerError`` like ``decode_client``."""
    return _decode(_daemon_decoder, DAEMON_TYPES, line, _FRAME_MAX_BYTES)


def _decode(
    decoder: msgspec.json.Decoder[_M], types: frozenset[str], line: bytes, max_bytes: int
) -> _M:
    if len(line) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return decoder.decode(line)
    except _UNREADABLE as error:
        raise _explain(types, line, error) from error


def _explain(types: frozenset[str], line: bytes, error: Exception) -> PeerError:
    """Tell an unknown type from a malformed message. Called only after decoding has failed."""
    try:
        tag = _tag_decoder.decode(line).type
    except _UNREADABLE:
        return PeerError("malformed", f"The other end sent something unreadable: {error}.")
    if tag in types:
        return PeerError("malformed", f"The other end sent a wrong {tag!r} message: {error}.")
    return PeerError(
        "unknown-type",
        f"The other end sent a message of the unknown type {clean_name(tag)!r}.",
        "Use the same version of Kiwi on both ends.",
    )
