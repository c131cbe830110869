"""Tests of how the cost of the gate is measured: by children of zygotes, in random order."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from small_stage import GPU_SCRIPTS


@pytest.fixture
def zygote(stage: Any) -> Any:
    one = stage.spawn([sys.executable, str(GPU_SCRIPTS / "zygote.py"), "driver"])
    assert one.line(60) == {"ready": True}
    return one


def order(zygote: Any, what: str, rounds: int = 20) -> dict[str, Any]:
    zygote.say(json.dumps({"what": what, "rounds": rounds}) + "\n")
    said: dict[str, Any] = zygote.line(60)
    return said


def test_each_measurement_is_a_process_of_its_own(zygote: Any) -> None:
    """The second one could not start the driver if the first one had started it in the zygote."""
    for _ in range(2):
        said = order(zygote, "loop")
        assert said["median_us"] >= said["p10_us"] > 0
        assert said["user_us"] >= 0
        assert said["owned_bytes"] == 0


def test_a_measurement_that_fails_says_why_and_the_next_one_runs(zygote: Any) -> None:
    assert "torch" in order(zygote, "calls")["failed"], "it needs the CUDA runtime"
    assert order(zygote, "loop")["median_us"] > 0


def test_a_child_of_a_zygote_under_the_library_owns(stage: Any, part: Any) -> None:
    """A child of a process that has not used the driver is a program like any other."""
    gate = part("gate")
    env = gate.environment(stage, "alone", "")
    one = stage.spawn([sys.executable, str(GPU_SCRIPTS / "zygote.py"), "driver"], env)
    assert one.line(60) == {"ready": True}
    with pytest.raises(RuntimeError, match="unknown"):
        gate._measure(stage, one, "unknown", 1)
    assert gate._measure(stage, one, "loop", 20)["owned_bytes"] > 0


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_every_way_is_measured_and_is_what_its_name_says(stage: Any, part: Any) -> None:
    gate = part("gate")
    gate.run(stage)
    ways = [words for way, (words, _, _) in gate.WAYS.items() if way not in ("bare", "expandable")]
    for words in ways:
        row = stage.rows[f"a step: {words}"]
        assert row["value"] > 0
        assert len(row["medians_us"]) == gate.EMULATED_ROUNDS
        assert row["spread"][0] <= row["value"] <= row["spread"][1]
        assert row["noise_spread"] == stage.rows["a step: without Kiwi, once more"]["spread"]
    assert stage.rows["the library owned in-process, and nowhere else"]["passed"] is True
    assert stage.rows["added: a second stream, used once"]["us"] > 0


def test_the_order_of_the_ways_is_random_and_complete(
    stage: Any, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = part("gate")
    orders: list[Any] = []

    def measured(_stage: Any, way: Any, _what: str, _steps: int) -> dict[str, Any]:
        orders.append(way)
        return {"median_us": 1.0}

    monkeypatch.setattr(gate, "_measure", measured)
    monkeypatch.setattr(gate, "EMULATED_ROUNDS", 6)
    found = {way: way for way in gate.WAYS}
    *_, last = gate._rounds(stage, found, "loop", 1, 0.0)
    rounds = [orders[at : at + len(found)] for at in range(0, len(orders), len(found))]
    assert [sorted(one) for one in rounds] == [sorted(found)] * 6
    assert len({tuple(one) for one in rounds}) > 3
    assert all(len(runs) == 6 for runs in last.values())
