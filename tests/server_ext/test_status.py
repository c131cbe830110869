"""Tests of ``GET status`` with real daemons and sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from kiwi_jupyter.server_ext.model import State

if TYPE_CHECKING:
    from daemon import Daemon


async def test_a_gpu_and_its_sessions(daemon: Daemon, program: Any, ask: Any) -> None:
    one = program(daemon, 32, name="train.ipynb")
    while (session := await _only_session(ask)).resident_bytes < 32 << 20:
        await asyncio.sleep(0.05)  # the daemon looks at a running program at intervals
    assert (session.name, session.pid, session.mine) == ("train.ipynb", one.pid, True)
    assert session.path is None


async def _only_session(ask: Any) -> Any:
    code, body = await ask("status")
    assert code == 200
    (gpu,) = msgspec.convert(body, State).gpus
    assert gpu.reachable
    assert gpu.emulated
    (session,) = gpu.sessions
    return session
