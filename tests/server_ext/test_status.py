"""``GET status``: what it shows, against real daemons and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kiwi_jupyter.server_ext.model import State

if TYPE_CHECKING:
    from daemon import Daemon


async def test_a_gpu_and_its_sessions(daemon: Daemon, program: Any, ask: Any) -> None:
    one = program(daemon, 32, name="train.ipynb")
    code, body = await ask("status")
    assert code == 200
    state = msgspec.convert(body, State)
    (gpu,) = state.gpus
    assert gpu.reachable
    assert gpu.emulated
    (session,) = gpu.sessions
    assert (session.name, session.pid, session.mine) == ("train.ipynb", one.pid, True)
    assert session.path is None
    assert session.resident_bytes >= 32 << 20
