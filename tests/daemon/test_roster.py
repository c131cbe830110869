"""Tests of the roster on disk: written whole or not at all, and trusted only as far as possible."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.roster.roster import (
    OPS_AHEAD,
    Roster,
    RosterEntry,
    RosterFile,
    RosterObjection,
    RosterSaver,
)
from kiwi_core.gpu.processes import boot_id
from kiwi_core.states import AntiThrash, GateOnly, Priority
from kiwi_core.units import OpId, SessionId

if TYPE_CHECKING:
    from pathlib import Path

ENTRY = RosterEntry(
    session="k1", pid=4321, start_ticks=99, uid=1000, name="n", burst=3, priority=Priority.LOW
)
ROSTER = Roster(
    boot_id=boot_id(),
    next_op=17,
    tq_ns=5 * 10**9,
    anti_thrash=AntiThrash.OFF,
    policy="interactive",
    sessions=[ENTRY],
    footprints=[(4321, 99, 1 << 30)],
    beside=[(4321, 99, 1 << 20, 6 << 20)],
    off=[(4322, 100, 1000)],
    objections=[
        RosterObjection(program="ab12", why=GateOnly.CRASHED, version="0.1.0", unix_s=1.5e9)
    ],
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = RosterFile(tmp_path / "r.roster")
    assert file.read() == Roster()
    file.write(ROSTER)
    assert RosterFile(tmp_path / "r.roster").read() == ROSTER
    assert not file.failing
    assert [path.name for path in tmp_path.iterdir()] == ["r.roster"]


@pytest.mark.parametrize("field", ["boot_id", "version"])
def test_only_the_numbers_of_another_boot_or_version_count(tmp_path: Path, field: str) -> None:
    """Pids mean nothing then, but the number of an operation must not be reused, and a program
    that crashed is the same one."""
    path = tmp_path / "r.roster"
    values = {"boot_id": "another", "version": 99}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ROSTER, **{field: values[field]})))
    assert RosterFile(path).read() == Roster(next_op=17, objections=ROSTER.objections)


WRONG: list[dict[str, Any]] = [
    {"tq_ns": -1},
    {"tq_ns": 0},
    {"tq_ns": DEFAULTS.tq_max_ns + 1},
    {"tq_ns": 10**40},
    {"anti_thrash": "perhaps"},
    {"policy": 7},
    {"sessions": [{"session": "k", "pid": 1, "start_ticks": 1, "uid": 0, "priority": "royal"}]},
    {"next_op": 0},
    {"next_op": "x"},
    {"sessions": [{"session": "k1", "pid": -1, "start_ticks": 1, "uid": 0}]},
    {"sessions": [{"session": "k1", "pid": 0, "start_ticks": 1, "uid": 0}]},
    {"sessions": [{"pid": 1}]},
    {"footprints": [[1, 2, -3]]},
    {"footprints": [[1, 2]]},
    {"off": [[0, 2, 3]]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_values_that_cannot_be_are_not_believed(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "r.roster"
    right = json.loads(msgspec.json.encode(ROSTER))
    path.write_text(json.dumps({**right, **wrong}))
    assert RosterFile(path).read() == Roster()


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff\xfe", b"{", b"[" * 200_000, b"null"])
def test_garbage_is_not_believed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.roster"
    path.write_bytes(data)
    assert RosterFile(path).read() == Roster()


def test_a_write_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.roster"
    file = RosterFile(path)
    file.write(ROSTER)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        file.write(Roster(next_op=18))
    assert file.failing
    assert RosterFile(path).read() == ROSTER
    assert [one.name for one in tmp_path.iterdir()] == ["r.roster"], "nothing half is left"
    file.write(Roster(next_op=18, boot_id=boot_id()))
    assert not file.failing
    assert RosterFile(path).read().next_op == 18


def test_the_same_again_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "r.roster"
    file = RosterFile(path)
    file.write(ROSTER)
    before = path.stat().st_ino
    file.write(ROSTER)
    assert path.stat().st_ino == before


# --- what waits for a write -----------------------------------------------------------------------


class Saved:
    """A roster and what writes it; ``now`` is what the daemon knows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now = ROSTER
        self.saver = RosterSaver(RosterFile(path), lambda: self.now)
        self.saver.save()

    def when_begins(self, op: int, session: str) -> Roster:
        """Return the file when operation ``op`` brings ``session`` back."""
        self.saver.save_for(OpId(op), SessionId(session))
        return RosterFile(self._path).read()


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    async def made() -> Saved:  # a saver needs a loop
        return Saved(tmp_path / "r.roster")

    return asyncio.run(made())


def test_a_session_that_is_written_comes_back_without_a_write(saved: Saved) -> None:
    saved.now = msgspec.structs.replace(ROSTER, footprints=[])
    assert saved.when_begins(16, "k1") == ROSTER


def test_a_successor_would_not_find_a_session_that_is_not_written(saved: Saved) -> None:
    other = msgspec.structs.replace(ENTRY, session="k2", pid=4322)
    saved.now = msgspec.structs.replace(ROSTER, sessions=[ENTRY, other])
    assert saved.when_begins(16, "k2") == saved.now


def test_a_successor_uses_no_number_again(saved: Saved) -> None:
    for op in range(16, 16 + 3 * OPS_AHEAD):
        saved.now = msgspec.structs.replace(ROSTER, next_op=op + 1 + OPS_AHEAD)
        assert saved.when_begins(op, "k1").next_op > op


def test_after_a_write_that_failed_each_operation_tries_again(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.now = msgspec.structs.replace(ROSTER, footprints=[])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        saved.saver.save()
    assert saved.saver.failing
    assert saved.when_begins(16, "k1") == saved.now
