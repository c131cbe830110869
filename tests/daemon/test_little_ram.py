"""Tests that a session whose job has too little RAM for its GPU memory is warned early, and
once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kiwi_core.daemon.links.little_ram import LittleRam
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Observation, ProcessMemory
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.states import Notice, Residency
from kiwi_core.units import GIB, SessionId
from kiwi_core.wire.messages import UserNotice

if TYPE_CHECKING:
    from pathlib import Path

REF = ProcessRef(77, 5)


class Stage:
    """A session in a job with 8 GiB of RAM, of which 2 are used."""

    def __init__(self, root: Path) -> None:
        self.notices: list[UserNotice] = []
        connection: Any = SimpleNamespace(send=self.notices.append)
        self.record = SessionRecord(id=SessionId("k1"), ref=REF, uid=0, connection=connection)
        self.links: list[Any] = []
        self.root = root
        self._write("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self._write("proc/77/cgroup", "0::/job\n")
        self._write("sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")
        self.uses(2)
        self.little_ram = LittleRam({self.record.id: self.record}.get, lambda _id: self.links, root)

    def uses(self, gib: int) -> None:
        self._write("sys/fs/cgroup/job/memory.current", f"{gib * GIB}\n")

    def sees(self, gib: float) -> None:
        size_bytes = int(gib * GIB)
        process = ProcessMemory(REF, Residency.RESIDENT, size_bytes)
        seen = Observation(True, Residency.RESIDENT, size_bytes, 0, processes=(process,))
        self.little_ram.seen(self.record.target, seen)

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_session_with_too_little_ram_gets_one_notice_with_the_number_to_ask_for(
    stage: Stage,
) -> None:
    stage.sees(0)
    stage.sees(5)
    assert not stage.notices
    stage.sees(7)
    stage.sees(20)
    [notice] = stage.notices
    assert notice.notice is Notice.LITTLE_RAM
    assert "its memory limit is 8 GiB" in notice.text
    assert "--mem=9216M" in notice.text


def test_the_limits_are_read_again_only_once_the_memory_has_grown(stage: Stage) -> None:
    stage.sees(5)
    stage.uses(8)
    stage.sees(5.5)
    assert not stage.notices
    stage.sees(5.7)
    assert stage.notices


def test_what_a_library_holds_in_reserve_takes_its_part(stage: Stage) -> None:
    report = LibraryReport(resident_bytes=7 * GIB, arena_bytes=GIB)
    stage.links.append(SimpleNamespace(report=report))
    stage.sees(7)
    assert not stage.notices


def test_a_session_without_a_connection_gets_the_notice_when_it_is_back(stage: Stage) -> None:
    connection, stage.record.connection = stage.record.connection, None
    stage.sees(7)
    stage.record.connection = connection
    stage.sees(7)
    assert stage.notices


def test_limits_that_cannot_be_read_stop_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise GpuError("host-unreadable", "Too many open files.")

    monkeypatch.setattr(host, "shortage", fails)
    stage.sees(7)
    assert not stage.notices
