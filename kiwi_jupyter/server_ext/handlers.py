"""The REST interface. Jupyter Server authenticates and authorises each request: token or cookie,
XSRF for cookies, and the server's Authorizer, asked for the resource ``kiwi`` with the actions
``read`` (look), ``execute`` (move one's own memory) and ``write`` (change a GPU's settings).

The daemon decides once more, by the credentials of this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from tornado import web

from kiwi_core.errors import KiwiError
from kiwi_jupyter.server_ext import model as m
from kiwi_jupyter.server_ext.answers import RefusedError, bad_request, body_of_error, refusal
from kiwi_jupyter.server_ext.openapi import description

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.client import Client
    from kiwi_jupyter.server_ext.app import KiwiServerApp
    from kiwi_jupyter.server_ext.service import KiwiService

RESOURCE: Final = "kiwi"

_T = TypeVar("_T")


def app_of(handler: JupyterHandler) -> KiwiServerApp:
    app: KiwiServerApp = handler.settings["kiwi_jupyter"]
    return app


async def may(handler: JupyterHandler, action: str) -> bool:
    """Return whether the server's Authorizer allows ``action`` on Kiwi to the user of this
    request.
    """
    authorizer = handler.authorizer
    answer = authorizer.is_authorized(handler, handler.current_user, action, RESOURCE)
    return bool(await ensure_async(answer))


async def may_set(handler: JupyterHandler) -> bool:
    """Return whether the trait and the Authorizer allow it."""
    app = app_of(handler)
    return app.may_change(handler.current_user.username) and await may(handler, "write")


class KiwiHandler(APIHandler):
    """The common part of all routes."""

    auth_resource = RESOURCE

    @property
    def service(self) -> KiwiService:
        return app_of(self).service

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        known = getattr(self, "_jupyter_current_user", None) is not None
        self.finish(body_of_error(status_code, kwargs.get("exc_info"), known_user=known))

    def say(self, answer: object, status: int = 200) -> None:
        self.set_status(status)
        self.finish(msgspec.json.encode(answer))

    async def ask(self, uuid: str, question: Callable[[Client], _T]) -> _T:
        """Ask the GPU's daemon ``question``; its refusals become error answers."""
        try:
            return await self.service.ask(uuid, question)
        except KiwiError as error:
            raise refusal(error) from error

    def check_may_change(self) -> None:
        """Check the trait; the Authorizer was asked before. Raise ``RefusedError``."""
        if not app_of(self).may_change(self.current_user.username):
            raise RefusedError(
                403,
                m.Problem(
                    code="not-allowed",
                    message="You may not change Kiwi's settings through this Jupyter server.",
                    remedy="The owner of the server can allow it: "
                    "c.KiwiServerApp.may_change_settings.",
                ),
            )

    def check_may_move(self, uuid: str, session: str) -> None:
        """Check whose session it is: the server's user may be an admin of the daemon, but others
        who are logged in to the server must not act as one. Raise ``RefusedError``.
        """
        gpus = [gpu for gpu in self.service.gpus() if gpu.uuid == uuid]
        if not any(one.id == session and one.mine for gpu in gpus for one in gpu.sessions):
            self.check_may_change()

    async def act(self, uuid: str, what: str, question: Callable[[Client], _T]) -> _T:
        """Do the same as ``ask`` for a change, and write it to the server's log."""
        user = self.current_user.username
        try:
            answer = await self.ask(uuid, question)
        except RefusedError as error:
            self.log.warning(
                "Kiwi: %s on GPU %r by user %r: refused (%s)", what, uuid, user, error.problem.code
            )
            raise
        self.log.info("Kiwi: %s on GPU %r by user %r: done", what, uuid, user)
        return answer


class StatusHandler(KiwiHandler):
    _track_activity = False  # looking is not working: an idle server may be culled

    @web.authenticated
    @authorized
    async def get(self) -> None:
        history_s = self._history_s()
        await self.service.ready()
        self.say(self.service.feed.state(may_set=await may_set(self), history_s=history_s))

    def _history_s(self) -> float | None:
        text = self.get_query_argument("history_s", None)
        if text is None:
            return None
        try:
            seconds = msgspec.convert(text, float, strict=False)
        except msgspec.ValidationError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise bad_request(
                "history_s is not a time.", "Write seconds, for example history_s=300."
            )
        return seconds


class ReleaseHandler(KiwiHandler):
    @web.authenticated
    @authorized("execute")  # type: ignore[untyped-decorator]
    async def post(self, uuid: str, session: str) -> None:
        self.check_may_move(uuid, session)
        await self.act(uuid, f"release of session {session!r}", lambda c: c.release(session))
        self.say({}, 202)


class BringBackHandler(KiwiHandler):
    @web.authenticated
    @authorized("execute")  # type: ignore[untyped-decorator]
    async def post(self, uuid: str, session: str) -> None:
        if not app_of(self).bring_back:
            self.say(m.BroughtBack(begun=False, why="This Jupyter server has it switched off."))
            return
        self.check_may_move(uuid, session)
        begun, why = await self.ask(uuid, lambda client: client.bring_back(session))
        if begun:
            user = self.current_user.username
            self.log.info("Kiwi: bring-back of %r on GPU %r by user %r: begun", session, uuid, user)
        self.say(m.BroughtBack(begun=begun, why=why))


class StoryHandler(KiwiHandler):
    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self, uuid: str, session: str) -> None:
        lines = await self.ask(uuid, lambda client: client.story(session))
        self.say(m.Story(lines=lines))


class OpenApiHandler(KiwiHandler):
    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        known = {one.name: None for gpu in self.service.gpus() for one in gpu.policies}
        self.say(description(self.base_url, tuple(known)))


class NothingHandler(KiwiHandler):
    """Answers every other path, so that a missing path gives the usual form of error."""

    _track_activity = False

    @web.authenticated
    def get(self) -> None:
        raise web.HTTPError(404)

    head = post = put = patch = delete = get
