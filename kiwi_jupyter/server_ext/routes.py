"""Every route of the server extension. A new one is also described in ``openapi.py`` and
``docs/rest.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_jupyter.server_ext.handlers import (
    BringBackHandler,
    NothingHandler,
    OpenApiHandler,
    ReleaseHandler,
    StatusHandler,
    StoryHandler,
)
from kiwi_jupyter.server_ext.settings import GpuHandler, SessionSettingsHandler
from kiwi_jupyter.server_ext.stream import EventsHandler
from kiwi_jupyter.server_ext.usage import UsageHandler

if TYPE_CHECKING:
    from tornado.web import RequestHandler

# The longest id that is accepted; ids go on to the daemon, and into the log.
_GPU: Final = r"kiwi/api/gpus/([^/]{1,300})"
_SESSION: Final = _GPU + r"/sessions/([^/]{1,300})"

REST: Final[list[tuple[str, type[RequestHandler]]]] = [
    (r"kiwi/api/status", StatusHandler),
    (r"kiwi/api/usage", UsageHandler),
    (r"kiwi/api/openapi.json", OpenApiHandler),
    (_GPU, GpuHandler),
    (_SESSION, SessionSettingsHandler),
    (_SESSION + "/release", ReleaseHandler),
    (_SESSION + "/bring-back", BringBackHandler),
    (_SESSION + "/story", StoryHandler),
]

ROUTES: Final[list[tuple[str, type[RequestHandler]]]] = [
    *REST,
    (r"kiwi/api/events", EventsHandler),
    (r"kiwi/api(?:/.*)?", NothingHandler),  # must be the last one: it matches every path
]
