"""The REST interface as OpenAPI 3.1. The schemas are generated from the structs of ``model``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kiwi_core import __version__
from kiwi_core.config import DEFAULTS
from kiwi_core.units import ns_to_seconds
from kiwi_jupyter.server_ext import model as m

if TYPE_CHECKING:
    from collections.abc import Sequence

_REF: Final = "#/components/schemas/{name}"
_ABOUT: Final = (
    "Who shares the GPU, and how long the wait is. Every request is authenticated and authorised"
    " as Jupyter Server does it: token or cookie, an XSRF token for cookies, and its Authorizer,"
    " asked for the resource `kiwi`. The stream `events` is a WebSocket: docs/rest.md describes it,"
    " and its messages are among the schemas here."
)
_SCHEMAS: Final = (
    m.State, m.Snapshot, m.Delta, m.Heartbeat, m.Settings, m.SettingsInForce, m.SessionSettings,
    m.BroughtBack, m.Story, m.Usage, m.Problem,
)  # fmt: skip
_ERRORS: Final = {
    400: "The request cannot be understood, or asks for something impossible.",
    403: "Unknown user, no right, or no XSRF token.",
    404: "No such GPU, or no such session of yours.",
    409: "The session is in the middle of a burst; nothing was moved.",
    502: "The daemon refused or failed; the words are its own.",
    503: "No daemon answers at the moment.",
}


_OF_A_DAEMON: Final = (400, 404, 502, 503)
"""The errors of a route that asks one daemon."""


def description(base_url: str, policies: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe a server whose routes begin at ``base_url`` (with its slash). ``policies`` are those
    of its daemons; if no daemon answers yet, any name is valid in the description.
    """
    return {**_description(policies), "servers": [{"url": base_url}]}


@cache
def _description(policies: tuple[str, ...]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        _SCHEMAS,
        ref_template=_REF,
    )
    _narrow_settings(schemas["Settings"], policies)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kiwi", "version": __version__, "description": _ABOUT},
        "security": [{"token": []}, {"tokenInQuery": []}, {"cookie": []}],
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "`token <the server's token>`",
                },
                "tokenInQuery": {"type": "apiKey", "in": "query", "name": "token"},
                "cookie": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "_xsrf",
                    "description": "With the login cookie, and X-XSRFToken where it changes"
                    " something.",
                },
            },
        },
    }


def _narrow_settings(schema: dict[str, Any], policies: tuple[str, ...]) -> None:
    """Add the rules that the struct cannot express: at least one setting, and the valid values."""
    schema["minProperties"] = 1
    schema["properties"]["tq_s"] = {
        "type": "number",
        "minimum": ns_to_seconds(DEFAULTS.tq_min_ns),
        "maximum": ns_to_seconds(DEFAULTS.tq_max_ns),
        "description": "Time quantum, in seconds.",
    }
    if policies:
        schema["properties"]["policy"]["enum"] = list(policies)


def _paths() -> dict[str, Any]:
    gpu, session = _in_path("uuid", "A GPU's UUID."), _in_path("session", "A session's id.")
    one = "/kiwi/api/gpus/{uuid}/sessions/{session}"
    history = {
        "name": "history_s",
        "in": "query",
        "description": "Narrow the history to this many seconds.",
        "schema": {"type": "number", "minimum": 0},
    }
    usage = [
        {
            "name": "by",
            "in": "query",
            "description": "Whose sums.",
            "schema": {"enum": ["user", "notebook", "job"], "default": "user"},
        },
        {
            "name": "since",
            "in": "query",
            "description": "Unix seconds; as far back as it is known without it.",
            "schema": {"type": "number", "minimum": 0, "exclusiveMaximum": 1 << 53},
        },
    ]
    return {
        "/kiwi/api/status": {
            "get": _route("status", "How everything is now.", "State", [400], parameters=[history])
        },
        "/kiwi/api/gpus/{uuid}": {
            "parameters": [gpu],
            "patch": _route(
                "set",
                "Change a GPU's settings; answers what is in force.",
                "SettingsInForce",
                requestBody=_body("Settings"),
            ),
        },
        one: {
            "parameters": [gpu, session],
            "patch": _route(
                "setSession",
                "Change the priority class of a session; answers what is in force.",
                "SessionSettings",
                requestBody=_body("SessionSettings"),
            ),
        },
        f"{one}/release": {
            "parameters": [gpu, session],
            "post": _route(
                "release",
                "Move a session's memory out of the GPU; answers when that is under way.",
                None,
                [400, 404, 409, 502, 503],
            ),
        },
        f"{one}/bring-back": {
            "parameters": [gpu, session],
            "post": _route(
                "bringBack",
                "A hint that the session is about to be used. Never a lease.",
                "BroughtBack",
            ),
        },
        f"{one}/story": {
            "parameters": [gpu, session],
            "get": _route("story", "What happened to a session lately.", "Story"),
        },
        "/kiwi/api/usage": {
            "get": _route(
                "usage", "Who has had how much of each GPU.", "Usage", [400], parameters=usage
            )
        },
        "/kiwi/api/openapi.json": {"get": _route("openapi", "This description.", None, [])},
    }


def _route(
    name: str,
    summary: str,
    schema: str | None,
    errors: Sequence[int] = _OF_A_DAEMON,
    **more: Any,
) -> dict[str, Any]:
    empty = {"application/json": {"schema": {"type": "object"}}}
    said = {"description": summary, "content": _json(schema) if schema else empty}
    answers = {"202" if name == "release" else "200": said}
    for status in sorted({403, *errors}):
        answers[str(status)] = {"description": _ERRORS[status], "content": _json("Problem")}
    return {"operationId": name, "summary": summary, "responses": answers, **more}


def _in_path(name: str, about: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": about,
        "schema": {"type": "string", "minLength": 1},
    }


def _body(schema: str) -> dict[str, Any]:
    return {"required": True, "content": _json(schema)}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=schema)}}}
