from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client
from tests.client.scripted_daemon import ScriptedDaemon, client_threads, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(tmp_path / "GPU-1.sock")
    daemon.start()
    yield daemon
    daemon.stop()
    assert daemon.faults == []


@pytest.fixture
def make_client(daemon: ScriptedDaemon) -> Iterator[Callable[..., Client]]:
    """Make clients of ``daemon``, and close them after the test; no thread may be left."""
    made: list[Client] = []

    def make(**options: object) -> Client:
        client = Client(daemon.path, **options)  # type: ignore[arg-type]
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()
    eventually(lambda: client_threads() == 0)


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    client = make_client(name="note.ipynb")
    client.connect()
    return client
