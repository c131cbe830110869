"""The connections to daemons, the documents and the state feed behind one interface for the
handlers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kiwi_core import __version__
from kiwi_core.errors import KiwiError
from kiwi_jupyter.server_ext.daemon_connections import DaemonConnections
from kiwi_jupyter.server_ext.model import Gpu, Problem, Server
from kiwi_jupyter.server_ext.state_feed import StateFeed
from kiwi_jupyter.server_ext.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from logging import Logger
    from pathlib import Path

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus
    from kiwi_jupyter.server_ext.bare_kernels import BareKernels
    from kiwi_jupyter.server_ext.documents import Documents

_T = TypeVar("_T")

DISABLED = Problem(
    code="disabled",
    message="Kiwi is switched off here: the notebooks of this Jupyter server do not take turns.",
    remedy="Start the server without KIWI_DISABLE in its environment to switch it on.",
)

DOCUMENTS_EVERY_S = 1.0
"""Interval of checks for renamed notebooks."""


class KiwiService:
    """The service; lives in the server's event loop. ``interval_s``: least time between two deltas.
    ``disabled``: its kernels run without Kiwi. Other programs' use of the GPU is shown all the
    same, but no daemon is started.
    """

    def __init__(
        self,
        directory: Path,
        documents: Documents,
        bare_kernels: BareKernels,
        log: Logger,
        *,
        autostarts: bool,
        may_set: bool,
        interval_s: float,
        history_s: float,
        disabled: bool = False,
    ) -> None:
        self._log = log
        self._documents = documents
        self._bare_kernels = bare_kernels
        self._interval_s = interval_s
        self._history_s = history_s
        self._may_set = may_set
        self._disabled = disabled
        self.daemons = DaemonConnections(
            directory,
            autostarts=autostarts and not disabled,
            changed=self._changed,
            watched=lambda: self.feed.subscribers > 0,
        )
        self.feed = StateFeed(self._server())
        self._published_s = 0.0
        self._renamed: dict[tuple[int, str], str] = {}
        """The path that was last said of a session, by the daemon's pid and the session's id."""
        self._publishing: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Take note that somebody looks. Return when the feed's state is up to date, as far as
        possible.
        """
        self.daemons.look()
        if self._reading is None:
            self._reading = asyncio.create_task(self._keep_reading())
            await self._read_documents()
        await self.daemons.settled()
        self._publish()

    def gpus(self) -> list[GpuStatus]:
        """Return the known GPUs, as their daemons described them last."""
        known = [record.status for record in self.daemons.records.values() if record.status]
        return sorted(known, key=lambda gpu: (gpu.index, gpu.uuid))

    async def ask(self, uuid: str, question: Callable[[Client], _T]) -> _T:
        """Ask the daemon of GPU ``uuid`` ``question``, in a thread. Raise ``KiwiError``."""
        self.daemons.look()
        await self.daemons.settled()
        client = self.daemons.client(uuid)
        return await in_thread(lambda: question(client), "kiwi request")

    async def settled(self) -> None:
        """Do the same as ``ready`` for a look that no user makes: start no daemon, read no
        documents.
        """
        self.daemons.look(starts=False)
        await self.daemons.settled()

    async def close(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
        if self._reading is not None:
            self._reading.cancel()
        await self.daemons.close()

    # --- publishing -----------------------------------------------------------------------------

    def _changed(self) -> None:
        """Publish soon: at once after a quiet time, otherwise at the stream's rate."""
        if self._publishing is None:
            wait_s = self._published_s + self._interval_s - time.monotonic()
            loop = asyncio.get_running_loop()
            self._publishing = loop.call_later(max(0.0, wait_s), self._publish)

    def _publish(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        self._published_s = time.monotonic()
        since = time.time() - self._history_s
        gpus: dict[str, tuple[Gpu, float]] = {}
        for record in self.daemons.records.values():
            gpu = record.gpu(
                paths=self._documents.paths, history_since=since, may_set=self._may_set
            )
            if gpu is not None:
                gpus[gpu.uuid] = gpu, record.received_at
        self.feed.publish(gpus, self._server())

    def _server(self) -> Server:
        return Server(
            version=__version__,
            may_set=self._may_set,
            history_s=self._history_s,
            problem=DISABLED if self._disabled else self.daemons.problem(),
            bare_kernels=dict(self._bare_kernels.found),
        )

    # --- documents ------------------------------------------------------------------------------

    async def _keep_reading(self) -> None:
        while self.daemons.is_open:
            await asyncio.sleep(DOCUMENTS_EVERY_S)
            if await self._read_documents():
                self._changed()
            await self._rename_sessions()
        self._reading = None

    async def _rename_sessions(self) -> None:
        """Tell the daemons of notebooks that were renamed or moved after their kernels had named
        them, once each."""
        for status, client in self.daemons.answering():
            for session in status.sessions:
                path = self._documents.paths.get(session.kernel_id, "")
                if not path or client is None or f"/{path}".endswith(f"/{session.name}"):
                    continue
                asked = (status.daemon_pid, session.id)
                if self._renamed.get(asked) != path:
                    self._renamed[asked] = path
                    folder, _, name = path.rpartition("/")
                    rename = partial(client.rename, session.id, name, folder)
                    with suppress(KiwiError):  # it has ended, or the daemon has
                        await in_thread(rename, "kiwi rename")

    async def _read_documents(self) -> bool:
        try:
            bare = not self._disabled and self._bare_kernels.refresh()
            return await self._documents.refresh() or bare
        except Exception:  # noqa: BLE001  (another extension's session manager may do anything)
            self._log.warning(
                "Kiwi cannot list the notebooks and kernels of this server", exc_info=True
            )
            return False
