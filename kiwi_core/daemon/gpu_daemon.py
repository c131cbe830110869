"""The daemon of one GPU: it claims the GPU, runs until nobody needs it, and ends cleanly."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.client.directory import LEFT_SUFFIX
from kiwi_core.daemon.assembly import Assembly
from kiwi_core.daemon.base.address import Address
from kiwi_core.daemon.base.admission import Door
from kiwi_core.daemon.base.claim import GpuClaim
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.directories import make_placing_lock, prepare_directory, sockets_mode
from kiwi_core.daemon.base.sockets import OneDaemonLock, alone
from kiwi_core.daemon.base.tasks import endless
from kiwi_core.daemon.roster.roster import RosterFile
from kiwi_core.daemon.sessions.recovery import recover
from kiwi_core.daemon.sessions.shutdown import everybody_back
from kiwi_core.daemon.supervised import READY, UNUSED, USED
from kiwi_core.errors import CallerError
from kiwi_core.pager.api import ProcessRef
from kiwi_core.pager.footprints import PageOutReading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.base.machine import Machine
    from kiwi_core.daemon.engine.operations import OperationRunner
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.options import ChildOptions
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.sessions.libraries import PreloadedLibraries
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

ACCOUNTS_WITHIN_S = 2.0
"""Time to write the last usage sums when a daemon ends."""

LOOK_EVERY_S: Final = 1.0
"""Interval of looks whether anybody needs the daemon: each is a few comparisons, and a second more
or less does not matter."""


class GpuDaemon:
    def __init__(self, options: ChildOptions, machine: Machine) -> None:
        self._options = options
        self._machine = machine
        self._stop = asyncio.Event()
        self._lacks_state = False
        """True while the state directory is gone and cannot be made again."""
        self.ended_unused = False
        """True if it ends because nobody needs it."""

    def stop(self) -> None:
        self._stop.set()

    def end_if_unused(self) -> None:
        """Stop if nobody needs this daemon. Called when the supervisor allows it."""
        if not self._stop.is_set() and self._unused.end():
            log.info("nobody needs this daemon", since_s=self._unused.after_s)
            self.ended_unused = True
            self.stop()

    async def run(self) -> None:
        sockets, state = Path(self._options.sockets), Path(self._options.state)
        path = sockets / f"{self._options.gpu_uuid}.sock"
        claim = GpuClaim(self._options.gpu_uuid, path)
        self._prepare_directories()
        lock = OneDaemonLock(path.with_suffix(".lock"))
        if not await alone(claim, lock, path, self._stop):
            return
        self._note_left({})
        file = RosterFile(state / f"{self._options.gpu_uuid}.roster")
        roster = file.read()
        parts = self._parts = Assembly(self._options, self._machine, file, roster)
        parts.links.restore(roster)
        parts.ownership.restore(roster.objections)
        parts.pager.import_footprints(
            {ProcessRef(pid, ticks): size for pid, ticks, size in roster.footprints}
        )
        parts.pager.import_page_out_readings(
            {ProcessRef(pid, ticks): PageOutReading(*both) for pid, ticks, *both in roster.beside}
        )
        await recover(roster, parts.pager, parts.registry, parts.found_again)
        parts.roster.save()  # a crash after this point must find the settings
        config = self._options.asked.config
        address = Address(
            path,
            lock,
            lambda sock: Door(
                sock, parts.admission, lambda: Connection(parts.router, config, parts.turns)
            ),
            complete=lambda: os.path.isdir(state),
            restored=self._make_files_again,
            taken=self.stop,
        )
        address.open()

        def is_reachable() -> bool:
            """Return whether clients find this daemon. A starting daemon asks; it may have replaced
            the emulated GPUs' state, so put that back first."""
            self._options.keep_emulated_state()
            return not self._stop.is_set() and address.is_found()

        claim.serve(is_reachable)
        self._unused = Unused(
            self._options.asked.end_unused_after_s, address, parts.connections, parts.registry,
            parts.links, parts.core.operations, parts.libraries,
        )  # fmt: skip
        tasks = [
            endless(address.keep(), "keeping the address"),
            endless(parts.observer.run(), "observing"),
            endless(parts.gauges.run(), "reading the gauges"),
            endless(parts.self_proof.run(), "proving this machine"),
            endless(self._unused.watch(), "looking whether it is unused"),
        ]
        log.info("ready", gpu=self._options.gpu_uuid, socket=str(path))
        # What exists now stays until the daemon ends. A full collection would look through it for
        # ten milliseconds and more, and every client would wait.
        gc.freeze()
        _tell_supervisor(READY)
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        address.close()
        await self._leave()
        claim.close()

    # --- its directories ------------------------------------------------------------------------

    def _prepare_directories(self) -> None:
        prepare_directory(Path(self._options.sockets), sockets_mode())
        make_placing_lock(Path(self._options.sockets))
        prepare_directory(Path(self._options.state))

    def _make_files_again(self) -> None:
        """Write the files beside the socket again: they are gone, too, and a crash needs them."""
        self._options.keep_emulated_state()
        try:
            self._prepare_directories()
        except CallerError as error:
            if not self._lacks_state:  # logged once; it is tried again every second
                log.error("the state directory cannot be made again", why=str(error))
            self._lacks_state = True
            return
        self._lacks_state = False
        self._parts.roster.save_anew()
        self._parts.journal.begin_again()

    # --- the end --------------------------------------------------------------------------------

    async def _leave(self) -> None:
        parts = self._parts
        parts.leave()
        parts.router.close_all(but_not_free=True)
        left = await everybody_back(
            parts.core, parts.pager, parts.registry, self._options.asked.config
        )
        for session, why in left.items():
            parts.members.notify_left_out(session, why)
        self._note_left(left)
        parts.router.close_all()
        for record in parts.registry:
            if record.id not in left:
                parts.registry.remove(record)
        parts.roster.save()
        await parts.bookkeeper.close(ACCOUNTS_WITHIN_S)
        parts.journal.close()
        await self._machine.movers.close()
        log.info("ended", left_behind=len(left))

    def _note_left(self, left: Mapping[SessionId, str]) -> None:
        """Write for ``kiwi stop`` whose memory stays in system RAM; remove the last such note."""
        note = (Path(self._options.sockets) / self._options.gpu_uuid).with_suffix(LEFT_SUFFIX)
        try:
            note.unlink(missing_ok=True)
            if left:
                records = (record for record in self._parts.registry if record.id in left)
                text = "\n".join(f"{one.name} ({left[one.id]})" for one in records)
                note.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            log.warning("cannot be noted", path=str(note), why=error.strerror)


@dataclass(eq=False, repr=False)
class Unused:
    """Finds out whether anybody needs this daemon: one that a notebook started ends when nobody
    does. ``after_s`` comes with ``--end-unused-after``; where a notebook or ``kiwi run`` starts the
    daemon, it is ``Config.unused_ns``. 0: the daemon never counts as unused.

    Each connection restarts the time. So the daemon stays for at least ``after_s`` after a client
    has connected.
    """

    after_s: float
    _address: Address
    _connections: Connections
    _registry: SessionRegistry
    _links: Links
    _operations: OperationRunner
    _libraries: PreloadedLibraries
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _since_s: float = 0.0
    _visits: int = -1
    _word: str = USED

    async def watch(self) -> None:
        """Look at intervals, and tell the supervisor each change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look()

    def end(self) -> bool:
        """Stop accepting connections if nobody needs this daemon, and return whether that is so.
        The next program that wants the GPU starts another daemon."""
        if not self._look():
            return False
        self._address.close(comes_back=False)
        return True

    def _look(self) -> bool:
        """Return whether nobody has needed the daemon for ``after_s``: nobody came and went since
        the last look, either. Memory that is out belongs to a session, or to what one has left
        behind."""
        if (
            self._connections.taken != self._visits
            or self._connections.open
            or any(True for _ in self._registry)
            or self._links
            or self._operations.running
            or self._libraries.releasing
            or self._address.is_awaited()
        ):
            self._visits, self._since_s = self._connections.taken, self._loop.time()
        is_unused = self._loop.time() - self._since_s >= self.after_s > 0
        word = UNUSED if is_unused else USED
        if word != self._word:
            self._word = word
            _tell_supervisor(word)
        return is_unused


def _tell_supervisor(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
