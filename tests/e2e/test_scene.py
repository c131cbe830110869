"""Tests of the scene of ``scene.py`` under both policies, and of what its journals tell.

``benchmarks/bench_scene.py`` plays it longer and compares measured waits with simulated ones.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

import pytest
import scene
from cli_process import finish, start_kiwi
from replayed import differences

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant
from kiwi_core.sched.replay import JournalHeader, encode_line
from kiwi_core.units import NS_PER_S, SessionId

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SEED = 4
SHORT = scene.Length(training_s=6.0, cells=2)


def test_the_journals_of_a_training_and_four_notebooks_tell_their_waits() -> None:
    """The scheduler decides the same again. From the journal of either run, the command line tells
    how long cells waited, and simulates the same work under both policies."""
    for policy, records in scene.play(SEED, SHORT).items():
        assert differences(records) == 0
        waits_s = _first_waits_s(records)
        assert len(waits_s) >= 2 * (1 + len(scene.NOTEBOOKS)), "bursts that took memory, and others"
        told = _by_command(records)
        assert told["real"]["cells"] == len(waits_s)
        assert told["real"]["all"]["wait_s"]["mean"] == pytest.approx(
            statistics.mean(waits_s), abs=0.001
        )
        assert [one["policy"] for one in told["results"]] == [policy, *_others(policy)]
        assert [one["cells"] for one in told["results"]] == [len(waits_s)] * 2
        short_cells = len(scene.measured(records).waits_s)
        for simulated in scene.POLICIES:
            assert len(scene.foretold(records, simulated, seeds=1).waits_s) == short_cells


def _others(policy: str) -> list[str]:
    return [name for name in scene.POLICIES if name != policy]


def _first_waits_s(records: scene.Records) -> list[float]:
    """Return the time from each request of a burst to its first grant."""
    asked_ns: dict[tuple[SessionId, int], int] = {}
    waits_s = []
    for record in records:
        if isinstance(record, JournalHeader):
            continue
        if isinstance(record.event, ev.LeaseRequested):
            asked_ns[record.event.session, record.event.burst] = record.now_ns
        for action in record.actions:
            if isinstance(action, Grant):
                began_ns = asked_ns.pop((action.session, action.burst), None)
                if began_ns is not None:
                    waits_s.append((record.now_ns - began_ns) / NS_PER_S)
    return waits_s


def _by_command(records: scene.Records) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".journal") as file:
        file.writelines(map(encode_line, records))
        file.flush()
        result = finish(start_kiwi("simulate", "--journal", file.name, "--json", "-"))
    assert result.code == 0, result.err
    return json.loads(result.out)
