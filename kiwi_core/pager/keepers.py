"""The keepers of one GPU as a daemon sees them: starting, finding, asking and ending them.

Nothing about them is remembered that matters: a daemon that comes after a crash finds their sockets
and records in the directory, and asks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core import interpreter
from kiwi_core.errors import GpuError, PeerError
from kiwi_core.gpu import processes
from kiwi_core.pager.keeper import messages
from kiwi_core.pager.keeper.messages import Aim, End, Failed, In, Look, Out, Reserve, State, Trim
from kiwi_core.pager.keeper.record import Place, places
from kiwi_core.units import MIB

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.keeper.messages import Reply, Request
    from kiwi_core.pager.keeper.record import Record

LOOK_WITHIN_S: Final = 2.0
"""For what a keeper answers at any time."""

ANSWER_WITHIN_S: Final = 10.0
"""For what is no move: a context may be in the making, or a piece of RAM."""

TOUCHED_BYTES_PER_S: Final = 512 * MIB
"""Slowest believable RAM to come by: adds bytes / this to the time that a keeper gets for it."""

_LOOK_AGAIN_S: Final = 0.02
_GONE: Final = "keeper-gone"


class Keepers:
    """``library`` is the preloaded library's file, for its hash; keepers that are started without
    copy everything each time. All calls may come from any thread, and raise ``GpuError`` where a
    keeper does not answer or says no."""

    def __init__(self, directory: Path, gpu_uuid: str, library: str = "") -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._gpu_uuid = gpu_uuid
        self.library = library
        self._lock = threading.Lock()
        self._started: dict[ProcessRef, subprocess.Popen[bytes]] = {}
        self._states: dict[ProcessRef, State] = {}
        self._sweep()

    # --- who there is ---------------------------------------------------------------------------

    def record(self, ref: ProcessRef) -> Record | None:
        return Place(self._directory, ref).read()

    def forget(self, ref: ProcessRef) -> None:
        """The record of a keeper that is gone, of a program that is in the GPU."""
        Place(self._directory, ref).remove("record")

    def states(self) -> dict[ProcessRef, State]:
        """What each living keeper said last."""
        with self._lock:
            return {ref: state for ref, state in self._states.items() if processes.alive(ref)}

    def pids(self) -> set[int]:
        """Of the keepers themselves."""
        return {state.keeper_pid for state in self.states().values()}

    def look(self) -> None:
        """Asks all that there are; also so that they know that somebody lives."""
        self._sweep()
        for place in places(self._directory):
            with contextlib.suppress(GpuError):
                self._ask(place.ref, Look(), LOOK_WITHIN_S)
        self._reap()

    # --- one ------------------------------------------------------------------------------------

    def ready(self, ref: ProcessRef, within_s: float) -> State:
        """Starts one if there is none, and waits until it answers. Raises ``GpuError``."""
        until_s = time.monotonic() + within_s
        started = False
        while True:
            try:
                return self._ask(ref, Look(), LOOK_WITHIN_S)
            except GpuError:
                if time.monotonic() >= until_s or not processes.alive(ref):
                    raise
                if not started:
                    self._start(ref)
                    started = True
            time.sleep(_LOOK_AGAIN_S)

    def aim(self, ref: ProcessRef, size_bytes: int) -> None:
        self._ask(ref, Aim(size_bytes))

    def reserve(self, ref: ProcessRef, size_bytes: int) -> State:
        """May take as long as that much RAM takes to be touched."""
        within_s = ANSWER_WITHIN_S + size_bytes / TOUCHED_BYTES_PER_S
        return self._ask(ref, Reserve(size_bytes), within_s)

    def trim(self, ref: ProcessRef) -> State:
        return self._ask(ref, Trim())

    def end(self, ref: ProcessRef) -> None:
        self._ask(ref, End())
        self._silent(ref)

    def out(self, ref: ProcessRef) -> State | Failed:
        """Blocks until it is out. Raises ``GpuError`` where nobody can say whether it began."""
        try:
            sock = self._connected(ref)
        except GpuError as error:
            return Failed(error.code, error.message)
        return self._move(ref, sock, Out())

    def bring_in(self, ref: ProcessRef) -> State | Failed:
        return self._move(ref, self._connected(ref), In())

    # --- inside ---------------------------------------------------------------------------------

    def _move(self, ref: ProcessRef, sock: socket.socket, request: Request) -> State | Failed:
        with sock:
            reply = self._say(ref, sock, request)
        self._heard(ref, reply)
        return reply

    def _ask(self, ref: ProcessRef, request: Request, within_s: float = ANSWER_WITHIN_S) -> State:
        with self._connected(ref) as sock:
            sock.settimeout(within_s)
            reply = self._say(ref, sock, request)
        self._heard(ref, reply)
        if not isinstance(reply, State):
            raise reply.error()
        if (reply.pid, reply.start_ticks) != (ref.pid, ref.start_ticks):
            raise GpuError("wrong-keeper", f"The keeper of {ref.pid} speaks for {reply.pid}.")
        return reply

    def _connected(self, ref: ProcessRef) -> socket.socket:
        try:
            return Place(self._directory, ref).connect()
        except OSError as error:
            self._silent(ref)
            raise _gone(ref, error.strerror or str(error)) from error

    def _say(self, ref: ProcessRef, sock: socket.socket, request: Request) -> Reply:
        try:
            messages.send(sock, request)
            return messages.receive_reply(sock)
        except (OSError, PeerError) as error:
            self._silent(ref)
            raise _gone(ref, str(error)) from error

    def _silent(self, ref: ProcessRef) -> None:
        """Until it answers again there is no keeper."""
        with self._lock:
            self._states.pop(ref, None)

    def _heard(self, ref: ProcessRef, reply: Reply) -> None:
        if isinstance(reply, State):
            with self._lock:
                self._states[ref] = reply

    def _start(self, ref: ProcessRef) -> None:
        with self._lock:
            running = self._started.get(ref)
            if running is not None and running.poll() is None:
                return
            place = Place(self._directory, ref)
            options = {
                "pid": ref.pid, "start_ticks": ref.start_ticks, "gpu_uuid": self._gpu_uuid,
                "directory": str(self._directory), "library": self.library,
            }  # fmt: skip
            # It is nobody's child in the sense that matters: nothing that is sent to a terminal's
            # session, or to the daemon, reaches it. It is no program under Kiwi either.
            environment = {**os.environ, "KIWI_DISABLE": "1"}
            environment.pop("KIWI_RUN_SESSION", None)
            try:
                with place.file("log").open("ab") as log:
                    self._started[ref] = subprocess.Popen(
                        interpreter.module(
                            "kiwi_core.pager.keeper", msgspec.json.encode(options).decode()
                        ),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                        env=environment, cwd=interpreter.DIRECTORY,
                    )  # fmt: skip
            except OSError as error:
                raise GpuError(
                    "no-keeper", f"A keeper for process {ref.pid} cannot be started: {error}."
                ) from error

    def _sweep(self) -> None:
        """What keepers that were killed have left of programs that have ended."""
        for place in places(self._directory):
            if not processes.alive(place.ref):
                place.leave()
        with self._lock:
            for ref in [ref for ref in self._states if not processes.alive(ref)]:
                del self._states[ref]

    def _reap(self) -> None:
        with self._lock:
            for ref in [ref for ref, one in self._started.items() if one.poll() is not None]:
                del self._started[ref]


def _gone(ref: ProcessRef, why: str) -> GpuError:
    return GpuError(_GONE, f"The keeper of process {ref.pid} does not answer: {why}")
