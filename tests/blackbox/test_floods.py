"""Tests that another user's session is served during a flood of each message by one user.

``benchmarks/bench_floods.py`` measures the waits; no test judges them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from flooder import KINDS
from patience import wait_until
from unprivileged import (
    RootDaemon,
    bursts,
    flood,
    needs_other_users,
    root_daemon,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL = Path(__file__).parents[2] / "docs/protocol.md"
BURSTS = 20
"""Number of bursts of the session that must be served. Without turns some waited for ever. The
benchmarks measure the waits (0.25 s)."""


def other_messages() -> list[str]:
    """Return a flood of each message in the protocol's page that no key of ``KINDS`` names."""
    page = PROTOCOL.read_text()
    begin, end = page.index("## From client to daemon"), page.index("## From daemon to client")
    examples = re.findall(r'^\{"type":".*\}$', page[begin:end], re.MULTILINE)
    assert examples, "the page's examples were not found"
    named = {word for kind in KINDS for word in re.findall(r"[a-z]+(?:-[a-z]+)*", kind)}
    return [f"session {line}" for line in examples if json.loads(line)["type"] not in named]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RootDaemon]:
    needs_other_users()
    with root_daemon() as one:
        pid = one.status()["daemon_pid"]
        yield one
        assert one.status()["daemon_pid"] == pid, one.log()
        assert "message not handled" not in one.log()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [*KINDS, *other_messages()])
def test_a_flood_keeps_nobody_waiting(daemon: RootDaemon, kind: str) -> None:
    with flood(daemon, kind):
        seen = bursts(daemon, BURSTS)
    assert len(seen["grants_s"]) == BURSTS
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")
