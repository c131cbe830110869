"""The record of one daemon: its last status, and its GPU's history across its restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kiwi_jupyter.server_ext import to_rest
from kiwi_jupyter.server_ext.diff import hardly_moved
from kiwi_jupyter.server_ext.model import Gpu, History

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.errors import KiwiError
    from kiwi_core.wire.messages import GpuStatus, HistoryEntry
    from kiwi_jupyter.server_ext.daemon_follower import DaemonLost, StatusReceived

SAME_RUN_S: Final = 5.0
"""Two statuses of one process agree on its start time to within this, for their transmission time
and adjustments of the clock. A process id alone may be reused.
"""


class GpuRecord:
    """The record. ``DaemonConnections`` updates it in the event loop."""

    def __init__(self) -> None:
        self.status: GpuStatus | None = None
        self.received_at = 0.0
        self.error: KiwiError | None = None
        """Why the daemon does not answer; ``None`` while it does."""
        self.gone_at: float | None = None
        """Time at which it removed its socket."""
        self.stale = False
        """Nobody has listened since its last status."""
        self._run = _Run(0, 0.0)
        self._entries: dict[str, History] = {}
        self._kernels: dict[str, str] = {}
        """Kernel ids of this user's sessions that the history names."""
        self._history: list[History] | None = None
        """The last answer; ``None``: something changed since."""
        self._paths: Mapping[str, str] = {}

    def handle_status(self, received: StatusReceived) -> None:
        run = _Run(received.status.daemon_pid, received.at - received.status.uptime_s)
        if not run.is_like(self._run):
            self._end_open_entries()
            self._run = run
        self.status, self.received_at = received.status, received.at
        self.error = self.gone_at = None
        self.stale = False
        if received.history is not None:
            for session_id, session in received.history.sessions.items():
                if session.mine and session.kernel_id:
                    self._kernels[session_id] = session.kernel_id
            for entry in received.history.entries:
                named = received.history.sessions.get(entry.session)
                new = self._entry(entry, named.name if named else "", received.at)
                self._entries[new.id] = new
            self._history = None

    def handle_loss(self, lost: DaemonLost) -> None:
        self.error = lost.error
        self.stale = False
        self.gone_at = lost.at if lost.gone else None

    # --- history --------------------------------------------------------------------------------

    def _entry(self, entry: HistoryEntry, name: str, at: float) -> History:
        id_ = f"{self._run.name}-{entry.id}"
        began_at = at - entry.began_ago_s
        ended_at = None if entry.ended_ago_s is None else at - entry.ended_ago_s
        if (before := self._entries.get(id_)) is not None:
            began_at = before.began_at if hardly_moved(began_at, before.began_at) else began_at
            ended_at = before.ended_at if hardly_moved(ended_at, before.ended_at) else ended_at
        path = self._path(entry.session)
        return History(
            id=id_,
            session=entry.session,
            name=to_rest.name_of(path, name),
            kind=entry.kind,
            began_at=began_at,
            ended_at=ended_at,
            bytes_moved=entry.bytes_moved,
            ok=entry.ok,
            hinted=entry.hinted,
            path=path,
        )

    def _path(self, session: str) -> str | None:
        return self._paths.get(self._kernels.get(session, ""))

    def _end_open_entries(self) -> None:
        """End open entries at the last status of a killed daemon, which reported no end."""
        for id_, entry in self._entries.items():
            if entry.ended_at is None:
                ended_at = max(entry.began_at, self.received_at)
                self._entries[id_] = replace(entry, ended_at=ended_at)
                self._history = None

    def _history_since(self, since: float, paths: Mapping[str, str]) -> list[History]:
        if paths is not self._paths:
            self._paths = paths
            for id_, entry in self._entries.items():
                if (path := self._path(entry.session)) != entry.path:
                    name = to_rest.name_of(path, entry.name)
                    self._entries[id_] = replace(entry, path=path, name=name)
                    self._history = None
        if self._history is None:
            self._entries = {
                id_: entry
                for id_, entry in self._entries.items()
                if entry.ended_at is None or entry.ended_at >= since
            }
            there = {entry.session for entry in self._entries.values()}
            self._kernels = {k: v for k, v in self._kernels.items() if k in there}
            self._history = list(self._entries.values())
        return self._history

    # --- for readers ----------------------------------------------------------------------------

    def gpu(self, *, paths: Mapping[str, str], history_since: float, may_set: bool) -> Gpu | None:
        """Return ``None`` before the first status. ``paths`` is a new object after a change."""
        if self.status is None:
            return None
        return to_rest.gpu_of(
            self.status,
            self.received_at,
            paths=paths,
            history=self._history_since(history_since, paths),
            may_set=may_set,
            problem=None if self.error is None else to_rest.problem_of(self.error),
        )


class _Run:
    """One life of a daemon."""

    def __init__(self, pid: int, began_at: float) -> None:
        self._pid = pid
        self._began_at = began_at
        self.name = f"{pid}t{began_at:.0f}"

    def is_like(self, other: _Run) -> bool:
        return self._pid == other._pid and abs(self._began_at - other._began_at) < SAME_RUN_S
