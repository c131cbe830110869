"""Tests of ``kiwi simulate``: the table, the files, and the errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.sched.events import SettingsChanged
from kiwi_core.sched.replay import JournalEntry, JournalHeader, decode_line, encode_line
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import Setup, SimulatedMachine
from kiwi_core.simulate.trace import from_lines
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, NS_PER_S

if TYPE_CHECKING:
    from pathlib import Path


Kiwi = "Callable[..., Result]"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return the journal that a daemon with a quantum of 12 s writes in half an hour."""
    path = tmp_path / "GPU-secret.journal"
    header = JournalHeader(
        total_bytes=80 * GIB, tq_ns=12 * NS_PER_S, anti_thrash=AntiThrash.ALWAYS,
        host_budget_bytes=300 * GIB, gpu_uuid="GPU-secret", wall_time_s=1.7e9, first_op=1,
        config=DEFAULTS,
    )  # fmt: skip
    with path.open("wb") as file:
        file.write(encode_line(header))
        Simulation(
            generate("6+1", hours=0.5),
            SimulatedMachine(out_bytes_per_s=8e9, in_bytes_per_s=12e9), Setup(),
            record=lambda now_ns, event, actions: file.write(
                encode_line(JournalEntry(now_ns=now_ns, event=event, actions=actions))
            ) and None,
        ).run()  # fmt: skip
    return path


def test_quanta_side_by_side(kiwi: Kiwi) -> None:
    result = kiwi("simulate", "--mix", "6+1", "--hours", "0.5", "--tq", "10", "30")
    assert result.code == 0
    head = next(line for line in result.out.splitlines() if "interactive, TQ" in line)
    assert head.split() == "interactive, TQ 10 s interactive, TQ 30 s".split()
    for row in ("wait, cells under 30 s of GPU", "  95 %", "useful share", "fairness (Jain)"):
        assert any(line.startswith(row) for line in result.out.splitlines()), row
    assert "6 interactive sessions and 1 training, 2.3 out, 6 in GB/s" in result.out
    assert result.err == ""


def test_the_same_again_from_the_same_seed(kiwi: Kiwi) -> None:
    options = ("simulate", "--mix", "small", "--hours", "0.3", "--json", "-")
    first = kiwi(*options, "--seed", "3")
    assert first.out == kiwi(*options, "--seed", "3").out
    assert first.out != kiwi(*options, "--seed", "4").out


def test_files_hold_everything(kiwi: Kiwi, tmp_path: Path) -> None:
    data, picture = tmp_path / "r.json", tmp_path / "w.svg"
    result = kiwi(
        "simulate", "--mix", "heavy", "--hours", "0.2", "--gpus", "2", "--jobs", "1",
        "--gbps", "8,12", "--memory", "40GiB", "--kill", "0.2", "--refuse", "0.1", "--hang", "0.1",
        "--users", "--json", str(data), "--svg", str(picture),
    )  # fmt: skip
    assert result.code == 0
    assert "2 GPUs, each" in result.out
    assert "8 out, 12 in GB/s" in result.out
    assert "kernels that died" in result.out
    assert "share while wanting" in result.out
    told = json.loads(data.read_text())
    assert told["work"] == {
        "mix": "heavy", "trace": None, "hours": 0.2, "sessions": None, "seed": 0, "gpus": 2,
    }  # fmt: skip
    assert told["machine"]["out_gbps"] == 8.0
    assert told["machine"]["total_bytes"] == 40 * GIB
    (only,) = told["results"]
    assert (only["policy"], only["tq_s"], only["anti_thrash"]) == ("interactive", 30.0, "on")
    assert only["killed"] > 0
    assert {"p50", "p95", "p99", "max"} <= set(only["short"]["wait_s"])
    assert only["classes"][0]["cells"] == "under 2 s"
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")


def test_a_journal_is_simulated_on_its_own_machine_and_settings(kiwi: Kiwi, journal: Path) -> None:
    told = json.loads(kiwi("simulate", "--journal", str(journal), "--json", "-").out)
    assert told["results"][0]["tq_s"] == 12.0
    assert told["results"][0]["anti_thrash"] == "always"
    assert told["machine"]["host_budget_bytes"] == 300 * GIB
    # as measured, including the fixed cost of each move
    assert 6 < told["machine"]["out_gbps"] < 8.1
    assert 8 < told["machine"]["in_gbps"] < 12.1
    assert told["machine"]["swap_latency_s"] == 0.0
    other = ("--tq", "40", "--anti-thrash", "on", "--gbps", "50", "--host-memory", "1TiB")
    told = json.loads(kiwi("simulate", "--journal", str(journal), *other, "--json", "-").out)
    assert told["results"][0]["tq_s"] == 40.0
    assert told["machine"]["in_gbps"] == 50.0
    assert told["machine"]["swap_latency_s"] == 0.1


def test_the_recorded_run_is_shown_beside_the_simulated_ones(kiwi: Kiwi, journal: Path) -> None:
    both = ("simulate", "--journal", str(journal), "--policy", "round-robin", "interactive")
    result = kiwi(*both)
    head = next(line for line in result.out.splitlines() if "as it was" in line)
    assert head.split("  ")[-2].strip() == "round-robin, TQ 12 s"
    assert head.endswith("interactive, TQ 12 s")
    told = json.loads(kiwi(*both, "--json", "-").out)
    assert [one["policy"] for one in told["results"]] == ["round-robin", "interactive"]
    assert told["real"]["cells"] == told["results"][0]["cells"]
    assert told["real"]["short"]["wait_s"]["max"] > 0
    assert json.loads(kiwi("simulate", "--hours", "0.1", "--json", "-").out)["real"] is None


def test_of_a_journal_the_policy_that_was_in_force_comes_first(kiwi: Kiwi, journal: Path) -> None:
    def simulated(*options: str) -> list[str]:
        told = json.loads(kiwi("simulate", "--journal", str(journal), *options, "--json", "-").out)
        return [one["policy"] for one in told["results"]]

    assert simulated() == ["round-robin", "interactive"]
    assert simulated("--policy", "interactive") == ["interactive"]
    lines = journal.read_bytes().splitlines(keepends=True)
    first = decode_line(lines[1])
    assert isinstance(first, JournalEntry)
    changed = JournalEntry(
        now_ns=first.now_ns, event=SettingsChanged(policy="interactive"), actions=[]
    )
    journal.write_bytes(b"".join([lines[0], encode_line(changed), *lines[1:]]))
    assert simulated() == ["interactive", "round-robin"]


def test_a_journal_since_some_time(kiwi: Kiwi, journal: Path) -> None:
    options = ("simulate", "--journal", str(journal), "--json", "-", "--since")
    whole, half = (
        json.loads(
            kiwi(*options, datetime.fromtimestamp(1.7e9 + later_s, timezone.utc).isoformat()).out
        )["real"]
        for later_s in (0, 900)
    )
    assert 0 < half["cells"] < whole["cells"]
    assert "since then" in kiwi(*options, "1h").err
    assert kiwi("simulate", "--mix", "small", "--since", "1h").code == 1


def test_an_anonymised_journal_is_a_trace(kiwi: Kiwi, journal: Path, tmp_path: Path) -> None:
    where = tmp_path / "trace.json"
    assert kiwi("simulate", "--anonymise", str(journal), "-o", str(where)).code == 0
    assert b"secret" not in where.read_bytes()
    assert len(from_lines(where.read_bytes().splitlines()).sessions) == 7
    by_trace = json.loads(kiwi("simulate", "--trace", str(where), "--json", "-").out)
    by_journal = json.loads(kiwi("simulate", "--journal", str(journal), "--json", "-").out)
    assert by_trace["results"] == by_journal["results"]


def test_a_mix_can_be_written_as_a_trace(kiwi: Kiwi, tmp_path: Path) -> None:
    where = tmp_path / "trace.json"
    kiwi("simulate", "--mix", "small", "--hours", "0.3", "--seed", "5", "-o", str(where))
    assert from_lines(where.read_bytes().splitlines()) == generate("small", hours=0.3, seed=5)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--mix", "all"], 2, "invalid choice"),
        (["--policy", "best"], 2, "round-robin"),
        (["--tq", "0"], 2, "not a number from 0.1 to 86400"),
        (["--gbps", "fast"], 2, "not a number from 0.01"),
        (["--gpus", "0"], 2, "not a whole number from 1"),
        (["--memory", "1MiB"], 2, "less than 1 GiB"),
        (["--memory", "much"], 2, "is not a size"),
        (["--mix", "small", "--trace", "x"], 2, "not allowed"),
        (["--trace", "/nowhere"], 1, "kiwi simulate --anonymise"),
        (["--journal", "/nowhere"], 1, "kiwi replay --help"),
        (["--hours", "0.1", "--svg", "/nowhere/x.svg"], 1, "directory that exists"),
        (["--mix", "6+2", "--sessions", "1"], 1, "at least 2"),
        (["--nodes", "2", "--trace", "-"], 1, "--nodes needs a mix"),
        (["--nodes", "2", "--place", "best"], 2, "invalid choice"),
        (["--mix", "6+1", "--hours", "1", "--host-memory", "1GiB"], 1, "more system RAM"),
    ],
)  # fmt: skip
def test_errors_come_with_a_remedy(kiwi: Kiwi, options: list[str], code: int, says: str) -> None:
    result = kiwi("simulate", *options)
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err


def test_progress_of_long_runs_is_told(kiwi: Kiwi) -> None:
    result = kiwi("simulate", "--hours", "12", "--gpus", "48", "--jobs", "1", "--sessions", "1")
    assert result.code == 0
    assert "simulated: 100%" in result.err
    assert result.err.count("\n") <= 11


def test_a_cluster_compares_rules_of_placing(kiwi: Kiwi) -> None:
    options = (
        "simulate", "--mix", "small", "--hours", "0.2", "--nodes", "2", "--gpus", "2",
        "--stay", "0.1", "--places", "3", "--place", "pack", "wait", "--jobs", "1",
    )  # fmt: skip
    result = kiwi(*options)
    assert result.code == 0, result.err
    assert "2 nodes × 2 GPUs, each" in result.out
    assert "TQ 30 s, pack" in result.out
    assert "sessions that waited for a place" in result.out
    told = json.loads(kiwi(*options, "--json", "-").out)
    assert told["cluster"] == {
        "nodes": 2, "gpus": 2, "places": 3, "stay_hours": 0.1, "weight_delay_s": 60.0,
    }  # fmt: skip
    assert [one["place"] for one in told["results"]] == ["pack", "wait"]
    assert told["results"][0]["cells"] == told["results"][1]["cells"]
