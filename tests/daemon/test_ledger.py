"""Tests of the accounts on disk: sums, coarsening with age, bounds, and disks that fail."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from kiwi_core.daemon.reports import ledger as ledger_module
from kiwi_core.daemon.reports.ledger import (
    DAY_S,
    FINE_S,
    HOUR_S,
    KEPT_FOR_S,
    Ledger,
    Total,
    UsageBucket,
    bucket_begin_s,
    since_s,
)
from kiwi_core.sched.model.accounts import Account

if TYPE_CHECKING:
    from pathlib import Path

NOW_S = 1_795_270_545.5
ALICE, BOB = 1000, 1001


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "GPU-1.usage")


def at(unix_s: float, uid: int = ALICE, name: str = "a.ipynb", job: str = "") -> UsageBucket:
    return UsageBucket(bucket_begin_s(unix_s), uid, name, job)


def test_usage_is_summed_by_user_and_by_notebook(ledger: Ledger) -> None:
    one = Account(held_ns=3, waited_ns=4, suspended_ns=1, moving_ns=2, moved_out_bytes=5, bursts=1)
    assert ledger.totals(0) == (None, [])
    ledger.add({at(NOW_S): one, at(NOW_S, name="b.ipynb"): one}, NOW_S)
    ledger.add({at(NOW_S): one, at(NOW_S + FINE_S, BOB): Account(held_ns=100)}, NOW_S + FINE_S)
    began, by_user = ledger.totals(0)
    assert began == bucket_begin_s(NOW_S)
    assert by_user == [
        Total(BOB, "", Account(held_ns=100)),
        Total(ALICE, "", one.plus(one).plus(one)),
    ]
    _, by_name = ledger.totals(0, by="name")
    assert by_name == [
        Total(BOB, "a.ipynb", Account(held_ns=100)),
        Total(ALICE, "a.ipynb", one.plus(one)),
        Total(ALICE, "b.ipynb", one),
    ]
    began, later = ledger.totals(bucket_begin_s(NOW_S + FINE_S))
    assert (began, [total.uid for total in later]) == (bucket_begin_s(NOW_S + FINE_S), [BOB])


def test_since_is_as_fine_as_buckets_of_that_age_are() -> None:
    for age_s, length_s in (
        (0, FINE_S),
        (HOUR_S, FINE_S),
        (3 * DAY_S, HOUR_S),
        (90 * DAY_S, DAY_S),
    ):
        began_s = since_s(NOW_S - age_s, NOW_S)
        assert began_s % length_s == 0
        assert 0 <= NOW_S - age_s - began_s < length_s
    assert since_s(0.0, NOW_S) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_year_becomes_coarse_and_no_second_is_lost(ledger: Ledger, seed: int) -> None:
    """Compare sums since any time with a plain list, and check that the file stays small."""
    rng = random.Random(seed)
    entries: list[tuple[float, int]] = []
    now_s = NOW_S
    for _ in range(120):
        now_s += rng.choice((1, 200, 5000, 90_000, 300_000))
        held_ns = rng.randrange(1, 10**12)
        entries.append((now_s, held_ns))
        ledger.add({at(now_s): Account(held_ns=held_ns)}, now_s)
    assert now_s - NOW_S < KEPT_FOR_S
    for _ in range(40):
        since = since_s(rng.uniform(NOW_S - DAY_S, now_s), now_s - HOUR_S)
        since -= since % DAY_S if now_s - since > ledger_module.HOURS_FOR_S - DAY_S else 0
        since -= since % HOUR_S if now_s - since > ledger_module.FINE_FOR_S - HOUR_S else 0
        _, totals = ledger.totals(since)
        expected = sum(held for at_s, held in entries if at_s >= since)
        assert sum(total.account.held_ns for total in totals) == expected
    lengths: dict[int, int] = defaultdict(int)
    with sqlite3.connect(ledger._path) as db:
        for (begins_s,) in db.execute("SELECT begins_s FROM usage"):
            age_s = now_s - begins_s
            lengths[begins_s] += 1
            if age_s > ledger_module.HOURS_FOR_S + DAY_S + 300_000:
                assert begins_s % DAY_S == 0
            elif age_s > ledger_module.FINE_FOR_S + HOUR_S + 300_000:
                assert begins_s % HOUR_S == 0
    db.close()
    assert max(lengths.values()) == 1


def test_very_old_rows_are_deleted(ledger: Ledger) -> None:
    ledger.add({at(NOW_S - KEPT_FOR_S - 10): Account(held_ns=5)}, NOW_S - KEPT_FOR_S)
    ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S + 2 * DAY_S)
    assert ledger.totals(0)[1] == [Total(ALICE, "", Account(held_ns=7))]


def test_the_file_is_bounded_and_the_newest_stay(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "ROWS_MAX", 100)
    for n in range(30):
        begins_s = NOW_S + n * FINE_S
        rows = {at(begins_s, name=f"n{k}"): Account(held_ns=1) for k in range(20)}
        ledger.add(rows, begins_s)
    began_s, totals = ledger.totals(0, by="name")
    assert len(totals) == 20
    held = sum(total.account.held_ns for total in totals)
    assert held <= 100 + 12 * 20  # tidied up each hour
    assert began_s is not None
    assert began_s > NOW_S
    ledger.add({at(NOW_S + 30 * FINE_S): Account(held_ns=1)}, NOW_S + 30 * FINE_S + HOUR_S)
    assert sum(t.account.held_ns for t in ledger.totals(0, by="name")[1]) <= 100


# --- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage", [b"", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 8000, b"?"]
)
def test_garbage_is_put_aside(ledger: Ledger, garbage: bytes) -> None:
    ledger._path.write_bytes(garbage)
    ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S)
    assert ledger.totals(0)[1] == [Total(ALICE, "", Account(held_ns=7))]
    aside = ledger._path.with_name("GPU-1.usage.damaged")
    assert aside.exists() == (len(garbage) > 1)  # an almost empty file becomes a new database


def test_a_file_damaged_in_its_middle_is_put_aside(ledger: Ledger) -> None:
    rows = {at(NOW_S + n * FINE_S): Account(held_ns=1) for n in range(2000)}
    ledger.add(rows, NOW_S)
    data = bytearray(ledger._path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    ledger._path.write_bytes(data)
    assert ledger.totals(0) == (None, [])
    ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S)
    assert ledger.totals(0)[1] == [Total(ALICE, "", Account(held_ns=7))]


def test_somebody_elses_database_is_put_aside(ledger: Ledger) -> None:
    with sqlite3.connect(ledger._path) as db:
        db.execute("CREATE TABLE usage (x)")
        db.execute("PRAGMA user_version = 1")
    db.close()
    assert ledger.totals(0) == (None, [])
    assert ledger._path.with_name("GPU-1.usage.damaged").exists()


def test_no_disk_is_an_error_and_no_harm(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone" / "GPU-1.usage")
    with pytest.raises(sqlite3.OperationalError):
        ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S)
    (tmp_path / "gone").mkdir()
    ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S)
    assert ledger.totals(0)[1] == [Total(ALICE, "", Account(held_ns=7))]


def test_a_batch_that_cannot_be_written_whole_is_not_written_at_all(ledger: Ledger) -> None:
    ledger.add({at(NOW_S): Account(held_ns=7)}, NOW_S)
    many = {at(NOW_S + n): Account(held_ns=n) for n in range(0, 900, FINE_S)}
    too_big = {at(NOW_S, BOB): Account(held_ns=1 << 70)}
    with pytest.raises(OverflowError):
        ledger.add(many | too_big, NOW_S)
    assert ledger.totals(0)[1] == [Total(ALICE, "", Account(held_ns=7))]


def test_a_writer_that_is_killed_leaves_whole_batches(ledger: Ledger) -> None:
    program = f"""
import sys
from kiwi_core.daemon.reports.ledger import Ledger, UsageBucket
from kiwi_core.sched.model.accounts import Account
ledger = Ledger(__import__("pathlib").Path({str(ledger._path)!r}))
for n in range(10**6):
    batch = {{UsageBucket({int(NOW_S)} - 300 * k, 1, "x"): Account(held_ns=1) for k in range(5)}}
    ledger.add(batch, {NOW_S})
    print(n, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        done = 0
        while done < 20:
            done = int(process.stdout.readline())
        process.kill()
        rest = process.stdout.read().split()
        done = int(rest[-1]) if rest else done
    (total,) = ledger.totals(0)[1]
    assert total.account.held_ns % 5 == 0
    assert done + 1 <= total.account.held_ns // 5 <= done + 2
