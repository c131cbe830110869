"""The daemon's end of the preloaded libraries' connections, without the daemon: real socket, real
messages, real ``Links``. Each program's session is named after its process (``s<pid>``), and a
child belongs to the session of its nearest linked ancestor."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.peers import process_of
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.links.links import Links
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Target
from kiwi_core.units import SessionId
from kiwi_core.wire.messages import PROTOCOL, Hello, Ping, Pong, Welcome
from kiwi_core.wire.pager import PagerDone, PagerState

if TYPE_CHECKING:
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.gpu.processes import ProcessRef


class Roots:
    """A stand-in for the daemon's session registry: every linked process that has no linked
    ancestor."""

    def __init__(self) -> None:
        self.by_session: dict[str, ProcessRef] = {}

    def get(self, session: str) -> Any:
        root = self.by_session.get(session)
        return SimpleNamespace(target=Target(SessionId(session), root)) if root else None

    def session_of(self, ref: ProcessRef) -> SessionId:
        for candidate in (ref, *processes.ancestors(ref)):
            if candidate in self.by_session.values():
                return SessionId(f"s{candidate.pid}")
        self.by_session[f"s{ref.pid}"] = ref
        return SessionId(f"s{ref.pid}")


class LinkServer:
    """A server that listens at a path, in the running event loop."""

    def __init__(self, gpu_bytes: int) -> None:
        self._roots = Roots()
        self._link_of: dict[Connection, Link] = {}
        self.links = Links(self._roots, gpu_bytes, lambda _link: None)  # type: ignore[arg-type]

    @classmethod
    async def serve(cls, path: str, gpu_bytes: int) -> LinkServer:
        server, turns = cls(gpu_bytes), MessageTurns(Shares())
        await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(server, DEFAULTS, turns), path=path
        )
        return server

    # --- Receiver -------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        pass

    def turned_away(self, code: str) -> None:
        pass

    def received(self, connection: Connection, message: object) -> None:
        if isinstance(message, Hello):
            ref = process_of(connection.peer)
            link = self.links.take(ref, connection.peer.uid, message.name)
            link.owns = message.owns
            link.attach(connection)
            if link.session is None:
                self.links.assign(link, self._roots.session_of(ref))
            self._link_of[connection] = link
            connection.send(
                Welcome(
                    protocol=PROTOCOL,
                    daemon="test",
                    gpu_uuid="",
                    gpu_index=0,
                    gpu_name="",
                    own=message.owns,
                )
            )
        elif isinstance(message, PagerState):
            self.links.handle_state(self._link_of[connection], message)
        elif isinstance(message, PagerDone):
            self.links.done(self._link_of[connection], message)
        elif isinstance(message, Ping):
            connection.send(Pong())

    def disconnected(self, connection: Connection) -> None:
        link = self._link_of.pop(connection, None)
        if link is not None and link.connection is connection:
            link.lost()
