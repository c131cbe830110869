from __future__ import annotations

import pytest

import kiwi_emulator as emulator

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(part, monkeypatch):
    monkeypatch.setattr(part("roundtrip"), "EMULATED_BYTES", 4 * MIB)


def test_the_bare_driver_program_comes_back_as_it_was(stage, part):
    part("roundtrip").run(stage)
    row = stage.rows["driver"]
    assert row["value"] == "identical"
    assert row["passed"] is True
    assert row["bytes_hashed"] == 4 * MIB
    assert row["out_bytes"] >= row["bytes_hashed"]
    for library in ("torch", "cupy", "jax"):
        assert "needs the CUDA runtime" in stage.rows[library]["value"]


def test_a_driver_that_hangs_ends_as_a_row_that_says_so(stage, part, monkeypatch):
    roundtrip = part("roundtrip")
    monkeypatch.setattr(roundtrip, "MOVE_S", 0.5)
    emulator.Faults(stage.state).set("hang", operation="checkpoint", count=-1)
    roundtrip.run(stage)
    row = stage.rows["driver"]
    assert row["passed"] is False
    assert "page_out: hangs" in row["value"]


def test_a_changed_byte_is_seen(stage, part, monkeypatch):
    """The digest covers all memory: the job is told to change one byte in the middle."""
    roundtrip = part("roundtrip")
    ask = part("callers").Caller.ask

    def ask_and_change(caller, call, *words, **more):
        answer = ask(caller, call, *words, **more)
        if call == "page_in":
            stage.programs[0].say("change\n")
        return answer

    monkeypatch.setattr(part("callers").Caller, "ask", ask_and_change)
    roundtrip.run(stage)
    assert stage.rows["driver"]["value"] == "different"
