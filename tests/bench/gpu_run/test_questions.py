"""Tests of small questions to the driver, and of moves with and without huge pages."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kiwi_core import compiled


@pytest.fixture
def movers(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The movers start with this process's environment, as they do in the part's process."""
    for name, value in stage.env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.e2e
@pytest.mark.usefixtures("movers")
def test_every_question_has_an_answer(stage: Any, part: Any) -> None:
    part("questions").run(stage)
    answers = {name: row["value"] for name, row in stage.rows.items()}
    assert answers["unmap beside a copy"]["waits"] is False, "the emulator's does not"
    assert set(answers["stack of an idle context"]) == {
        "1024 bytes",
        "512 bytes",
        "0 bytes",
        "back",
    }
    costs = answers["virtual memory"]
    assert set(costs) >= {"2 MiB, plain", "20 MiB, rdma", "20 MiB, descriptor"}
    assert set(costs["2 MiB, plain"]) == {"create", "map", "access", "unmap", "release"}
    assert answers["two moves at once, beside one after the other"] > 0
    assert not [row for row in stage.rows.values() if row.get("passed") is False]


@pytest.mark.e2e
@pytest.mark.usefixtures("movers")
def test_the_driver_moves_a_program_with_and_without_huge_pages(stage: Any, part: Any) -> None:
    huge_pages = part("huge_pages")
    huge_pages.run(stage)
    for way in ("without", "as the machine is", "asked for"):
        for direction in ("out", "in"):
            row = stage.rows[f"{direction}, huge pages {way}"]
            assert row["value"] > 0
            assert row["times_without"] > 0
    assert stage.rows["out, huge pages without"]["in_huge_pages"] == [0]


@pytest.mark.e2e
@pytest.mark.usefixtures("movers")
def test_without_a_compiler_huge_pages_are_not_asked_for(
    stage: Any, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise compiled.Unavailable("There is none.", "Get one.")

    monkeypatch.setattr(compiled, "find_compiler", none)
    part("huge_pages").run(stage)
    assert stage.rows["asked for"]["value"] == "left out: there is no C compiler"
    assert "out, huge pages as the machine is" in stage.rows
    assert "out, huge pages asked for" not in stage.rows


def test_the_preloaded_mmap_asks_for_huge_pages(stage: Any, part: Any) -> None:
    """The machine may give none: what counts is that the mapping is marked."""
    huge_pages = part("huge_pages")
    code = (
        "import json, mmap; room = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS);"
        "print(json.dumps({'asked': ' hg' in open('/proc/self/smaps').read()}))"
    )
    preloaded = stage.env | {"LD_PRELOAD": str(huge_pages.library(stage))}
    assert stage.run([sys.executable, "-c", code], preloaded)["asked"] is True
