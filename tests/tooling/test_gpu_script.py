"""Tests of tools/gpu/run_all.py without a GPU.

No hang, crash or stopped program may cost more than the part that met it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tools/gpu"

MODULES = ("conductor", "plan", "stage", "suites", "summary", "paging", "rehearse", "selftest")


@pytest.fixture
def script(monkeypatch):
    """Import its modules, which import each other by their plain names."""
    monkeypatch.syspath_prepend(str(GPU))
    import conductor
    import plan
    import stage
    import suites

    yield conductor, plan, stage, suites
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def run(script, tmp_path):
    """Return a run whose parts are the functions of a little script."""
    conductor = script[0]
    work = tmp_path / "work"
    work.mkdir()
    one = conductor.Run(tmp_path, work, time.monotonic() + 600, None, {"parts": {}})
    one.script = tmp_path / "parts.py"
    return one


HEAD = """
import json, os, signal, subprocess, sys, time
def row(name, **more):
    file = sys.argv[sys.argv.index("--work") + 1] + "/" + part + ".rows"
    words = {"name": name, "value": 1, "unit": "", "target": "", "passed": True}
    with open(file, "a") as rows:
        rows.write(json.dumps(words | more) + "\\n")
part = sys.argv[sys.argv.index("--part") + 1]
"""


def part(script, name, limit_s=600.0, least_s=0.0):
    return script[1].Part(name, "", "?", least_s, limit_s)


def results(run):
    return json.loads((run.folder / "results.json").read_text())["parts"]


def test_it_runs_every_test_that_needs_a_gpu(script):
    suites = script[3]
    run = [ROOT / path for path in (*suites.GPU_TESTS, suites.INPROCESS, suites.CONFORMANCE)]
    marked = [
        path
        for folder in ("tests", "native/tests", "emulator", "integrations")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__) and re.search(r"\bmarks?\.gpu\b", path.read_text())
    ]
    assert marked
    missed = [path for path in marked if not any(path.is_relative_to(one) for one in run)]
    assert not missed
    assert all(path.exists() for path in run)


def test_every_part_is_there_once_and_its_function_exists(script):
    plan = script[1]
    names = [one.name for parts in plan.SETS.values() for one in parts]
    assert len(names) == len(set(names)) == len(plan.PARTS) - 1
    for one in plan.PARTS.values():
        module, function = one.function.split(":")
        assert f"def {function}(" in (GPU / f"{module}.py").read_text()
        assert 0 < one.least_s < one.limit_s


def test_the_safe_sets_have_time_for_all_their_parts(script):
    """The budget is ten minutes, and each part but one takes as long as it may."""
    plan = script[1]
    for name in ("first", "second", "third"):
        limits = sorted(one.limit_s for one in plan.SETS[name])
        assert sum(limits[:-1]) + plan.FACTS.limit_s < 570, name
    safe = [one.name for one in plan.FIRST + plan.SECOND]
    assert not {"quirks_dangerous", "killed", "synchronise", "conformance"} & set(safe)


def test_the_readme_names_every_part_with_its_limit(script):
    text = (ROOT / "benchmarks/README.md").read_text()
    for name, parts in script[1].SETS.items():
        for one in parts:
            rows = [row for row in text.splitlines() if f"`{one.name}`" in row]
            assert any(row.startswith(f"| {name} |") for row in rows), one.name
            assert any(f"{one.limit_s:g}" in row for row in rows), one.name


def test_the_slots_in_the_readme_have_time_for_all_their_parts(script):
    """The machine's facts come first, and take a few seconds; the last part gets what is left."""
    plan = script[1]
    text = (ROOT / "benchmarks/README.md").read_text()
    slots = re.findall(r'/slot-(\d)" \\\n +--only ([\w ]+) --budget-seconds (\d+)', text)
    assert [number for number, _, _ in slots] == ["1", "2", "3", "4"]
    for number, names, budget in slots:
        parts = [plan.PARTS[name] for name in names.split()]
        before = plan.FACTS.least_s + sum(one.limit_s for one in parts[:-1])
        assert before + parts[-1].least_s <= int(budget), number
        assert int(budget) <= (540 if number == "1" else 570)


def test_a_part_that_fails_leaves_its_rows_and_the_next_one_runs(script, run):
    run.script.write_text(HEAD + "row('first')\nif part == 'bad': raise RuntimeError('gone')")
    run.part(part(script, "bad"))
    run.part(part(script, "good"))
    found = results(run)
    assert [row["name"] for row in found["bad"]["rows"]] == ["first", "this part"]
    assert found["bad"]["status"] == "failed: status 1"
    assert found["good"]["status"] == "done"
    assert "gone" in (run.folder / "parts.log").read_text()
    assert "**FAIL**" in (run.folder / "summary.md").read_text()


def test_a_part_that_hangs_is_ended_with_all_that_it_started(script, run):
    """It ignores SIGTERM, and has a stopped program and one in its own session."""
    conductor = script[0]
    run.script.write_text(
        HEAD
        + """
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
stopped, away = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
stopped.send_signal(signal.SIGSTOP)
row("pids", value=[stopped.pid, away.pid])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if part == "hangs":
    while True: time.sleep(1000)
"""
    )
    run.part(part(script, "hangs", limit_s=conductor.GRACE_S + 10))
    run.part(part(script, "leaves"))
    found = results(run)
    assert found["hangs"]["status"] == "ended at its limit"
    assert found["leaves"]["status"] == "done"
    for name in ("hangs", "leaves"):
        pids = found[name]["rows"][0]["value"]
        assert len(pids) == 2
        # A process that has ended and is not reaped has no environment.
        assert not any(map(conductor.environment_of, pids)), "what a part starts ends with it"


def test_rows_are_on_disk_while_the_part_runs(script, run):
    seen = run.folder / "results.json"
    run.script.write_text(
        HEAD
        + f"""
row("first")
while "first" not in (open({str(seen)!r}).read() if os.path.exists({str(seen)!r}) else ""):
    time.sleep(0.05)
row("seen")
"""
    )
    run.part(part(script, "rows", limit_s=60))
    assert [row["name"] for row in results(run)["rows"]["rows"]] == ["first", "seen"]


def test_a_row_that_is_half_written_does_not_hurt(script, run):
    text = HEAD + "row('whole')\nrow('again', value=1)\nrow('again', value=2)\n"
    text += "file = sys.argv[sys.argv.index('--work') + 1] + '/' + part + '.rows'\n"
    text += "open(file, 'a').write('{\"name\": \"ha')\n"
    run.script.write_text(text)
    run.part(part(script, "rows"))
    assert [(r["name"], r["value"]) for r in results(run)["rows"]["rows"]] == [
        ("whole", 1),
        ("again", 2),
    ]


def test_a_part_for_which_no_time_is_left_is_left_out(script, run):
    run.script.write_text(HEAD + "row('ran')")
    run.part(part(script, "long", least_s=10_000, limit_s=20_000))
    entry = results(run)["long"]
    (row,) = entry["rows"]
    assert (row["name"], row["passed"]) == ("this part", None), "it neither passed nor failed"
    assert "it takes 10000 s" in entry["status"] == row["value"]


def test_a_long_log_is_cut_at_its_beginning(script, run):
    conductor = script[0]
    (run.folder / "parts.log").write_bytes(b"x" * (conductor.LOG_BYTES + 10) + b"the end")
    run.script.write_text(HEAD)
    run.part(part(script, "any"))
    log = (run.folder / "parts.log").read_bytes()
    assert len(log) < conductor.LOG_BYTES
    assert b"the end" in log


# --- programs of a part --------------------------------------------------------------------------


@pytest.fixture
def stage(script, tmp_path):
    ends_s = time.monotonic() + 600
    return script[2].Stage("part", tmp_path, tmp_path, True, ends_s)


def python(code):
    return [sys.executable, "-u", "-c", code]


def test_a_line_that_does_not_come_is_not_waited_for(stage):
    program = stage.spawn(python("print('{\"a\": 1}'); import time; time.sleep(1000)"))
    assert program.line(60) == {"a": 1}
    with pytest.raises(TimeoutError):
        program.line(0.2)
    assert program.end() == -signal.SIGTERM


def test_a_program_that_ends_is_told_from_one_that_hangs(script, stage):
    program = stage.spawn(python("exit(3)"))
    with pytest.raises(script[2].Ended, match="status 3"):
        program.line(60)
    program.end()


def test_a_program_ends_by_itself_where_it_can(stage):
    program = stage.spawn(python("import sys; sys.stdin.read(); print('{\"last\": true}')"))
    assert program.end() == 0


def test_a_stopped_and_deaf_program_is_ended_all_the_same(stage, script, monkeypatch):
    monkeypatch.setattr(script[2], "END_S", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('{}'); time.sleep(1000)"
    program = stage.spawn(python(code))
    program.line(60)
    program._process.send_signal(signal.SIGSTOP)
    assert program.end() == -signal.SIGKILL


def test_what_goes_wrong_is_a_row(stage):
    with stage.attempt("a question"):
        raise RuntimeError("no answer")
    row = json.loads((stage.work / "part.rows").read_text())
    assert (row["name"], row["passed"]) == ("a question", False)
    assert "no answer" in row["value"]


# --- the whole, on the emulated driver -----------------------------------------------------------


def run_all(tmp_path, *words):
    """Run the script as on a GPU machine: from any directory, with an explicit environment."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, str(GPU / "run_all.py"), str(out), "--emulated-selftest", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "results.json").read_text())
    return found["parts"], (out / "summary.md").read_text()


@pytest.mark.e2e
def test_parts_of_it_on_the_emulated_driver(tmp_path):
    parts, summary = run_all(tmp_path, "--only", "checkpoint", "paging", "gpu_tests")
    assert {part["status"] for part in parts.values()} == {"done"}
    verdicts = [row["passed"] for part in parts.values() for row in part["rows"]]
    assert False not in verdicts
    assert verdicts.count(True) >= 4
    assert "these figures mean nothing" in summary


@pytest.mark.e2e
@pytest.mark.parametrize("fault", ["hang:checkpoint", "stopped-job", "slow-test"])
def test_a_fault_costs_the_part_that_meets_it_and_no_other(tmp_path, fault):
    parts, _ = run_all(
        tmp_path, "--fault", fault, "--part-seconds", "30", "--only", "paging", "gpu_tests"
    )
    assert set(parts) == {"machine", "paging", "gpu_tests"}
    hit = "gpu_tests" if fault == "slow-test" else "paging"
    failed = {name for name, part in parts.items() if False in [r["passed"] for r in part["rows"]]}
    assert failed == {hit}
    for part in parts.values():
        assert part["rows"]


@pytest.mark.e2e
def test_packages_that_are_missing_are_named_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GPU / "run_all.py"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cuda.bindings" in done.stderr
