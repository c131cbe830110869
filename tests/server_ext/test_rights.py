"""Tests of every route with and without token, cookie, XSRF token and Authorizer."""

from __future__ import annotations

import json
import re
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_server.auth.authorizer import Authorizer
from tornado.httpclient import HTTPClientError

from kiwi_jupyter.server_ext.routes import REST

if TYPE_CHECKING:
    from pathlib import Path

    from traitlets.config import Config

SESSION = "kiwi/api/gpus/GPU-1/sessions/s1"
REQUESTS = {
    "status": ("GET", "kiwi/api/status", "read"),
    "openapi": ("GET", "kiwi/api/openapi.json", "read"),
    "usage": ("GET", "kiwi/api/usage", "read"),
    "story": ("GET", f"{SESSION}/story", "read"),
    "set": ("PATCH", "kiwi/api/gpus/GPU-1", "write"),
    "set-session": ("PATCH", SESSION, "write"),
    "release": ("POST", f"{SESSION}/release", "execute"),
    "bring-back": ("POST", f"{SESSION}/bring-back", "execute"),
}
CHANGING = [name for name, (method, _, _) in REQUESTS.items() if method != "GET"]
NO_TOKEN = {"Authorization": ""}


class Choosy(Authorizer):
    """Allow ``actions`` on Kiwi, and nothing else."""

    actions: frozenset[str] = frozenset()

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        return resource == "kiwi" and action in self.actions


@pytest.fixture
def socket_dir(tmp_path: Path) -> Path:
    """Return an empty directory: rights are checked before a daemon is asked."""
    return tmp_path / "sockets"


@pytest.fixture
def traits() -> dict[str, Any]:
    return {"autostart": False}


@pytest.fixture
def send(jp_fetch: Any, kiwi: Any) -> Any:
    async def send(name: str, **headers: str) -> tuple[int, dict[str, Any]]:
        method, path, _ = REQUESTS[name]
        patch = '{"tq_s": 5}' if name == "set" else '{"priority": "high"}'
        body = {"GET": None, "PATCH": patch, "POST": ""}[method]
        answer = await jp_fetch(path, method=method, body=body, headers=headers, raise_error=False)
        return answer.code, json.loads(answer.body)

    return send


def test_every_route_is_tried() -> None:
    for pattern, _ in REST:
        assert any(re.fullmatch(pattern, path) for _, path, _ in REQUESTS.values()), pattern
    assert len(REST) == len(REQUESTS)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("token", ["", "token wrong"])
async def test_nobody_gets_in_without_a_token(send: Any, name: str, token: str) -> None:
    code, said = await send(name, Authorization=token)
    assert (code, said["code"]) == (403, "not-authenticated")
    assert said["remedy"]


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_token_lets_in(send: Any, name: str) -> None:
    code, said = await send(name)
    if name in ("status", "openapi", "usage"):
        assert code == 200
    else:  # there is no daemon
        assert (code, said["code"]) == (503, "no-daemon")


# --- cookies ------------------------------------------------------------------------------------


@pytest.fixture
def log_in(jp_fetch: Any) -> Any:
    """Return the cookies of a browser that opened the server's page."""

    async def log_in() -> dict[str, str]:
        cookies: SimpleCookie = SimpleCookie()
        for path, headers in (("api/status", None), ("login", dict(NO_TOKEN))):
            answer = await jp_fetch(path, headers=headers)
            for line in answer.headers.get_list("Set-Cookie"):
                cookies.load(line)
        return {name: morsel.value for name, morsel in cookies.items()}

    return log_in


def as_header(cookies: dict[str, str]) -> str:
    return "; ".join(f"{name}={value}" for name, value in cookies.items())


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_cookie_needs_an_xsrf_token_where_it_changes_something(
    send: Any, log_in: Any, name: str
) -> None:
    cookies = await log_in()
    assert "_xsrf" in cookies
    headers = {**NO_TOKEN, "Cookie": as_header(cookies)}
    code, said = await send(name, **headers)
    if name in CHANGING:
        assert (code, said["code"]) == (403, "not-allowed")
        assert "_xsrf" in said["message"]
        code, said = await send(name, **headers, **{"X-XSRFToken": cookies["_xsrf"]})
    assert code in (200, 503), said


# --- the Authorizer -----------------------------------------------------------------------------


@pytest.fixture
def choosy(jp_server_config: Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``choosy("read")`` allows only that from now on. Request it before the server starts."""
    jp_server_config["ServerApp"]["authorizer_class"] = Choosy

    def allow(*actions: str) -> None:
        monkeypatch.setattr(Choosy, "actions", frozenset(actions))

    return allow


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_authorizer_is_asked_for_the_right_action(
    choosy: Any, send: Any, name: str
) -> None:
    action = REQUESTS[name][2]
    choosy(*({"read", "write", "execute"} - {action}))
    code, said = await send(name)
    assert (code, said["code"]) == (403, "not-allowed")
    assert action in said["message"]
    choosy(action)
    code, said = await send(name)
    assert code in (200, 503), said


async def test_the_stream_is_for_readers(choosy: Any, jp_ws_fetch: Any, kiwi: Any) -> None:
    choosy("write", "execute")
    with pytest.raises(HTTPClientError, match="403"):
        await jp_ws_fetch("kiwi/api/events")
    choosy("read")
    (await jp_ws_fetch("kiwi/api/events")).close()


async def test_the_stream_needs_a_token_or_a_cookie_on_its_own_page(
    jp_ws_fetch: Any, jp_http_port: int, log_in: Any, kiwi: Any
) -> None:
    with pytest.raises(HTTPClientError, match="403"):
        await jp_ws_fetch("kiwi/api/events", headers=dict(NO_TOKEN))
    host = f"127.0.0.1:{jp_http_port}"  # a cookie belongs to one host, so use the one of the login
    headers = {**NO_TOKEN, "Cookie": as_header(await log_in()), "Host": host}
    (await jp_ws_fetch("kiwi/api/events", headers=dict(headers))).close()
    elsewhere = {**headers, "Origin": "https://elsewhere.example"}
    with pytest.raises(HTTPClientError, match="403"):
        await jp_ws_fetch("kiwi/api/events", headers=elsewhere)


async def test_whoever_may_not_write_is_told_so(choosy: Any, send: Any, read: Any) -> None:
    choosy("read")
    assert not (await send("status"))[1]["server"]["may_set"]
    assert not (await (await read()).read())["server"]["may_set"]
    choosy("read", "write")
    assert (await send("status"))[1]["server"]["may_set"]
    assert (await (await read()).read())["server"]["may_set"]


# --- the trait ----------------------------------------------------------------------------------


@pytest.mark.parametrize("traits", [{"autostart": False, "may_change_settings": False}])
async def test_settings_can_be_closed_to_everybody(send: Any) -> None:
    assert not (await send("status"))[1]["server"]["may_set"]
    for name in ("set", "set-session"):
        code, said = await send(name)
        assert (code, said["code"]) == (403, "not-allowed")
        assert "may_change_settings" in said["remedy"]


@pytest.mark.parametrize("traits", [{"may_change_settings": ["ada", "bob"]}])
async def test_settings_can_be_for_some_users(kiwi: Any) -> None:
    assert [kiwi.may_change(user) for user in ("ada", "bob", "eve")] == [True, True, False]
