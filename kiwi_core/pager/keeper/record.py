"""What is on disk about a keeper: its socket, and the record of a program that is not in the GPU.

The record is written before a move begins and goes when the memory is back, so it decides how a
program comes back, whatever a daemon was told meanwhile; and it outlives the keeper: a program that
is out, has a record, and no living keeper, has lost its memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core.errors import NO_MORE, GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef, boot_id
from kiwi_core.pager.keeper.messages import Way

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS: Final = ("sock", "record", "new", "lock", "log")

CONNECT_WITHIN_S: Final = 2.0
"""A keeper that runs accepts at once. One that is stopped never does, and once its queue is full a
connection that waits for its turn would wait for ever."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``way`` is never "in": then there is no record."""

    boot_id: str
    keeper_pid: int
    keeper_start_ticks: int
    way: Way
    out_bytes: int = 0

    @property
    def keeper_lives(self) -> bool:
        return processes.alive(ProcessRef(self.keeper_pid, self.keeper_start_ticks))


class Place:
    """The files of one program's keeper, in a directory of this user's own."""

    def __init__(self, directory: Path, ref: ProcessRef) -> None:
        self.directory, self.ref = directory, ref
        self._name = f"{ref.pid}-{ref.start_ticks}"
        self._lock = threading.Lock()
        self._left = False

    def file(self, kind: str) -> Path:
        return self.directory / f"{self._name}.{kind}"

    def read(self) -> Record | None:
        """``None``: it is in the GPU, as far as any keeper goes. A record that is damaged is one of
        a keeper that is gone. Raises ``GpuError("no-record")`` where nobody can say."""
        try:
            data = self.file("record").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in NO_MORE:
                raise GpuError(
                    "no-record", f"{self.file('record')} cannot be read: {error.strerror}."
                ) from error
            return _UNREADABLE
        try:
            record = msgspec.json.decode(data, type=Record)
        except (ValueError, RecursionError):
            return _UNREADABLE
        return record if record.boot_id == boot_id() else None

    def write(self, way: Way, out_bytes: int) -> None:
        """The calling process is the keeper. Raises ``OSError``; what was there is there still."""
        own = processes.stat_of(os.getpid())
        record = Record(
            boot_id=boot_id(),
            keeper_pid=os.getpid(),
            keeper_start_ticks=own.start_ticks if own is not None else 0,
            way=way,
            out_bytes=out_bytes,
        )
        fresh = self.file("new")
        with self._lock:
            if self._left:
                return
            try:
                fresh.write_bytes(msgspec.json.encode(record))
                os.replace(fresh, self.file("record"))
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise

    def leave(self) -> None:
        """The program has ended, or nothing is kept: no file of it remains, or comes again."""
        with self._lock:
            self._left = True
        self.remove(*KINDS)

    def remove(self, *kinds: str) -> None:
        for kind in kinds:
            with contextlib.suppress(OSError):
                self.file(kind).unlink(missing_ok=True)

    def listen(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.remove("sock")
        with self._short("sock") as path:
            sock.bind(path)
        sock.listen()
        return sock

    def connect(self) -> socket.socket:
        """A connection on which reading and writing may take any time. Raises ``OSError``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_WITHIN_S)
        try:
            with self._short("sock") as path:
                sock.connect(path)
            sock.settimeout(None)
        except OSError:
            sock.close()
            raise
        return sock

    @contextlib.contextmanager
    def _short(self, kind: str) -> Iterator[str]:
        """A path that fits into a socket's address, however deep the directory is."""
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{self._name}.{kind}"
        finally:
            os.close(directory)


_UNREADABLE: Final = Record(boot_id="", keeper_pid=0, keeper_start_ticks=0, way="stuck")


def places(directory: Path) -> list[Place]:
    """Those that have, or had, a keeper."""
    names = {path.stem for path in directory.glob("*-*.*") if path.suffix[1:] in KINDS}
    found = []
    for name in sorted(names):
        pid, _, ticks = name.partition("-")
        if pid.isdigit() and ticks.isdigit():
            found.append(Place(directory, ProcessRef(int(pid), int(ticks))))
    return found
