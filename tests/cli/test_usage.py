"""Tests of what ``kiwi usage`` requests, and how it shows it to people and programs."""

from __future__ import annotations

import argparse
import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kiwi_core.cli.usage import parse_since
from kiwi_core.wire.messages import UsageBy, UsageReport, UsageRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_process import Result
    from scripted_daemon import ScriptedDaemon

    Kiwi = Callable[..., Result]

ROW = UsageRow(
    owner="ada", name="", mine=True, held_s=5025.5, waited_s=31.5, suspended_s=240.0, moving_s=9.5,
    moved_out_bytes=3 << 30, moved_in_bytes=1 << 30, bursts=40, suspensions=8,
)  # fmt: skip
OTHERS = UsageRow(
    owner="another user", name="", mine=False, held_s=7.0, waited_s=0.0, suspended_s=0.0,
    moving_s=0.0, moved_out_bytes=0, moved_in_bytes=0, bursts=1, suspensions=0,
)  # fmt: skip
BEGAN_S = 1_795_046_400.0


def told(*rows: UsageRow, complete: bool = True) -> UsageReport:
    return UsageReport(began_unix_s=BEGAN_S if rows else None, rows=list(rows), complete=complete)


def test_a_table_for_people(daemon: ScriptedDaemon, kiwi: Kiwi) -> None:
    daemon.usage = told(ROW, OTHERS)
    result = kiwi("usage")
    assert result.code == 0
    title, _, head, mine, others = result.out.splitlines()
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(BEGAN_S))
    assert title == f"since {began}, 1 GPU"
    assert head.split() == ["user", "had", "waited", "suspended", "moved", "cells"]
    assert mine.split("  ")[0] == "ada"
    for shown in ("1 h 23 min", "32 s", "4 min 0 s", "4 GiB", "in 9.5 s", "40"):
        assert shown in mine
    assert others.startswith("another user")
    assert (daemon.asked_usage.by, daemon.asked_usage.since_unix_s) == (UsageBy.USER, 0.0)


def test_several_gpus_are_one_table_and_two_objects(
    scripted: Callable[..., ScriptedDaemon], kiwi: Kiwi
) -> None:
    for index in (0, 1):
        scripted(f"GPU-{index}", index=index).usage = told(ROW)
    result = kiwi("usage", "--by", "notebook")
    assert "2 GPUs" in result.out
    assert "2 h 47 min" in result.out
    assert "8 GiB" in result.out
    assert len(result.out.splitlines()) == 4
    gpus = json.loads(kiwi("usage", "--json").out)["gpus"]
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    (row,) = gpus[0]["rows"]
    assert row == {name: getattr(ROW, name) for name in ROW.__struct_fields__}
    assert gpus[0]["began_unix_s"] == BEGAN_S
    one = json.loads(kiwi("usage", "--json", "--gpu", "1").out)["gpus"]
    assert [gpu["index"] for gpu in one] == [1]


def test_jobs_have_numbers_and_what_ran_in_none_has_a_dash(
    daemon: ScriptedDaemon, kiwi: Kiwi
) -> None:

    daemon.usage = told(msgspec.structs.replace(ROW, name="41"), ROW)
    _, _, head, job, none = kiwi("usage", "--by", "job").out.splitlines()
    assert head.split()[:3] == ["user", "job", "had"]
    assert job.split()[:2] == ["ada", "41"]
    assert none.split()[:2] == ["ada", "-"]
    assert daemon.asked_usage.by is UsageBy.JOB


def test_missing_usage_is_reported(daemon: ScriptedDaemon, kiwi: Kiwi) -> None:
    daemon.usage = told()
    before_s = time.time()
    assert kiwi("usage", "--since", "1h").out.startswith("Nobody has used the GPU")
    assert before_s <= daemon.asked_usage.since_unix_s + 3600 <= time.time()
    daemon.usage = told(ROW, complete=False)
    assert "cannot be written" in kiwi("usage").out


def test_without_a_daemon_it_says_who_would_know(sockets: Any, kiwi: Kiwi) -> None:
    result = kiwi("usage", "--json")
    assert result.code == 1
    assert json.loads(result.out) == {"gpus": []}
    assert "nothing is lost" in result.err
    assert "kiwi daemon" in result.err


def test_a_name_cannot_steer_the_terminal(daemon: ScriptedDaemon, kiwi: Kiwi) -> None:

    daemon.usage = told(msgspec.structs.replace(ROW, name="\x1b[2Jevil"))
    assert "\x1b" not in kiwi("usage", "--by", "notebook").out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800), ("1w", 604800)],
)
def test_since_is_parsed_relative_to_now(text: str, seconds: float) -> None:
    before_s = time.time()
    assert before_s <= parse_since(text) + seconds <= time.time()


def test_dates_are_local() -> None:
    assert parse_since("2026-11-01") == datetime(2026, 11, 1).timestamp()  # noqa: DTZ001
    assert parse_since("2026-11-01T14:30") == datetime(2026, 11, 1, 14, 30).timestamp()  # noqa: DTZ001
    assert parse_since("1900-01-01") == 0
    assert parse_since("99999999w") == 0


@pytest.mark.parametrize("text", ["", "yesterday", "1", "h", "1 fortnight", "2026-13-01", "-1h"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2026-11-01"):
        parse_since(text)
