"""A reader of the stream that only applies deltas, as in ``docs/rest.md``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 30.0


def applied(state: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` after ``delta``. Both are JSON; ``state`` is not changed."""
    assert delta["seq"] == state["seq"] + 1, "a gap"
    gpus = {gpu["uuid"]: gpu for gpu in state["gpus"]}
    for uuid, change in delta.get("gpus", {}).items():
        gpus[uuid] = _applied_to_gpu(gpus.get(uuid, {"sessions": [], "history": []}), change)
    for uuid in delta.get("gpus_gone", ()):
        del gpus[uuid]
    ordered = sorted(gpus.values(), key=lambda gpu: (gpu["index"], gpu["uuid"]))
    new = {**state, "seq": delta["seq"], "now": delta["now"], "gpus": ordered}
    return {**new, "server": delta["server"]} if "server" in delta else new


def _applied_to_gpu(gpu: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    sessions = {session["id"]: session for session in gpu["sessions"]}
    for id_, fields in change.get("sessions", {}).items():
        sessions[id_] = {**sessions.get(id_, {}), **fields}
    for id_ in change.get("gone", ()):
        del sessions[id_]
    history = {entry["id"]: entry for entry in gpu["history"]}
    history |= {entry["id"]: entry for entry in change.get("history", ())}
    return {
        **gpu,
        **change.get("set", {}),
        "sessions": list(sessions.values()),
        "history": list(history.values()),
    }


class Reader:
    """A WebSocket; ``state`` is the sum of its messages."""

    def __init__(self, websocket: Any) -> None:
        self.websocket = websocket
        self.state: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        """Read, apply and return the next message."""
        text = await asyncio.wait_for(self.websocket.read_message(), PATIENCE_S)
        assert text is not None, "the stream ended"
        message: dict[str, Any] = json.loads(text)
        if message["type"] == "snapshot":
            self.state = {name: value for name, value in message.items() if name != "type"}
        elif message["type"] == "delta":
            self.state = applied(self.state, message)
        else:
            assert message["seq"] == self.state["seq"]
        self.seen.append(message)
        return message

    async def until(
        self, condition: Callable[[dict[str, Any]], Any], timeout_s: float = PATIENCE_S
    ) -> Any:
        """Return the first true value of ``condition(state)``, now or after more messages."""

        async def look() -> Any:
            while not (self.state and (value := condition(self.state))):
                await self.read()
            return value

        try:
            return await asyncio.wait_for(look(), timeout_s)
        except asyncio.TimeoutError:
            raise AssertionError(f"did not come; the state is {self.state}") from None

    def close(self) -> None:
        self.websocket.close()
