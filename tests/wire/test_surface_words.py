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
from kiwi_core.sched.model.needs import PEAKS_KEPT
from kiwi_core.states import AntiThrash
from kiwi_core.units import MIB
from kiwi_core.wire.status import GpuStatus, MemoryStatus, OutsideProgram, SchedulerStatus
from kiwi_core.wire.words import (
    BURSTS_COUNTED,
    counted_text,
    keeps_text,
    load_text,
    outside_text,
    turn_text,
    wait_text,
)
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


def test_a_need_that_is_more_than_what_is_held_is_said_of_those_that_run_or_wait() -> None:
    assert BURSTS_COUNTED == PEAKS_KEPT
    gpu = status_of(CASES[1])
    sizes = {"a": (452, 2, 0), "b": (452, 0, 400), "c": (None, 2, 0)}
    sessions = [
        msgspec.structs.replace(
            one,
            peak_bytes=None if peak is None else peak * MIB,
            resident_bytes=resident * MIB,
            paged_out_bytes=out * MIB,
        )
        for one in gpu.sessions
        for peak, resident, out in [sizes[one.id]]
    ]
    gpu = msgspec.structs.replace(gpu, sessions=sessions)
    words = "counted with up to 452 MiB, the most of its last 8 bursts; it holds 2 MiB now"
    assert [counted_text(one) for one in sessions] == [words, "", ""]
    assert [line.strip() for line in gpu_lines(gpu, Style(False)) if "counted" in line] == [
        f"needs     a.ipynb (ada): {words}"
    ]
    for mine, row in (("a", words), ("", f"a.ipynb: {words}")):
        rows = StatusView(gpu, mine=mine, problem="", enabled=True).rows()
        assert [text for word, text in rows if word == "Need"] == [row]
    idle = msgspec.structs.replace(gpu, holders=[])
    assert not any("counted" in line for line in gpu_lines(idle, Style(False)))


def test_why_the_driver_moves_what_the_library_was_asked_to_move_is_said_to_its_user() -> None:
    gpu = status_of(CASES[1])
    why = "The driver moves its memory: a profiler is in it. Start it without."
    sessions = [
        msgspec.structs.replace(one, pager_text=why if one.id == "a" else "")
        for one in gpu.sessions
    ]
    gpu = msgspec.structs.replace(gpu, sessions=sessions)
    assert f"a.ipynb (ada): {why}" in "\n".join(gpu_lines(gpu, Style(False)))
    for mine, rows in (("a", [why]), ("b", [])):
        view = StatusView(gpu, mine=mine, problem="", enabled=True)
        assert [text for word, text in view.rows() if word == "Pager"] == rows
