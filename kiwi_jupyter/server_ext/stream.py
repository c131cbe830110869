"""The stream: a WebSocket that sends the state, then the changes (``docs/rest.md``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from kiwi_jupyter.server_ext.handlers import RESOURCE, app_of, may_set

if TYPE_CHECKING:
    from kiwi_jupyter.server_ext.state_feed import StateFeed


class EventsHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """The stream's handler. ``?epoch=E&seq=N``: the reader has seen everything up to that
    change.
    """

    auth_resource = RESOURCE
    _pump: asyncio.Task[None] | None = None
    _may_set = False

    @ws_authenticated
    @authorized
    async def get(self, *args: Any, **kwargs: Any) -> None:
        self._may_set = await may_set(self)
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        super().open(*args, **kwargs)
        self._pump = asyncio.create_task(self._send_all())

    def on_message(self, message: str | bytes) -> None:
        """Ignore messages of readers."""

    def on_close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()

    async def _send_all(self) -> None:
        service = app_of(self).service
        await service.ready()
        subscription = service.feed.subscribe(
            may_set=self._may_set,
            epoch=self.get_query_argument("epoch", ""),
            seq=self._seq(),
        )
        feed: StateFeed = service.feed
        try:
            while True:
                # Returns when the bytes have left: a slow reader holds up only itself.
                await self.write_message(await subscription.next())
        except (WebSocketClosedError, StreamClosedError):
            pass
        finally:
            feed.unsubscribe(subscription)

    def _seq(self) -> int:
        text = self.get_query_argument("seq", "")
        return int(text) if text.isdecimal() and len(text) < 16 else -1
