"""Tests of the probes of a driver's quirks: on the emulated driver, on one that hangs, and with a
target that dies."""

from __future__ import annotations

import json

import pytest

import kiwi_emulator as emulator


@pytest.fixture
def book(part, stage):
    return part("quirks_book").Book(stage)


@pytest.fixture
def _patient(part, monkeypatch):
    """Set the time after which a call counts as waiting: a busy machine may delay the answer of one
    that returns at once."""
    monkeypatch.setattr(part("quirks_calls"), "QUIET_S", 5.0)


def answers(stage):
    return {name: row["value"] for name, row in stage.rows.items()}


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_patient")
def test_the_safe_probes_say_of_the_emulator_what_the_table_says(stage, part, monkeypatch):
    calls = part("quirks_calls")
    monkeypatch.setattr(calls, "HARMLESS", ("cuMemcpyDtoH", "cuMemFree", "read_pinned"))
    monkeypatch.setattr(calls, "DEADLY", ("cuEventQuery", "cuCtxSynchronize"))
    emulator.set_driver(stage.state, "worst")
    part("quirks").run(stage)
    assert not [name for name in stage.rows if name.startswith("group.")]
    compared = [row for row in stage.rows.values() if "as_the_emulator" in row]
    other = [row for row in compared if row["as_the_emulator"] != "same"]
    assert len(compared) > 30
    assert not other, "an emulated run of the part writes quirks_emulator.json: copy it"
    table = (stage.folder / "quirks.md").read_text()
    assert all(name in table for name in answers(stage) if name.startswith("state."))
    assert "| SIGSEGV [G, 580 and 595] |" in table
    assert f"as the emulator: {len(compared)} same, 0 different" in stage.rows["compared"]["value"]


def test_every_row_of_the_table_is_the_name_of_a_probe(part):
    known = part("quirks_known").KNOWN
    asked = part("quirks_book").emulator_answers()
    assert not set(known) - set(asked)


def test_the_emulator_at_its_worst_answers_as_others_saw(part):
    book, known = part("quirks_book"), part("quirks_known")
    asked = book.emulator_answers()
    other = {
        name
        for name, seen in known.KNOWN.items()
        if book.compared(asked[name], seen.answers) != "same"
    }
    assert other == set(known.KINDER_ELSEWHERE)


def test_the_emulator_at_its_worst_answers_as_a_real_gpu_did(part):
    book, known = part("quirks_book"), part("quirks_known")
    asked, measured = book.emulator_answers(), book.measured_answers()
    assert len(measured) > 80
    assert not set(measured) - set(asked), "rows without a probe"
    other = {
        name for name, seen in measured.items() if book.compared(asked[name], (seen,)) != "same"
    }
    assert other == set(known.OTHER_THAN_THE_EMULATOR)


def test_a_call_that_hangs_is_a_row_and_the_next_probes_run(stage, part, book, monkeypatch):
    states = part("quirks_states")
    emulator.Faults(stage.state).set("hang", operation="restore")
    with monkeypatch.context() as patch:
        patch.setattr(states, "CALL_S", 5.0)
        book.group("wrong_states", 5, states.wrong_states)
    said = answers(stage)
    assert said["state.running.restore"].startswith("hangs")
    assert "restore hangs" in said["group.wrong_states"]
    # The fault is used up, and the process that it hit has ended.
    book.group("wrong_states_again", 5, states.wrong_states)
    said = answers(stage)
    assert said["state.running.restore"] == "401 ILLEGAL_STATE"
    assert said["state.round_trip"] == "intact"


@pytest.mark.usefixtures("_patient")
def test_a_target_that_dies_of_a_call_is_a_row_and_is_replaced(stage, part, book, monkeypatch):
    calls = part("quirks_calls")
    monkeypatch.setattr(calls, "DEADLY", ("crash", "cuMemGetInfo"))
    book.group("deadly_calls", 5, calls.deadly_calls)
    said = answers(stage)
    assert said["locked.crash"] == said["checkpointed.crash"] == "SIGSEGV"
    assert said["locked.cuMemGetInfo"] == "returns 0 SUCCESS at once"
    assert said["checkpointed.cuMemGetInfo"] == "returns 304 OPERATING_SYSTEM at once"
    assert stage.rows["checkpointed.cuMemGetInfo"]["intact"] is True


def test_stopped_processes_and_a_failed_restore(stage, part, book, monkeypatch):
    ends = part("quirks_ends")
    # this profile does not say whether a caller's calls wait in turn
    emulator.set_driver(stage.state, "580")
    monkeypatch.setattr(ends, "STOPPED_S", 0.7)
    book.group("stopped", 5, ends.stopped)
    book.group("failed_restore", 5, ends.failed_restore)
    said = answers(stage)
    assert said["stopped.lock"].startswith("hangs")
    assert said["stopped.lock.healthy_same_caller"] == "0 SUCCESS"
    assert said["stopped.jobs_afterwards"] == "intact"
    assert said["failed_restore.restore"] == "2 OUT_OF_MEMORY"
    assert said["failed_restore.again_with_room"] == "304 OPERATING_SYSTEM"
    assert said["failed_restore.after_the_kill"] == "all is free again"


def test_a_group_that_breaks_off_costs_the_others_nothing(stage, part, book):
    def broken(_book, _caller):
        raise RuntimeError("NVML is gone")

    book.group("memory", 1, broken)
    book.group("exits", 1, lambda book, _caller: book.note("exit.while_locked", "exit 1"))
    book.group("signals", 10_000, lambda *_: pytest.fail("there is no time for it"))
    said = answers(stage)
    assert "NVML is gone" in said["group.memory"]
    assert "left out" in said["group.signals"]
    assert stage.rows["exit.while_locked"]["as_the_emulator"] == "different"
    assert json.loads((stage.folder / "quirks.json").read_text()) == {"exit.while_locked": "exit 1"}
