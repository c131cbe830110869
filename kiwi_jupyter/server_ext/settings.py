"""``PATCH``: a GPU's settings, and the priority class of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from jupyter_server.auth.decorator import authorized
from tornado import web

from kiwi_core.states import PRIORITIES
from kiwi_jupyter.server_ext import model as m
from kiwi_jupyter.server_ext.answers import bad_request
from kiwi_jupyter.server_ext.handlers import KiwiHandler

if TYPE_CHECKING:
    from kiwi_core.client import Client

_T = TypeVar("_T")


class SettingHandler(KiwiHandler):
    """The common part of both."""

    def read(self, kind: type[_T], remedy: str) -> _T:
        try:
            return msgspec.json.decode(self.request.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise bad_request(f"The settings cannot be read: {error}.", remedy) from None


class GpuHandler(SettingHandler):
    @web.authenticated
    @authorized
    async def patch(self, uuid: str) -> None:
        wanted = self.read(
            m.Settings,
            'Send JSON with one or more of "tq_s" (seconds), "anti_thrash" ("on", "always", "off")'
            ' and "policy" (a name).',
        )
        self.check_may_change()
        said = {
            name: value
            for name in wanted.__struct_fields__
            if (value := getattr(wanted, name)) is not msgspec.UNSET
        }

        def change(client: Client) -> m.SettingsInForce:
            client.set(**said)
            now = client.status().scheduler
            return m.SettingsInForce(tq_s=now.tq_s, anti_thrash=now.anti_thrash, policy=now.policy)

        words = msgspec.json.encode(wanted).decode()
        self.say(await self.act(uuid, f"set {words}", change))


class SessionSettingsHandler(SettingHandler):
    @web.authenticated
    @authorized
    async def patch(self, uuid: str, session: str) -> None:
        wanted = self.read(
            m.SessionSettings, f'Send JSON with "priority": one of {", ".join(PRIORITIES)}.'
        )
        self.check_may_change()
        await self.act(
            uuid,
            f"priority {wanted.priority.value} of session {session!r}",
            lambda client: client.set(session=session, priority=wanted.priority),
        )
        self.say(wanted)
