"""Compare the daemon's status with the driver's books, again and again while a test runs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pagers import RUNNING
from patience import PATIENCE_S

from kiwi_core.states import SessionState

if TYPE_CHECKING:
    from daemon import Daemon
    from pagers import PagerUnderTest

    from kiwi_core.wire.messages import GpuStatus
    from kiwi_emulator import Books

MUST_BE_KNOWN = frozenset({SessionState.PAGED_OUT, SessionState.SUSPENDED})
QUEUED = frozenset({SessionState.WAITING, SessionState.SUSPENDED})


class TruthWatcher(threading.Thread):
    """A thread that compares; ``lies`` has the differences, ``seen`` all states that it saw.

    The daemon and the driver cannot be read at the same moment: only readings of the driver with
    the same status before and after count.
    """

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="truth", daemon=True)
        self._daemon = daemon
        self._client = daemon.client()
        self._stopping = threading.Event()
        self.lies: list[str] = []
        self.seen: set[SessionState] = set()
        self.compared = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> TruthWatcher:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping.set()
        self.join(PATIENCE_S)
        self._client.close()

    def assert_right(self) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.lies, "\n".join(dict.fromkeys(self.lies))
        assert self.compared, "nothing stood still for two looks"

    def run(self) -> None:
        try:
            before = self._client.status()
            while not self._stopping.is_set():
                books = self._daemon.books()
                after = self._client.status()
                if _moment(before) == _moment(after):
                    self.compared += 1
                    self.seen |= {session.state for session in after.sessions}
                    self.lies += lies(after, books, self._daemon.pager)
                before = after
                time.sleep(0.02)
        except BaseException as error:  # noqa: BLE001 - told by the test's thread
            self.failure = error


def _moment(status: GpuStatus) -> object:
    return [
        (s.id, s.state, s.suspensions, s.resident_bytes, s.paged_out_bytes) for s in status.sessions
    ]


def lies(status: GpuStatus, books: Books, pager: PagerUnderTest) -> list[str]:
    """Return the claims of ``status`` that are false, or that contradict each other."""
    found = []
    for session in status.sessions:
        process = books.process(session.pid)
        if process is None:
            if session.state in MUST_BE_KNOWN:
                found.append(f"{session.name} is {session.state}, the driver does not know it")
            continue
        out = session.paged_out_bytes > 0
        gone = pager.is_out(process)
        right = {
            SessionState.RUNNING: process.state == RUNNING and not out,
            SessionState.IDLE: process.state == RUNNING and not out,
            SessionState.PAGED_OUT: gone and out,
            SessionState.SUSPENDED: gone if out else pager.is_held(process),
        }.get(session.state, True)
        if not right:
            found.append(f"{session.name} is {session.state} (out: {out}), driver: {process}")
    holders = {s.id for s in status.sessions if s.state is SessionState.RUNNING}
    stopping = {s.id for s in status.sessions if s.state is SessionState.PAGING_OUT}
    if not holders <= set(status.holders) <= holders | stopping:
        found.append(f"holders {status.holders}, running {holders}, being stopped {stopping}")
    if status.scheduler.serialised and len(status.holders) > 1:
        found.append(f"serialised with the holders {status.holders}")
    queue = [entry.session for entry in status.queue]
    if [entry.position for entry in status.queue] != list(range(1, len(queue) + 1)):
        found.append(f"positions {[entry.position for entry in status.queue]}")
    must_queue = {s.id for s in status.sessions if s.state in QUEUED}
    if not must_queue <= set(queue):
        found.append(f"queue {queue} without {must_queue - set(queue)}")
    return found
