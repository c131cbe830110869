"""The stream, against real daemons and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daemon import Daemon


def only_session(state: dict[str, Any]) -> dict[str, Any] | None:
    sessions = [session for gpu in state["gpus"] for session in gpu["sessions"]]
    return sessions[0] if len(sessions) == 1 else None


async def test_a_session_comes_works_and_goes(daemon: Daemon, program: Any, read: Any) -> None:
    stream = await read()
    assert (await stream.read())["type"] == "snapshot"
    one = program(daemon, 16, name="a.ipynb")
    found = await stream.until(only_session)
    assert found["name"] == "a.ipynb"
    one.start_burst()
    await stream.until(lambda s: (only_session(s) or {}).get("state") == "running")
    one.stop_burst()
    await stream.until(lambda s: (only_session(s) or {}).get("state") == "idle")
    one.kill()
    await stream.until(lambda s: not s["gpus"][0]["sessions"])
    assert [message["type"] for message in stream.seen].count("snapshot") == 1
