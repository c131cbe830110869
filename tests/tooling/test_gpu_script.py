"""benchmarks/gpu/run_all.py, on machines without a GPU: what it runs, and what a run that is cut
off leaves behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch):
    """Its modules, which import each other plainly."""
    monkeypatch.syspath_prepend(str(GPU))
    import parts
    import stage

    yield parts, stage
    for name in ("parts", "stage"):
        del sys.modules[name]


@pytest.fixture
def bench(script, tmp_path):
    _, stage = script
    return stage.Bench(tmp_path, True, time.monotonic() + 600, tmp_path, 1.0)


def results(bench):
    return json.loads((bench.folder / "results.json").read_text())


def test_it_runs_every_test_that_needs_a_gpu(script):
    parts, _ = script
    run = [ROOT / path for path in (*parts.GPU_TESTS, parts.INPROCESS, "tests/conformance")]
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__) and re.search(r"\bmarks?\.gpu\b", path.read_text())
    ]
    assert marked
    missed = [path for path in marked if not any(path.is_relative_to(one) for one in run)]
    assert not missed
    assert all(path.exists() for path in run)


def test_what_a_part_found_is_on_disk_before_it_fails(bench):
    seen = []

    def part(bench):
        bench.so_far({"first": 1})
        seen.append(results(bench))
        raise RuntimeError("the driver is gone")

    bench.part("paging", 1, 10, part)
    bench.part("limits", 1, 10, lambda _: {"second": 2})
    assert seen == [{"paging": {"first": 1}}]
    found = results(bench)
    assert found["paging"]["first"] == 1
    assert "the driver is gone" in found["paging"]["failed"]
    assert found["limits"]["second"] == 2


def test_a_part_has_no_more_time_than_its_own(bench):
    left = []
    bench.part("paging", 1, 5, lambda bench: {"left": left.append(bench.left_s)})
    assert left[0] <= 5
    bench.part("training", 10_000, 20_000, lambda _: pytest.fail("there is no time for it"))
    assert "it takes 10000 s" in results(bench)["training"]["skipped"]


def test_only_the_parts_that_are_wanted(bench):
    bench.only = ("limits",)
    for name in ("machine", "limits", "paging"):
        bench.part(name, 1, 5, lambda _: {})
    assert sorted(results(bench)) == ["limits", "machine"]


def test_tests_that_take_too_long_leave_their_log(script, tmp_path):
    _, stage = script
    code = "import time; print('passed one', flush=True)\ntry: time.sleep(600)\n"
    code += "except KeyboardInterrupt: print('a summary')"
    log = tmp_path / "log"
    assert stage.in_a_log([sys.executable, "-c", code], log, 3.0) is None
    assert log.read_text().split("\n") == ["passed one", "a summary", ""]
    assert stage.in_a_log([sys.executable, "-c", "exit(3)"], log, 60.0) == 3


@pytest.mark.e2e
def test_a_part_of_it_on_the_emulated_driver(tmp_path):
    """As on a GPU machine: from anywhere, and nothing but what it is told."""
    command = [
        sys.executable,
        str(GPU / "run_all.py"),
        "--emulated-selftest",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*command, "--only", "paging"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["machine"]["machine"]["gpu"] == "emulated"
    assert [row["intact"] for row in found["paging"]["rows"]] == [True, True]
