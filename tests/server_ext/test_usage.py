"""Tests of ``GET usage`` with real daemons and sessions."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kiwi_jupyter.server_ext.model import Usage

if TYPE_CHECKING:
    from daemon import Daemon


async def test_each_gpus_sums(daemon: Daemon, program: Any, ask: Any) -> None:
    program(daemon, 32, name="train.ipynb")
    code, body = await ask("usage", params={"by": "notebook"})
    assert code == 200
    (gpu,) = msgspec.convert(body, Usage).gpus
    assert (gpu.uuid, gpu.index, gpu.problem) == (daemon.status().uuid, 0, None)
    (row,) = gpu.rows
    assert (row.name, row.mine, row.bursts) == ("train.ipynb", True, 1)
    assert row.held_s > 0
    assert gpu.began_at is not None
    (whole,) = (await ask("usage"))[1]["gpus"][0]["rows"]
    assert whole["name"] == ""
    assert whole["held_s"] >= row.held_s
    later = {"since": str(time.time() + 3600)}
    assert (await ask("usage", params=later))[1]["gpus"][0]["rows"] == []


async def test_many_may_ask_at_once(daemon: Daemon, ask: Any) -> None:
    answers = await asyncio.gather(*(ask("usage") for _ in range(12)))
    assert [code for code, _ in answers] == [200] * 12
    assert all(body["gpus"][0]["problem"] is None for _, body in answers)


@pytest.mark.parametrize(
    "params", [{"by": "colour"}, {"since": "yesterday"}, {"since": "-1"}, {"since": "nan"}]
)
async def test_what_makes_no_sense_is_refused(ask: Any, params: dict[str, str]) -> None:
    code, body = await ask("usage", params=params)
    assert (code, body["code"]) == (400, "bad-request")


async def test_a_daemon_that_is_away_is_said(daemon: Daemon, ask: Any) -> None:
    assert (await ask("usage"))[1]["gpus"][0]["problem"] is None
    daemon.stop()
    for _ in range(600):
        code, body = await ask("usage")
        if body["gpus"] and body["gpus"][0]["problem"]:
            break
        await asyncio.sleep(0.05)
    assert code == 200
    assert body["gpus"][0]["rows"] == []
    assert body["gpus"][0]["problem"]["message"]
