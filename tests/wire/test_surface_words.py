"""Tests of the words for waits, turns and loads in the command line and ``%kiwi status``.

The sidebar's test, ``labextension/tests/model/phrases.spec.tsx``, reads the same table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kiwi_core.cli.status_text import gpu_lines
from kiwi_core.cli.terminal import Style
from kiwi_core.states import AntiThrash
from kiwi_core.wire.status import GpuStatus, MemoryStatus, OutsideProgram, SchedulerStatus
from kiwi_core.wire.words import keeps_text, load_text, outside_text, turn_text, wait_text
from kiwi_jupyter.kernel.status_view import StatusView

TABLE = Path(__file__).parents[1] / "support" / "surface_words.json"
CASES = json.loads(TABLE.read_text())


def status_of(case: dict[str, Any]) -> GpuStatus:
    plain = {
        "pid": 1, "owner": "ada", "resident_bytes": 0, "paged_out_bytes": 0, "suspensions": 0,
        "held_s": 0.0, "waited_s": 0.0, "mine": True,
    }  # fmt: skip
    sessions = [
        plain | {"id": id_, "name": f"{id_}.ipynb"} | fields
        for id_, fields in case["sessions"].items()
    ]
    queue = [{"expected_wait_s": None} | entry for entry in case["gpu"]["queue"]]
    memory = MemoryStatus(
        total_bytes=1 << 30, free_bytes=1 << 30, paged_out_bytes=0, host_budget_bytes=1 << 30
    )
    scheduler = SchedulerStatus(
        tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=case["gpu"]["serialised"]
    )
    gpu = {
        "uuid": "GPU-1", "name": "GPU", "index": 0, "emulated": False, "memory": memory,
        "scheduler": scheduler, "holders": case["gpu"]["holders"], "queue": queue,
        "sessions": sessions, "gauges": case["gpu"].get("gauges", {}),
    }  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(gpu), GpuStatus)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["about"])
def test_every_surface_says_the_same(case: dict[str, Any]) -> None:
    gpu = status_of(case)
    sessions = {session.id: session for session in gpu.sessions}
    assert {id_: turn_text(gpu, sessions[id_]) for id_ in gpu.holders} == case["turns"]
    assert {entry.session: wait_text(entry) for entry in gpu.queue} == case["waits"]
    lines = gpu_lines(gpu, Style(False))
    load = case.get("load", "")
    assert load_text(gpu.gauges) == load
    assert any(line.split(None, 1) == ["load", load] for line in lines) == bool(load)
    rows = dict(StatusView(gpu, mine="", problem="", enabled=True).rows())
    assert rows.get("Load", "") == load
    for id_, text in case["turns"].items():
        said = f"{id_}.ipynb (ada)" + (f", {text}" if text else "")
        assert any(line.endswith(said) for line in lines)
    keeps = case.get("keeps", {})
    kept = {s.id: keeps_text(s.keeps_s) for s in gpu.sessions if s.keeps_s is not None}
    assert kept == keeps
    for id_, text in keeps.items():
        assert any(line.endswith(f"{id_}.ipynb (ada) {text}") for line in lines)
        assert rows["Has the GPU"] == f"{id_}.ipynb {text}"
    for id_, text in case["waits"].items():
        assert any(f"{id_}.ipynb (ada): {text or 'nobody can tell'} (has" in line for line in lines)
        own = dict(StatusView(gpu, mine=id_, problem="", enabled=True).rows())
        assert own["Wait"].partition(", ")[2] == text


def test_programs_outside_are_named_as_far_as_one_may_see_them() -> None:
    own = OutsideProgram(pid=4711, owner="ada", name="python3", used_bytes=3 << 30)
    others = OutsideProgram(pid=0, owner="another user", name="another user", used_bytes=1 << 30)
    assert outside_text(own) == "python3 (pid 4711)"
    assert outside_text(others) == "another user"
    gpu = msgspec.structs.replace(status_of(CASES[0]), outside=[own, others])
    text = "\n".join(gpu_lines(gpu, Style(False)))
    assert "outside Kiwi: python3 (pid 4711), 3 GiB" in text
    assert "outside Kiwi: another user, 1 GiB" in text
