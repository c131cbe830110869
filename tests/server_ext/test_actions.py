"""Tests of actions for a browser, with real daemons and sessions: settings, release, bring-back,
stories, bad input, refusals of the daemon, and the log."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from daemon import Daemon, running_daemon
from msgspec.structs import replace

from kiwi_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from session_program import SessionProgram


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Share one daemon, because a start takes longer than a test."""
    with running_daemon("1x256MiB") as one:
        yield one


@pytest.fixture
def gpu(daemon: Daemon) -> str:
    return f"gpus/{daemon.status().uuid}"


async def session_of(ask: Any, program: SessionProgram) -> dict[str, Any]:
    """Return the session as the server shows it, once it does."""
    for _ in range(600):
        _, state = await ask("status")
        for gpu in state["gpus"]:
            for session in gpu["sessions"]:
                if session["pid"] == program.pid:
                    found: dict[str, Any] = session
                    return found
        await asyncio.sleep(0.05)
    raise AssertionError("the session is not shown")


async def until_state(ask: Any, program: SessionProgram, *states: str) -> dict[str, Any]:
    for _ in range(600):
        session = await session_of(ask, program)
        if session["state"] in states:
            return session
        await asyncio.sleep(0.05)
    raise AssertionError(f"never {states}: {session}")


async def until_shown(ask: Any, condition: Callable[[Any], bool]) -> None:
    """Wait until the only GPU satisfies ``condition``; the stream tells changes a moment later."""
    for _ in range(600):
        (gpu,) = (await ask("status"))[1]["gpus"]
        if condition(gpu):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never shown: {gpu}")


# --- settings -----------------------------------------------------------------------------------


async def test_settings_take_effect_and_are_in_the_log(
    daemon: Daemon, gpu: str, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rest = {"anti_thrash": "on", "policy": "interactive"}
    assert await ask(gpu, "PATCH", {"tq_s": 7.5}) == (200, {"tq_s": 7.5, **rest})
    said = await ask(gpu, "PATCH", {"anti_thrash": "always", "tq_s": 8})
    assert said == (200, {"tq_s": 8.0, **rest, "anti_thrash": "always"})
    assert daemon.status().scheduler.tq_s == 8.0
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Kiwi: set")]
    assert len(lines) == 2
    assert '{"tq_s":7.5}' in lines[0]
    assert daemon.status().uuid in lines[0]
    assert "by user" in lines[0]
    assert lines[0].endswith("done")


BAD = {
    "nothing": b"",
    "no object": b"5",
    "empty": {},
    "unknown field": {"tq_s": 5, "colour": "blue"},
    "only unknown": {"tq": 5},
    "text": {"tq_s": "5"},
    "no bool": {"tq_s": True},
    "too short": {"tq_s": 0.001},
    "too long": {"tq_s": 1e9},
    "negative": {"tq_s": -5},
    "not finite": b'{"tq_s": 1e999}',
    "NaN": b'{"tq_s": NaN}',
    "zero": {"tq_s": 0, "anti_thrash": "off"},
    "null": {"tq_s": None, "anti_thrash": "off"},
    "mode": {"anti_thrash": "sometimes"},
    "no name": {"policy": 5},
    "no policy": {"policy": ""},
    "long name": {"policy": "x" * 65},
    "not UTF-8": b'{"anti_thrash": "\xff"}',
    "deep": b"[" * 50_000,
}


async def test_bad_settings_change_nothing(daemon: Daemon, gpu: str, ask: Any) -> None:
    before = daemon.status().scheduler
    for name, body in BAD.items():
        code, said = await ask(gpu, "PATCH", body)
        assert code == 400, (name, said)
        assert said["code"] in ("bad-request", "bad-setting", "unknown-policy"), name
        assert said["message"], name
        assert said["remedy"], name
    assert daemon.status().scheduler == before


async def test_what_is_not_there_is_said(gpu: str, ask: Any) -> None:
    for path, method in [
        ("gpus/GPU-0", "PATCH"),
        ("gpus/GPU-0/sessions/x", "PATCH"),
        ("gpus/GPU-0/sessions/x/release", "POST"),
        ("gpus/GPU-0/sessions/x/bring-back", "POST"),
        ("gpus/GPU-0/sessions/x/story", "GET"),
    ]:
        body = {"priority": "low"} if "sessions" in path else {"tq_s": 5}
        code, said = await ask(path, method, body if method == "PATCH" else None)
        assert (code, said["code"]) == (404, "no-such-gpu"), path
    for path, method in [("release", "POST"), ("bring-back", "POST"), ("story", "GET")]:
        code, said = await ask(f"{gpu}/sessions/nobody/{path}", method)
        assert (code, said["code"]) == (404, "no-such-session"), path
    for path, method in [("nothing", "GET"), ("", "GET"), ("gpus", "POST"), ("gpus/a/b", "PUT")]:
        code, said = await ask(path, method)
        assert (code, said["code"]) == (404, "not-found"), path
    code, said = await ask("status", "POST")
    assert (code, said["code"]) == (405, "bad-method")


async def test_names_from_outside_do_not_write_the_log(
    gpu: str, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await ask(f"{gpu}/sessions/x%0aKiwi: all is well/release", "POST")
    assert not [r for r in caplog.records if r.name != "tornado.access" and "\n" in r.getMessage()]


async def test_the_policy_is_one_that_the_daemon_has(daemon: Daemon, gpu: str, ask: Any) -> None:
    for policy in ("round-robin", "interactive"):
        code, said = await ask(gpu, "PATCH", {"policy": policy})
        assert (code, said["policy"]) == (200, policy)
        assert daemon.status().scheduler.policy == policy
        await until_shown(ask, lambda gpu, policy=policy: gpu["scheduler"]["policy"] == policy)  # type: ignore[misc]
    code, said = await ask(gpu, "PATCH", {"policy": "chaos", "tq_s": 7})
    assert (code, said["code"]) == (400, "unknown-policy")
    for policy in ("interactive", "round-robin"):
        assert policy in said["remedy"]
    assert daemon.status().scheduler.tq_s != 7


async def test_priorities_are_of_sessions(
    daemon: Daemon, gpu: str, program: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, other = program(daemon, 8), program(daemon, 8)
    session = await session_of(ask, one)
    assert session["priority"] == "normal"
    place = f"{gpu}/sessions/{session['id']}"
    assert await ask(place, "PATCH", {"priority": "training"}) == (200, {"priority": "training"})
    await session_of(ask, other)
    said = ["normal", "training"]
    await until_shown(ask, lambda gpu: sorted(s["priority"] for s in gpu["sessions"]) == said)
    assert f"priority training of session '{session['id']}'" in caplog.text
    for body in ({"priority": "urgent"}, {}, {"priority": "low", "tq_s": 5}, b"{"):
        code, said = await ask(place, "PATCH", body)
        assert (code, said["code"]) == (400, "bad-request"), body
    code, said = await ask(f"{gpu}/sessions/nobody", "PATCH", {"priority": "low"})
    assert (code, said["code"]) == (404, "no-such-session")


# --- memory -------------------------------------------------------------------------------------


async def test_ids_that_no_daemon_makes_reach_neither_it_nor_the_log(
    gpu: str, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (f"{gpu}/sessions/{'x' * 301}/release", f"gpus/{'x' * 301}/sessions/s/bring-back"):
        code, said = await ask(path, "POST")
        assert (code, said["code"]) == (404, "not-found")
    assert "Kiwi:" not in caplog.text


async def test_release_and_bring_back(daemon: Daemon, gpu: str, program: Any, ask: Any) -> None:
    one = program(daemon, 32, name="a.ipynb")
    session = await until_state(ask, one, "idle")
    place = f"{gpu}/sessions/{session['id']}"
    assert await ask(f"{place}/release", "POST") == (202, {})
    out = await until_state(ask, one, "paged-out")
    assert out["paged_out_bytes"] >= 32 << 20
    assert await ask(f"{place}/bring-back", "POST") == (200, {"begun": True, "why": ""})
    back = await until_state(ask, one, "idle")
    assert back["resident_bytes"] >= 32 << 20
    code, said = await ask(f"{place}/bring-back", "POST")
    assert (code, said["begun"]) == (200, False)
    assert said["why"]
    assert one.intact()
    code, story = await ask(f"{place}/story")
    assert code == 200
    assert all(line["ago_s"] >= 0 and line["text"] for line in story["lines"])
    assert len(story["lines"]) >= 2


async def test_a_burst_is_not_disturbed(daemon: Daemon, gpu: str, program: Any, ask: Any) -> None:
    one = program(daemon, 16)
    one.start_burst()
    session = await until_state(ask, one, "running")
    code, said = await ask(f"{gpu}/sessions/{session['id']}/release", "POST")
    assert (code, said["code"]) == (409, "in-burst")
    assert one.stop_burst() > 0


@pytest.mark.parametrize("traits", [{"bring_back": False}])
async def test_hints_can_be_switched_off(daemon: Daemon, gpu: str, program: Any, ask: Any) -> None:
    one = program(daemon, 16)
    session = await until_state(ask, one, "idle")
    code, said = await ask(f"{gpu}/sessions/{session['id']}/bring-back", "POST")
    assert (code, said["begun"]) == (200, False)
    assert "switched" in said["why"]


@pytest.mark.parametrize("traits", [{"may_change_settings": False}])
async def test_who_may_not_change_settings_moves_only_what_is_theirs(
    gpu: str, daemon: Daemon, program: Any, ask: Any, kiwi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon lets its admins move everything. Root, who runs this server, owns all sessions;
    another admin would not."""
    session = (await session_of(ask, program(daemon, 16)))["id"]
    place = f"{gpu}/sessions/{session}"
    assert (await ask(f"{place}/bring-back", "POST"))[0] == 200
    seen = kiwi.service.gpus

    def seen_by_an_admin() -> list[Any]:
        return [
            replace(one, sessions=[replace(session, mine=False) for session in one.sessions])
            for one in seen()
        ]

    monkeypatch.setattr(kiwi.service, "gpus", seen_by_an_admin)
    for what in ("release", "bring-back"):
        code, said = await ask(f"{place}/{what}", "POST")
        assert (code, said["code"]) == (403, "not-allowed")


# --- what the daemon refuses --------------------------------------------------------------------


REFUSALS = {
    "bad-setting": 400, "unknown-policy": 400, "not-allowed": 403, "refused": 403,
    "no-such-session": 404, "in-burst": 409, "timeout": 503, "disconnected": 503,
    "no-daemon": 503, "whatever": 502,
}  # fmt: skip


async def test_a_refusal_comes_with_the_daemons_words(
    gpu: str, ask: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for code, status in REFUSALS.items():

        def refuse(*_: Any, code: str = code, **__: Any) -> None:
            raise PeerError(code, "That cannot be.", "Ask somebody.")

        monkeypatch.setattr("kiwi_core.client.client.Client.set", refuse)
        body = {"code": code, "message": "That cannot be.", "remedy": "Ask somebody."}
        assert await ask(gpu, "PATCH", {"tq_s": 5}) == (status, body)
        assert any(f"refused ({code})" in record.getMessage() for record in caplog.records)


async def test_a_failure_of_the_extension_tells_nothing_of_it(
    gpu: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("kiwi_core.client.client.Client.set", fail)
    code, said = await ask(gpu, "PATCH", {"tq_s": 5})
    assert (code, said["code"]) == (500, "failed")
    assert "secret" not in str(said)
