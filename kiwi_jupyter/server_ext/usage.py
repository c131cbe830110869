"""``GET usage``: how much of the GPUs users and notebooks have had, as their daemons report it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_server.auth.decorator import authorized
from tornado import web

from kiwi_core.errors import KiwiError
from kiwi_core.wire.messages import UnixTime, UsageBy
from kiwi_jupyter.server_ext import model as m
from kiwi_jupyter.server_ext.answers import bad_request
from kiwi_jupyter.server_ext.handlers import KiwiHandler
from kiwi_jupyter.server_ext.to_rest import problem_of

if TYPE_CHECKING:
    from kiwi_core.wire.messages import GpuStatus


class UsageHandler(KiwiHandler):
    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        try:
            by = UsageBy(self.get_query_argument("by", UsageBy.USER.value))
        except ValueError:
            raise bad_request("by is neither user nor notebook.") from None
        try:
            since = msgspec.convert(self.get_query_argument("since", "0"), UnixTime, strict=False)
        except msgspec.ValidationError:
            raise bad_request(
                "since is not a time.", "Write Unix seconds, for example since=1795046400."
            ) from None
        await self.service.ready()
        gpus = [await self._of(gpu, by, since) for gpu in self.service.gpus()]
        self.say(m.Usage(gpus=gpus))

    async def _of(self, gpu: GpuStatus, by: UsageBy, since_unix_s: float) -> m.GpuUsage:
        about: dict[str, Any] = {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name}
        try:
            report = await self.service.ask(gpu.uuid, lambda c: c.usage(by, since_unix_s))
        except KiwiError as error:
            return m.GpuUsage(**about, problem=problem_of(error))
        return m.GpuUsage(
            **about, began_at=report.began_unix_s, complete=report.complete, rows=report.rows
        )
