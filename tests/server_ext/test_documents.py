"""Tests of which notebook a session belongs to when it is opened, renamed or closed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import somebody as other_users
from somebody import ALICE, BOB

from kiwi_jupyter.server_ext.documents import Documents

if TYPE_CHECKING:
    from daemon import Daemon


somebody = other_users.somebody


def only_path(state: dict[str, Any]) -> str | None:
    (session,) = [session for gpu in state["gpus"] for session in gpu["sessions"]]
    path: str | None = session["path"]
    return path


async def test_a_notebooks_path_follows_it(
    daemon: Daemon, somebody: Any, jp_fetch: Any, read: Any, ask: Any
) -> None:
    wanted = {"path": "work/a.ipynb", "name": "a.ipynb", "type": "notebook"}
    body = json.dumps({**wanted, "kernel": {"name": "python3"}})
    made = json.loads((await jp_fetch("api/sessions", method="POST", body=body)).body)
    place = f"api/sessions/{made['id']}"
    try:
        (socket,) = daemon.sockets()
        kernel = somebody(socket, os.getuid())
        kernel.hello(role="session", name="a.ipynb", kernel_id=made["kernel"]["id"])
        kernel.ask("acquire", burst=1)
        _, state = await ask("status")
        assert only_path(state) == "work/a.ipynb"
        stream = await read()
        await stream.until(lambda s: only_path(s) == "work/a.ipynb")
        moved = json.dumps({"path": "elsewhere/b.ipynb"})
        await jp_fetch(place, method="PATCH", body=moved)
        await stream.until(lambda s: only_path(s) == "elsewhere/b.ipynb")
        # `kiwi status` and the notices of others say so, too.
        await asyncio.to_thread(
            daemon.wait_for, lambda s: s.sessions[0].name == "b.ipynb", "the daemon's name for it"
        )
        stranger = somebody(socket, os.getuid())
        stranger.hello(role="session", name="c.ipynb", kernel_id="not-of-this-server")
        await stream.until(
            lambda s: (
                {x["name"]: x["path"] for x in s["gpus"][0]["sessions"]}
                == {"b.ipynb": "elsewhere/b.ipynb", "c.ipynb": None}
            )
        )
    finally:
        await jp_fetch(place, method="DELETE")
    await stream.until(lambda s: not any(x["path"] for x in s["gpus"][0]["sessions"]))
    await stream.until(
        lambda s: {(x["name"], x["path"]) for x in s["gpus"][0]["history"]} == {("b.ipynb", None)}
    )


class Sessions:
    """A session manager that counts its calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.connection = self
        self.total_changes = 0
        self.rows: list[dict[str, Any]] = [{"kernel": {"id": "k1"}, "path": "a.ipynb"}]

    async def list_sessions(self) -> list[dict[str, Any]]:
        self.asked += 1
        return self.rows


async def test_the_session_manager_is_asked_only_after_it_changed() -> None:
    manager = Sessions()
    documents = Documents(manager)
    assert await documents.refresh()
    paths = documents.paths
    for _ in range(5):
        assert not await documents.refresh()
    assert (manager.asked, documents.paths) == (1, {"k1": "a.ipynb"})
    manager.total_changes += 1
    assert not await documents.refresh()
    assert documents.paths is paths, "the same object while it says the same"
    manager.total_changes += 1
    manager.rows.append({"kernel": None, "path": "dead.ipynb"})
    manager.rows.append({"kernel": {"id": "k2"}, "path": "b.ipynb", "type": "notebook"})
    manager.rows.append({"kernel": {"id": "k3"}, "path": "console-1-5f0e", "type": "console"})
    assert await documents.refresh()
    assert documents.paths == {"k1": "a.ipynb", "k2": "b.ipynb"}


# --- another user -------------------------------------------------------------------------------

SERVICE_AS = """
import asyncio, json, logging, os, sys
import msgspec
from pathlib import Path
from types import SimpleNamespace
from kiwi_jupyter.server_ext.bare_kernels import BareKernels
from kiwi_jupyter.server_ext.documents import Documents
from kiwi_jupyter.server_ext.service import KiwiService

class Sessions:
    async def list_sessions(self):
        return [{{"kernel": {{"id": "k-alice"}}, "path": "guessed.ipynb"}},
                {{"kernel": {{"id": "k-bob"}}, "path": "bobs/own.ipynb"}}]

async def main():
    kernels = SimpleNamespace(list_kernel_ids=lambda: [])
    service = KiwiService(Path({directory!r}), Documents(Sessions()), BareKernels(kernels),
        logging.getLogger(),
        autostarts=False, may_set=True, interval_s=0.0, history_s=1800.0)
    await service.ready()
    print(msgspec.json.encode(service.feed.state(may_set=True)).decode())
    await service.close()

os.setgroups([]); os.setgid({uid}); os.setuid({uid})
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_another_users_session_is_anonymous(daemon: Daemon, somebody: Any) -> None:
    """The extension runs in a server of Bob's, on a machine where Alice works too."""
    daemon.directory.chmod(0o755)
    (socket,) = daemon.sockets()
    alice, bob = somebody(socket, ALICE), somebody(socket, BOB)
    hers = alice.hello(role="session", name="secret.ipynb", kernel_id="k-alice")["session"]
    his = bob.hello(role="session", name="own.ipynb", kernel_id="k-bob")["session"]
    for one in (alice, bob):
        one.ask("acquire", burst=1)
    code = SERVICE_AS.format(directory=str(daemon.directory), uid=BOB)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    (gpu,) = json.loads(done.stdout)["gpus"]
    sessions = {session["id"]: session for session in gpu["sessions"]}
    shown = sessions[hers]
    assert (shown["name"], shown["owner"]) == ("another user", "another user")
    assert (shown["pid"], shown["kernel_id"], shown["path"]) == (0, "", None)
    assert not shown["mine"]
    assert (sessions[his]["name"], sessions[his]["path"]) == ("own.ipynb", "bobs/own.ipynb")
    assert not gpu["may_set"], "Bob owns neither the daemon nor the admin group"
    assert {entry["session"]: entry["path"] for entry in gpu["history"]} == {
        hers: None,
        his: "bobs/own.ipynb",
    }
    assert "secret" not in done.stdout
    assert "guessed" not in done.stdout
