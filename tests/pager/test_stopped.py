"""Tests that the driver is not asked about stopped programs, since it would not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until
from halted import debugged
from worlds import EmulatedWorld, LinkedWorld

from kiwi_core.pager import stopped
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds import RunningSession, SharedWorlds


@pytest.fixture
def world(shared_worlds: SharedWorlds) -> Iterator[LinkedWorld]:
    """Provide the daemon's pager and programs without a library."""
    with shared_worlds.lend(LinkedWorld) as world:
        yield world


def start(world: LinkedWorld, size_bytes: int, child_bytes: int = 0) -> RunningSession:
    return EmulatedWorld.start(world, size_bytes, child_bytes=child_bytes)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def goes_out_and_comes_back(world: LinkedWorld, session: RunningSession) -> None:
    moved(world.pager.page_out(session.target, soon_ns()))
    moved(world.pager.page_in(session.target, soon_ns()))


def test_ctrl_z_hinders_no_page_out_and_keeps_its_program_stopped(world: LinkedWorld) -> None:
    session = start(world, 4 * MIB, child_bytes=4 * MIB)
    before = session.digest()
    for pid in (session.pid, session.child_pid):
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(session.pid) == state(session.child_pid) == "T", "both stand still")
    assert "Ctrl-Z" in world.pager.observe(session.target).stopped
    moved(world.pager.page_out(session.target, soon_ns()))
    seen = world.pager.observe(session.target)
    assert seen.residency is Residency.PAGED_OUT
    wait_until(lambda: state(session.pid) == state(session.child_pid) == "T", "both stand again")
    assert (
        "Ctrl-Z" in refused(world.pager.page_in(session.target, soon_ns()), Reason.STOPPED).detail
    )
    for pid in (session.pid, session.child_pid):
        os.kill(pid, signal.SIGCONT)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert world.pager.observe(session.target).stopped == ""
    assert session.digest() == before


COUNTED = """
from kiwi_core.pager import session_pager
went_on = []
real = session_pager.continued
session_pager.continued = lambda refs: (went_on.append(1), real(refs))[1]
"""


def test_what_ram_cannot_take_is_not_continued_for_the_try(world: LinkedWorld) -> None:
    """It is tried again and again."""
    caller = world.new_pager(host_bytes=3 * MIB)
    session = start(world, 4 * MIB)
    caller.patch(COUNTED)
    os.kill(session.pid, signal.SIGSTOP)
    wait_until(lambda: state(session.pid) == "T", "it stands still")
    refused(caller.page_out(session.target, soon_ns()), Reason.NO_HOST_MEMORY)
    assert caller.worker.get("len(went_on)") == 0
    os.kill(session.pid, signal.SIGCONT)
    refused(caller.page_out(session.target, soon_ns()), Reason.NO_HOST_MEMORY)
    assert caller.worker.get("len(went_on)") == 1


STOPPED_LATE = """
import contextlib, os, signal, time
from pathlib import Path
from kiwi_core.pager import session_pager
real = session_pager.continued

@contextlib.asynccontextmanager
async def late(refs):
    session_pager.continued = real
    refs = list(refs)
    async with real(refs):
        os.kill(refs[0].pid, signal.SIGSTOP)
        while Path(f"/proc/{refs[0].pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        yield

session_pager.continued = late
"""


@pytest.mark.parametrize("call", ["suspend", "page_out"])
def test_ctrl_z_just_after_the_look_for_stopped_programs(world: LinkedWorld, call: str) -> None:
    session = start(world, 4 * MIB)
    world.pager.patch(STOPPED_LATE)
    moved(getattr(world.pager, call)(session.target, soon_ns()))
    wait_until(lambda: state(session.pid) == "T", "it stands still again")
    os.kill(session.pid, signal.SIGCONT)


def test_ctrl_z_in_the_middle_of_a_page_out(world: LinkedWorld) -> None:
    """The driver copies inside the program's own process here, so it would stop too."""
    world.set_driver_version(13040)  # this driver reports CHECKPOINTING
    session, caller = start(world, 32 * MIB), world.new_pager()
    before = session.digest()
    world.set_copy_bandwidth(1 << 10)
    caller.begin("page_out", session.target, soon_ns())
    wait_until(lambda: world.state(session.pid) == "CHECKPOINTING", "it moves")
    os.kill(session.pid, signal.SIGSTOP)
    world.set_copy_bandwidth(0)
    moved(caller.finish())
    wait_until(lambda: state(session.pid) == "T", "it stands still again")
    os.kill(session.pid, signal.SIGCONT)
    moved(caller.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.parametrize("call", ["suspend", "page_out"])
def test_a_debugger_keeps_what_it_has(world: LinkedWorld, call: str) -> None:
    session, other = start(world, 4 * MIB), start(world, 4 * MIB)
    before = session.digest()
    with debugged(session.pid):
        answer = refused(getattr(world.pager, call)(session.target, soon_ns()), Reason.STOPPED)
        assert "debugger" in answer.detail
        assert "debugger" in world.pager.observe(session.target).stopped
        assert state(session.pid) == "t"
        goes_out_and_comes_back(world, other)
    assert session.digest() == before
    goes_out_and_comes_back(world, session)


@pytest.mark.parametrize(
    ("name", "text"),
    [("cgroup.events", "populated 1\nfrozen 1\n"), ("freezer.state", "FROZEN\n")],
    ids=["version-2", "version-1"],
)
def test_a_frozen_control_group(world: LinkedWorld, tmp_path: Path, name: str, text: str) -> None:
    """The group's files are fake, because a test may not be allowed to freeze a group."""
    session = start(world, 4 * MIB)
    place = tmp_path / name
    place.write_text(text)
    world.pager.patch(
        "from pathlib import Path; import kiwi_core.pager.stopped as stopped;"
        f" stopped._places = lambda pid: [Path({str(place)!r})]"
    )
    answer = refused(world.pager.page_out(session.target, soon_ns()), Reason.STOPPED)
    assert "frozen" in answer.detail
    assert "frozen" in world.pager.observe(session.target).stopped
    place.write_text(text.replace("frozen 1", "frozen 0").replace("FROZEN", "THAWED"))
    goes_out_and_comes_back(world, session)


def test_the_freezer_files_of_a_control_group_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stopped, "_CGROUPS", tmp_path)
    places = stopped._places(os.getpid())
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    assert bool(places) == any(line.split(":")[1] in ("", "freezer") for line in lines)
    assert all(place.is_relative_to(tmp_path) for place in places)
    if any(line.startswith("0::") for line in lines):
        assert any(place.is_relative_to(tmp_path / "unified") for place in places)
