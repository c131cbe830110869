"""Errors in the form that every route uses: a status code and ``{"code", "message", "remedy"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from tornado.web import HTTPError

from kiwi_jupyter.server_ext.model import Problem

if TYPE_CHECKING:
    from types import TracebackType

    from kiwi_core.errors import KiwiError

STATUS_OF: Final = {
    "bad-request": 400, "bad-setting": 400, "unknown-policy": 400,
    "not-allowed": 403, "refused": 403,
    "no-such-gpu": 404, "no-such-session": 404,
    "in-burst": 409,
    "no-daemon": 503, "disconnected": 503, "not-connected": 503, "timeout": 503,
}  # fmt: skip
"""The HTTP status for each code of Kiwi; any other error of a daemon is 502."""

_HTTP: Final = {
    400: (
        "bad-request",
        "The request cannot be understood.",
        "docs/rest.md describes the requests.",
    ),
    403: ("not-allowed", "You may not do that.", "Ask the owner of this Jupyter server."),
    404: ("not-found", "There is nothing here.", "GET kiwi/api/openapi.json lists the routes."),
    405: (
        "bad-method",
        "This cannot be done here.",
        "GET kiwi/api/openapi.json lists the methods.",
    ),
}
_FAILED: Final = (
    "failed",
    "The Kiwi extension of this Jupyter server failed.",
    "Its log says more.",
)


class RefusedError(HTTPError):
    """An answer other than success, with its message."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(status, "%s", problem.message)
        self.problem = problem


def refusal(error: KiwiError) -> RefusedError:
    return RefusedError(
        STATUS_OF.get(error.code, 502),
        Problem(code=error.code, message=error.message, remedy=error.remedy),
    )


def bad_request(what: str, remedy: str = "") -> RefusedError:
    return RefusedError(400, Problem(code="bad-request", message=what, remedy=remedy))


def body_of_error(
    status: int,
    exc_info: tuple[type[BaseException], BaseException, TracebackType] | None,
    *,
    known_user: bool,
) -> bytes:
    """Return what ``write_error`` writes."""
    error = exc_info[1] if exc_info else None
    if isinstance(error, RefusedError):
        return msgspec.json.encode(error.problem)
    if status == 403 and not known_user:
        return _encoded(
            "not-authenticated",
            "This Jupyter server does not know you.",
            "Log in, or send its token: Authorization: token …",
        )
    code, message, remedy = _HTTP.get(status, _FAILED)
    if isinstance(error, HTTPError) and error.log_message and status < 500:
        message = _said(error)
    return _encoded(code, message, remedy)


def _said(error: HTTPError) -> str:
    args: Any = error.args
    try:
        return str(error.log_message) % args if args else str(error.log_message)
    except (TypeError, ValueError):
        return str(error.log_message)


def _encoded(code: str, message: str, remedy: str) -> bytes:
    return msgspec.json.encode(Problem(code=code, message=message, remedy=remedy))
