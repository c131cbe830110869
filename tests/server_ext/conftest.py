"""Fixtures: a real Jupyter Server in this process, and real daemons on emulated GPUs.

This module imports pytest-jupyter's fixtures and hooks, so that they apply to this directory only.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PATIENCE_S, Daemon, running_daemon
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from pytest_jupyter.jupyter_server import *  # noqa: F403
from session_program import SessionProgram
from stream_reader import Reader
from traitlets.config import Config

from kiwi_jupyter.server_ext.daemon_connections import DaemonConnections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def jupyters_own_provisioner() -> Iterator[None]:
    """Take back the provisioner that the extension has made the default of this process: kernels of
    other tests would get Kiwi's gate from it."""
    yield
    KernelProvisionerFactory.clear_instance()


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    """Start daemons like ``running_daemon``, and stop them after the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(running_daemon(*args, **kwargs))


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    """Start a daemon of one emulated GPU of 256 MiB."""
    return start("1x256MiB")


@pytest.fixture
def program() -> Iterator[Callable[..., SessionProgram]]:
    """Start sessions: ``program(daemon, size_mib, name=…)``."""
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> SessionProgram:
            made = SessionProgram(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def socket_dir(daemon: Daemon) -> Path:
    """Return the directory that the extension reads; tests without a daemon override it."""
    return daemon.directory


@pytest.fixture
def jp_runtime_dir() -> Iterator[Path]:
    """Make a directory whose path leaves room for the name of a kernel's socket (107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="kw-") as place:
        yield Path(place)


@pytest.fixture
def traits() -> dict[str, Any]:
    """Return the extension's settings in this test."""
    return {}


@pytest.fixture
def jp_server_config(
    socket_dir: Path, traits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Config:
    monkeypatch.setenv("KIWI_SOCKET_DIR", str(socket_dir))  # restored after the test
    monkeypatch.delenv("KIWI_DAEMON_ARGS", raising=False)
    extensions = {"kiwi_jupyter": True, "jupyter_server_terminals": False}
    return Config(
        {
            "ServerApp": {"jpserver_extensions": extensions},
            "KiwiServerApp": traits,
            # A TCP port that Jupyter picks for a kernel can be taken when the kernel binds it.
            "KernelManager": {"transport": "ipc"},
        },
    )


@pytest.fixture
def kiwi(jp_serverapp: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the extension that the server loaded. It waits longer for the daemons' first status: a
    busy machine may keep one from answering for seconds."""
    monkeypatch.setattr(DaemonConnections.settled, "__defaults__", (PATIENCE_S,))
    (app,) = jp_serverapp.extension_manager.extension_apps["kiwi_jupyter"]
    return app


@pytest.fixture
def ask(jp_fetch: Any, kiwi: Any) -> Callable[..., Any]:
    """``await ask("status")`` returns the HTTP status and the decoded body."""

    async def fetch(path: str, method: str = "GET", body: Any = None, **kwargs: Any) -> Any:
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        if method in ("POST", "PATCH", "PUT"):
            body = body or ""
        kwargs.setdefault("raise_error", False)
        answer = await jp_fetch("kiwi/api", path, method=method, body=body, **kwargs)
        return answer.code, json.loads(answer.body)

    return fetch


@pytest.fixture
def read(jp_ws_fetch: Any, kiwi: Any) -> Iterator[Callable[..., Any]]:
    """``await read(epoch=…, seq=…)`` opens a stream and returns its ``Reader``."""
    opened: list[Reader] = []

    async def connect(**params: Any) -> Reader:
        opened.append(Reader(await jp_ws_fetch("kiwi/api/events", params=params)))
        return opened[-1]

    yield connect
    for reader in opened:
        reader.close()
