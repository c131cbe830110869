"""Tests of random suspensions: what is counted and compared, and a job that dies of one."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

import kiwi_emulator as emulator


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_results_are_identical_after_suspensions_by_both_pagers(stage, part, monkeypatch):
    suspensions = part("suspensions")
    monkeypatch.setattr(part("suspending"), "EMULATED_COUNT", 3)
    suspensions.run(stage)
    suspensions.run_inprocess(stage)
    for name in (
        f"{way}.{job}" for way in ("checkpoint", "inprocess") for job in ("driver", "partner")
    ):
        row = stage.rows[name]
        assert "identical" in row["value"], row
        assert row["passed"] is True
        assert row["suspensions"] >= 3
        assert row["moved_bytes"] > 0
        assert row["mean_out_s"] > 0


@pytest.fixture
def outside(stage, part):
    one = part("suspending").Outside(stage, "driver", 1 << 22, 1000)
    yield one
    one.caller.close()


def test_a_job_that_dies_is_a_row_that_says_how(stage, part, outside):
    suspensions = part("suspensions")

    def kill() -> None:
        part("stage").wait_until(lambda: outside.job.count, 30.0, "a suspension")
        os.kill(outside.program.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    part("suspending").from_outside([outside], 30.0, lambda _: None)
    killer.join()
    outside.close()
    suspensions._judge(stage, "checkpoint", outside.job, "the digest of an undisturbed run")
    row = stage.rows["checkpoint.driver"]
    assert "SIGKILL" in row["value"]
    assert row["passed"] is False


def test_a_move_that_hangs_ends_the_suspensions_of_this_job(stage, part, outside, monkeypatch):
    suspending = part("suspending")
    monkeypatch.setattr(suspending, "MOVE_S", 0.5)
    emulator.Faults(stage.state).set("hang", operation="checkpoint")
    suspending.from_outside([outside], 30.0, lambda _: None)
    emulator.Faults(stage.state).clear()
    outside.close()
    assert outside.job.trouble.startswith("page_out: hangs")


def test_a_wrong_result_fails_the_row(stage, part):
    suspensions, suspended = part("suspensions"), part("suspending").Suspended
    said = {"rounds": 7, "digest": "as it should be", "ballast_same": True}
    for digest, same in (("as it should be", True), ("another", False)):
        job = suspended("torch", "torch", count=100, wanted=100, said=dict(said))
        suspensions._judge(stage, "checkpoint", job, digest)
        assert stage.rows["checkpoint.torch"]["passed"] is same
    job = suspended("torch", "torch", count=60, wanted=100, said=said | {"ballast_same": False})
    suspensions._judge(stage, "checkpoint", job, "as it should be")
    assert "60 of 100, DIFFERENT" in stage.rows["checkpoint.torch"]["value"]
    job = suspended("torch", "torch", count=60, wanted=100, said=said)
    suspensions._judge(stage, "checkpoint", job, "as it should be")
    assert stage.rows["checkpoint.torch"]["passed"] is None


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_crowd_says_how_long_nvml_took(stage, part, monkeypatch):
    suspensions = part("suspensions")
    monkeypatch.setattr(part("suspending"), "EMULATED_COUNT", 2)
    suspensions.run_crowd(stage)
    for job in ("driver", "partner"):
        row = stage.rows[f"crowd.{job}"]
        assert "identical" in row["value"], row
        longest = stage.rows[f"crowd.{job}: longest call of NVML"]
        assert longest["passed"] is (longest["value"] <= suspensions.STANDSTILL_S)


def test_a_call_of_nvml_that_does_not_return_counts(part, monkeypatch):
    job = part("suspended_job")
    entered, release = threading.Event(), threading.Event()

    class Nvml:
        def nvmlInit(self):  # noqa: N802
            pass

        def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
            return index

        def nvmlDeviceGetMemoryInfo(self, _device):  # noqa: N802
            entered.set()
            release.wait(60)

    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    reading = job.Reading()
    assert entered.wait(60)
    first = reading.longest_s()
    while reading.longest_s() <= first:
        pass
    release.set()
