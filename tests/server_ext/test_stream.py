"""Tests of the stream with real daemons and sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from kiwi_jupyter.server_ext import state_feed

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


async def test_a_reader_that_comes_back_goes_on_without_a_gap(
    daemon: Daemon, program: Any, read: Any
) -> None:
    stream = await read()
    await stream.until(lambda s: s["gpus"])
    other = await read()
    await other.until(lambda s: s["gpus"])
    stream.close()
    program(daemon, 16, name="a.ipynb")
    await other.until(only_session)
    back = await read(epoch=stream.state["epoch"], seq=stream.state["seq"])
    back.state = stream.state
    assert (await back.read())["type"] == "delta"
    assert (await back.until(only_session))["name"] == "a.ipynb"
    assert [message["type"] for message in back.seen].count("snapshot") == 0


@pytest.mark.parametrize(
    "params",
    [{"epoch": "another", "seq": 1}, {"seq": 1}, {"epoch": "x", "seq": "-1"}, {"seq": "9" * 99}],
    ids=str,
)
async def test_a_reader_from_elsewhere_gets_a_snapshot(read: Any, params: dict[str, Any]) -> None:
    assert (await (await read(**params)).read())["type"] == "snapshot"


async def test_one_that_is_up_to_date_hears_only_what_is_new(
    read: Any, kiwi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await read()
    await stream.until(lambda s: s["gpus"])
    monkeypatch.setattr(state_feed.Subscription.next, "__defaults__", (0.1,))
    back = await read(epoch=stream.state["epoch"], seq=stream.state["seq"])
    back.state = stream.state
    while (said := await back.read())["type"] == "delta":
        """The machine's RAM and the GPU's gauges change at any time; the reader checks the gap."""
    assert said["type"] == "heartbeat"


async def test_a_browser_that_does_not_read_costs_a_bounded_amount(read: Any, kiwi: Any) -> None:
    """Its connection fills up, then its buffer, and others continue. When it reads again, it gets
    what was on its way, and then a snapshot."""
    swift = await read()
    await swift.until(lambda s: s["gpus"])
    published = kiwi.service.feed
    before = set(published._subscriptions)
    slow = await read()
    while not (new := published._subscriptions - before):
        await asyncio.sleep(0.01)
    (subscription,) = new
    began = published.seq
    (uuid,) = published._gpus
    gpu, received_at = published._gpus[uuid], published._received_at[uuid]
    said = 0
    while not subscription._lost:
        errors = [f"{said} " + "x" * 50_000]
        published.publish({uuid: (replace(gpu, errors=errors), received_at)}, published._server)
        said += 1
        assert said < 4000, "200 MB fit in no socket"
        assert len(subscription._waiting) <= state_feed.BUFFER_MAX
        await swift.until(lambda s, at=published.seq: s["seq"] >= at)
    published_in_all = published.seq - began  # ours, and news of the daemon
    await slow.read()
    while slow.seen[-1]["type"] != "snapshot" or len(slow.seen) == 1:
        await slow.read()
    assert slow.state["seq"] >= said
    most = published_in_all - state_feed.BUFFER_MAX + 1
    assert len(slow.seen) <= most, "what was in the buffer never came"
