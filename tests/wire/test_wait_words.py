"""Tests of the words for a wait: Python and TypeScript use the same, and figures never rise."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from kiwi_core.states import AntiThrash, Notice
from kiwi_core.units import GIB, MIB
from kiwi_core.wire.messages import Waiting
from kiwi_core.wire.status import GpuStatus, MemoryStatus, OutsideProgram, SchedulerStatus
from kiwi_core.wire.words import format_wait_s, outside_texts, settings_text, waiting_text

TABLE = Path(__file__).parents[1] / "support" / "wait_words.json"
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@pytest.mark.parametrize(
    ("serialised", "why", "text"),
    [
        (True, "", "one at a time"),
        (True, "they have outgrown it", "one at a time: they have outgrown it"),
        (False, "they fit together", "in parallel: they fit together"),
        (False, "", "in parallel"),
    ],
)
def test_sharing_in_words(serialised: bool, why: str, text: str) -> None:
    status = SchedulerStatus(tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=serialised, why=why)
    assert status.sharing == text


@pytest.mark.parametrize(("expected", "low", "high", "why", "text"), json.loads(TABLE.read_text()))
def test_a_wait_in_words(
    expected: float, low: float | None, high: float | None, why: str, text: str
) -> None:
    """The labextension's test reads the same table."""
    assert format_wait_s(expected, low, high, why) == text


@pytest.mark.parametrize(("policy", "end"), [("interactive", ", policy interactive"), ("", "on")])
def test_settings_in_words(policy: str, end: str) -> None:
    status = SchedulerStatus(tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=True, policy=policy)
    assert settings_text(status).startswith("quantum 30 s, anti-thrash on")
    assert settings_text(status).endswith(end)


@pytest.mark.parametrize(
    ("outside_mib", "named_mib", "texts"),
    [
        (6, [], []),
        (600, [], ["600 MiB held by the driver, or by programs that it does not name"]),
        (606, [600], ["600 MiB held by programs outside Kiwi"]),
        (
            900,
            [600, 200],
            [
                "800 MiB held by programs outside Kiwi",
                "100 MiB held by the driver, or by programs that it does not name",
            ],
        ),
    ],
)
def test_memory_outside_kiwi_in_words(
    outside_mib: int, named_mib: list[int], texts: list[str]
) -> None:
    """What can matter to nobody is not shown."""
    gpu = GpuStatus(
        uuid="GPU-1",
        name="g",
        index=0,
        emulated=False,
        memory=MemoryStatus(
            total_bytes=8 * GIB,
            free_bytes=0,
            paged_out_bytes=0,
            host_budget_bytes=0,
            outside_bytes=outside_mib * MIB,
        ),
        scheduler=SchedulerStatus(tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=True),
        holders=[],
        queue=[],
        sessions=[],
        outside=[
            OutsideProgram(pid=8, owner="ann", name="x", used_bytes=size * MIB)
            for size in named_mib
        ],
    )
    assert outside_texts(gpu) == texts


def waiting(**fields: object) -> Waiting:
    return Waiting(**({"burst": 1, "position": 2, "ahead": 1} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            waiting(holder="train.ipynb", expected_wait_s=12.0),
            "Waiting for the GPU: 2nd in line, train.ipynb has it, about 12 s",
        ),
        (
            waiting(
                expected_wait_s=14.0,
                expected_low_s=10.0,
                expected_high_s=26.0,
                expected_why="others go first",
            ),
            "Waiting for the GPU: 2nd in line, 10–25 s (others go first)",
        ),
        (waiting(position=1), "Waiting for the GPU: 1st in line"),
        (waiting(position=0, ahead=0), "Waiting for the GPU"),
        (
            waiting(position=0, activity="its memory is paging in", expected_wait_s=2.0),
            "Its memory is paging in, about 2 s",
        ),
        (waiting(blocked=Notice.BLOCKED_OUTSIDE, detail="Because. Do this."), "Because. Do this."),
        (
            waiting(blocked=Notice.BLOCKED_OUTSIDE, detail="Because.", expected_wait_s=5.0),
            "Because. Expected wait: about 5 s.",
        ),
    ],
)
def test_a_waiting_program_in_words(state: Waiting, text: str) -> None:
    """Notebooks and ``kiwi run`` show this line."""
    assert waiting_text(state) == text


def top_s(text: str) -> float:
    """Return the highest figure of ``text`` in seconds."""
    if text == "any moment":
        return 0.0
    found = re.search(r"([\d.]+) (s|min|h)$", text)
    assert found, text
    return float(found[1]) * SECONDS[found[2]]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_never_rises_by_more_than_its_rounding(seed: int) -> None:
    rng = random.Random(seed)
    low, expected, high = sorted(rng.lognormvariate(4, 2) for _ in range(3))
    before = float("inf")
    while high > 0:
        after = top_s(format_wait_s(expected, low, high))
        assert after <= before * 1.3 + 1
        assert after <= max(high, expected) * 1.3 + 2.5
        before = min(before, after)
        low, expected, high = sorted(
            max(0.0, x - max(0.5, x * 0.1) * rng.choice((0.0, rng.random())))
            for x in (low, expected, high)
        )
        high = 0.0 if high < 0.01 else high
