"""The connections to a Unix socket, as the kernel lists them (sock_diag(7), which ``ss`` also
uses)."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 20, 2, 3
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NAME, _PEER = 0, 2  # UNIX_DIAG_NAME, UNIX_DIAG_PEER
_SHOW_NAME_AND_PEER = 0x1 | 0x4
_ALL_STATES = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBHIII8x")  # unix_diag_req
_ANSWER = struct.Struct("=BBBBI8x")  # unix_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # nlattr
_READ_BYTES = 1 << 16


def connected(path: Path) -> Counter[int]:
    """Return the number of connections that each process has to the socket at ``path``. Processes
    that this one may not look into are left out, and so are sockets that no process has."""
    ends = {peer for name, peer in _sockets() if name == os.fsencode(path)}
    return Counter(pid for pid, inode in set(_owned()) if inode in ends)


def _owned() -> Iterator[tuple[int, int]]:
    """Yield the processes with the inodes of their sockets."""
    for directory in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # it has ended
            for entry in os.scandir(directory):
                with suppress(OSError):
                    kind, _, inode = os.readlink(entry.path).partition(":")
                    if kind == "socket":
                        yield int(directory.parent.name), int(inode.strip("[]"))


def _sockets() -> Iterator[tuple[bytes, int]]:
    """Yield the name of each Unix socket (empty: none) with the inode of the socket it is connected
    to (0: none)."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_NAME_AND_PEER)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.sendall(header + request)
        while True:
            for kind, body in _messages(asking.recv(_READ_BYTES)):
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(
                        number, f"the kernel does not list sockets: {os.strerror(number)}"
                    )
                found = dict(_attributes(body[_ANSWER.size :]))
                (peer,) = struct.unpack("=I", found.get(_PEER, bytes(4)))
                yield found.get(_NAME, b"").rstrip(b"\0"), peer


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
