"""The sessions of a daemon, on disk, for its successor after a crash.

It is written before memory moves out or a process is suspended (the successor must find an
interrupted operation) and soon after anything else changes. It says *which processes to ask about*;
the driver says their state. So a move back waits for no write: what is out or suspended is in the
file already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog
from msgspec import Meta

from kiwi_core.config import DEFAULTS
from kiwi_core.gpu.processes import ProcessRef, boot_id
from kiwi_core.states import AntiThrash, GateOnly, Priority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.units import OpId, SessionId

log = structlog.get_logger(__name__)

VERSION = 1

DELAY_S = 0.05
"""Delay with which grants and ends reach the file. It is written at once before memory goes out."""

OPS_AHEAD = 64
"""Operations that may begin before the file is written again. It tells the successor to skip their
numbers, since no number may be used twice."""

SHARE = 20
"""The delay is at least this many times the processor time of the last write, so that the roster of
a thousand sessions takes a small share of the loop."""

_Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Quantum = Annotated[int, Meta(ge=DEFAULTS.tq_min_ns, le=DEFAULTS.tq_max_ns)]


class RosterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """``in_burst``: it was running or suspended in a burst. ``client_burst`` is the client's number
    of that burst; ``None``: the same. ``priority`` was set live, for this session alone.
    ``kept_out`` names who keeps it out of the GPU."""

    session: str
    pid: _Pid
    start_ticks: _Count
    uid: _Count
    name: str = ""
    folder: str = ""
    kernel_id: str = ""
    burst: _Count = 0
    client_burst: _Count | None = None
    by_link: bool = False
    in_burst: bool = False
    priority: Priority | None = None
    guarded: bool = True
    kept_out: str = ""


class RosterLink(msgspec.Struct, frozen=True, kw_only=True):
    """A process with the preloaded library. ``out``: its memory is out, or may be about to go.
    ``image`` is the program that it ran at last contact. ``objection``: why the driver moves its
    memory; ``None``: its library does."""

    pid: _Pid
    start_ticks: _Count
    uid: _Count
    session: str
    paged_out_bytes: _Count
    name: str = ""
    image: str = ""
    out: bool = True
    objection: GateOnly | None = None

    @property
    def ref(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_ticks)


class RosterObjection(msgspec.Struct, frozen=True, kw_only=True):
    """Why the library of a program must not own from its next start on. ``version`` is the Kiwi
    that learnt it, ``unix_s`` when. Unlike process ids this outlives the machine's boot."""

    program: str
    why: GateOnly
    version: str
    unix_s: float


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """``footprints``: ``[pid, start_ticks, bytes]`` of each process that is paged out or about to
    be, with its GPU memory, which the driver does not report afterwards. ``beside``: ``[pid,
    start_ticks, free_bytes, hidden_bytes]`` of each, see ``room.PageOutReading``. ``off``: ``[pid,
    start_ticks, uid]`` of each process with the library whose session has left Kiwi.
    """

    version: int = VERSION
    boot_id: str = ""
    next_op: Annotated[int, Meta(ge=1, lt=1 << 62)] = 1
    tq_ns: _Quantum | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    sessions: list[RosterEntry] = []
    footprints: list[tuple[_Pid, _Count, _Count]] = []
    beside: list[tuple[_Pid, _Count, _Count, _Count]] = []
    links: list[RosterLink] = []
    off: list[tuple[_Pid, _Count, _Count]] = []
    objections: list[RosterObjection] = []


class RosterFile:
    """Reads and atomically writes the roster. Logs a full disk once, and goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = b""
        self._failing = False

    def read(self) -> Roster:
        """Return the last one written. Return an empty one if there is none, if it is damaged, or
        if the machine was restarted since (its process ids mean nothing now)."""
        try:
            roster = msgspec.json.decode(self._path.read_bytes(), type=Roster)
        except FileNotFoundError:
            return Roster()
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning(
                "roster unreadable, starting without it", path=str(self._path), why=str(error)
            )
            return Roster()
        if roster.version != VERSION or roster.boot_id != boot_id():
            return Roster(next_op=roster.next_op, objections=roster.objections)
        return roster

    def write(self, roster: Roster) -> None:
        data = msgspec.json.encode(roster)
        if data == self._last:
            return
        temporary = self._path.with_suffix(".new")
        try:
            # No fsync: a power cut ends the processes in it, too.
            temporary.write_bytes(data)
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._failing:
                log.error("roster not written; a crash now could not be recovered", why=str(error))
            self._failing = True
            return
        self._failing = False
        self._last = data

    def forget(self) -> None:
        """Write at the next ``write`` in any case: the file may be gone."""
        self._last = b""

    @property
    def failing(self) -> bool:
        return self._failing


class RosterSaver:
    """Writes the roster before anything goes out or is suspended, and soon after anything else
    changed. ``gather`` returns the current state."""

    def __init__(self, file: RosterFile, gather: Callable[[], Roster]) -> None:
        self._file = file
        self._gather = gather
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._delay_s = DELAY_S
        self._written = Roster()
        """What the file has; empty if it may have less."""

    @property
    def failing(self) -> bool:
        return self._file.failing

    def save(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        began_s = time.thread_time()
        roster = self._gather()
        self._file.write(roster)
        self._written = Roster() if self._file.failing else roster
        self._delay_s = max(DELAY_S, SHARE * (time.thread_time() - began_s))

    def save_for(self, op: OpId, session: SessionId) -> None:
        """Write at once if operation ``op`` on ``session`` needs it: without a write, a successor
        would not find the session, or would use the number again."""
        found = any(entry.session == session for entry in self._written.sessions)
        if not found or op >= self._written.next_op:
            self.save()

    def save_anew(self) -> None:
        """Write even if nothing has changed, because the file may be gone."""
        self._file.forget()
        self.save()

    def after(self, _step: Step) -> None:
        self.save_soon()

    def save_soon(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(self._delay_s, self.save)
