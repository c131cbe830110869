"""Tests of the RAM that preloaded libraries hold for speed: they return it when it is needed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import virtual_time
from cramped import limited
from talker import Talker

from kiwi_core.daemon.links.host_budget import HostBudget
from kiwi_core.daemon.links.library_ram import LOOK_AGAIN_S, REVIEW_S, LibraryRam
from kiwi_core.daemon.links.link import Link
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.states import MovedBy, Residency
from kiwi_core.units import GIB, MIB, NS_PER_S, SessionId
from kiwi_core.wire.pager import PagerLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from preloaded_program import PreloadedProgram
    from session_program import SessionProgram

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


# --- the rule, with made-up libraries ------------------------------------------------------------


class RecordingConnection:
    """A connection that records what is sent over it."""

    def __init__(self) -> None:
        self.limits: list[PagerLimits] = []
        self.heeds: Callable[[PagerLimits], None] = lambda _limits: None

    def send(self, message: object) -> None:
        assert isinstance(message, PagerLimits)
        self.limits.append(message)
        self.heeds(message)


class Budget(HostBudget):
    """The machine's budget, less what libraries hold."""

    def __init__(self, machine: Machine, links: Any) -> None:
        super().__init__(links, dict, 0)
        self._machine = machine

    def budget_bytes(self) -> int:
        return self._machine.budget_bytes

    def left_bytes(self) -> int:
        return self.budget_bytes() - self.arena_bytes()


class Machine:
    """Libraries that hold memory of a machine with the given RAM."""

    def __init__(self, budget_gib: int) -> None:
        self.budget_bytes = budget_gib * GIB
        self.links: list[Link] = []
        there: Any = SimpleNamespace(everybody=lambda: tuple(self.links))
        self.crowded = False
        self.ram = LibraryRam(there, Budget(self, there), lambda: self.crowded)

    def library(self, name: str, resident_gib: int, *, out_gib: int = 0, held_gib: int = 0) -> Link:
        link = Link(ProcessRef(len(self.links) + 1, 1), 0, session=SessionId(name))
        link.connection, link.greeted = RecordingConnection(), True  # type: ignore[assignment]
        link.report = LibraryReport(
            Residency.PAGED_OUT if out_gib else Residency.RESIDENT,
            resident_gib * GIB, out_gib * GIB,
            arena_bytes=held_gib * GIB,
        )  # fmt: skip
        self.links.append(link)
        return link

    async def await_limits(self, link: Link, condition: Callable[[PagerLimits], bool]) -> None:
        async def arrived() -> None:
            while not any(map(condition, recorded(link).limits[-1:])):
                await asyncio.sleep(0.005)

        await asyncio.wait_for(arrived(), 20.0)

    async def make_ram_room(self, *args: Any) -> float:
        """Make room, and return how long it took."""
        began_s = time.monotonic()
        claim = await self.ram.make_ram_room(*args)
        took_s = time.monotonic() - began_s
        self.ram.done(claim)
        return took_s


def recorded(link: Link) -> RecordingConnection:
    assert isinstance(link.connection, RecordingConnection)
    return link.connection


def gives_back(link: Link) -> None:
    """Let the library return its memory soon, and report it."""

    def heed(limits: PagerLimits) -> None:
        left = min(link.report.arena_bytes, limits.arena_bytes)
        report = dataclasses.replace(link.report, arena_bytes=left)
        asyncio.get_running_loop().call_later(0.05, setattr, link, "report", report)

    recorded(link).heeds = heed


def soon_ns() -> int:
    return time.monotonic_ns() + 60 * NS_PER_S


def test_all_copy_ahead_while_the_gpu_is_crowded() -> None:
    async def story() -> None:
        machine = Machine(64)
        links = [machine.library(name, 10) for name in "ab"]
        for crowded in (False, True, False):
            machine.crowded = crowded
            machine.ram.changed()
            for link in links:
                await machine.await_limits(link, lambda limits: limits.ahead is crowded)  # noqa: B023

    asyncio.run(story())


def test_each_is_told_its_share_once() -> None:
    async def story() -> None:
        machine = Machine(64)
        link = machine.library("a", 10)
        machine.ram.changed()
        await machine.await_limits(link, lambda limits: limits.arena_bytes == 10 * GIB)
        count = len(recorded(link).limits)
        for _ in range(3):
            machine.ram.changed()
            await asyncio.sleep(2 * REVIEW_S)
        assert len(recorded(link).limits) == count

    virtual_time.run(story())


def test_nobody_is_told_before_it_has_said_how_things_are() -> None:
    """Its report decides: without it, memory that it holds would count as too much."""

    async def story() -> None:
        machine = Machine(64)
        new, old = machine.library("new", 10), machine.library("old", 10)
        new.greeted = False
        machine.ram.changed()
        await machine.await_limits(old, lambda limits: limits.arena_bytes > 0)
        assert recorded(new).limits == []

    virtual_time.run(story())


def test_a_library_that_left_kiwi_holds_nothing() -> None:
    async def story() -> None:
        machine = Machine(64)
        link = machine.library("a", 10, held_gib=10)
        link.session = None
        machine.ram.changed()
        await machine.await_limits(link, lambda limits: True)
        assert recorded(link).limits == [PagerLimits(arena_bytes=0)]

    virtual_time.run(story())


def test_a_page_out_that_needs_ram_gets_what_others_hold_for_speed() -> None:
    async def story() -> None:
        machine = Machine(40)
        rich, poor = (
            machine.library("rich", 30, held_gib=20),
            machine.library("poor", 5, held_gib=5),
        )
        out = machine.library("out", 0, out_gib=4, held_gib=4)
        machine.library("b", 30)
        for link in (rich, poor, out):
            gives_back(link)
        await machine.make_ram_room(SessionId("b"), 20 * GIB, soon_ns())
        assert rich.report.arena_bytes == 0, "who holds most gives back"
        assert (poor.report.arena_bytes, out.report.arena_bytes) == (5 * GIB, 4 * GIB)

    virtual_time.run(story())


def test_a_page_out_that_needs_no_ram_does_not_wait() -> None:
    async def story() -> None:
        machine = Machine(50)
        frozen = machine.library("frozen", 30, held_gib=20)
        moving = machine.library("b", 25, held_gib=20)
        claim = await machine.ram.before_page_out([moving], soon_ns())
        assert claim is not None
        assert claim.more_bytes == 5 * GIB, "it uses what it holds"
        rich = machine.library("c", 5, held_gib=20)
        assert await machine.ram.before_page_out([rich], soon_ns()) is None
        assert not [limits for limits in recorded(frozen).limits if limits.arena_bytes == 0]

    virtual_time.run(story())


def test_a_library_that_gives_nothing_back_delays_a_page_out_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kiwi_core.daemon.links.library_ram.GIVE_BACK_WITHIN_S", 0.3)

    async def story() -> None:
        machine = Machine(40)
        frozen = machine.library("frozen", 30, held_gib=30)
        machine.library("b", 30)
        took_s = await machine.make_ram_room(SessionId("b"), 20 * GIB, soon_ns())
        assert 0.3 <= round(took_s, 6) <= 0.3 + LOOK_AGAIN_S
        assert recorded(frozen).limits[-1].arena_bytes == 0, "it was asked"
        machine.links.remove(frozen)
        machine.budget_bytes = 0
        monkeypatch.setattr("kiwi_core.daemon.links.library_ram.GIVE_BACK_WITHIN_S", 3600.0)
        # half of the time is left for waiting
        in_two_hours_ns = time.monotonic_ns() + 7200 * NS_PER_S
        took_s = await machine.make_ram_room(SessionId("b"), 20 * GIB, in_two_hours_ns)
        assert took_s == 0, "no library has any"

    virtual_time.run(story())


def test_two_at_once_do_not_count_on_the_same_ram() -> None:
    async def story() -> None:
        machine = Machine(40)
        rich = machine.library("rich", 30, held_gib=20)
        gives_back(rich)
        machine.library("b", 15), machine.library("c", 15)
        first = await machine.ram.make_ram_room(SessionId("b"), 15 * GIB, soon_ns())
        assert rich.report.arena_bytes == 20 * GIB, "there was enough"
        await machine.make_ram_room(SessionId("c"), 15 * GIB, soon_ns())
        assert rich.report.arena_bytes == 0
        machine.ram.done(first)

    virtual_time.run(story())


def test_a_claim_that_was_given_up_delays_nobody() -> None:
    async def story() -> None:
        machine = Machine(4)
        link = machine.library("idle", 2, held_gib=2)
        waiting = asyncio.ensure_future(machine.make_ram_room(SessionId("b"), 4 * GIB, soon_ns()))
        await machine.await_limits(link, lambda limits: limits.arena_bytes == 0)
        waiting.cancel()
        await asyncio.wait([waiting])
        machine.ram.changed()
        await machine.await_limits(link, lambda limits: limits.arena_bytes == 2 * GIB)

    virtual_time.run(story())


# --- the daemon and the library ------------------------------------------------------------------


def release(daemon: Daemon, worker: PreloadedProgram) -> dict[str, Any]:
    session = daemon.wait_state(worker.pid, "idle")
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()
        return observer.ask("release", session=session.id)


def test_memory_pinned_in_advance_does_not_hinder_others(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """System RAM may take 256 MiB: pinned memory makes room for what is paged out."""
    args = ("--host-budget", "256MiB", "--anti-thrash", "off", "--idle-after", "0.3")
    daemon = start("1x512MiB", *args)
    first, second = preloaded(daemon), preloaded(daemon)
    first.take(128, 1)
    second.take(160, 2)
    daemon.wait_for(lambda s: s.memory.arena_bytes >= 64 * MIB, "pinned, as far as there is room")
    assert release(daemon, second)["type"] == "ok"
    daemon.wait_state(second.pid, "paged-out")
    daemon.wait_for(lambda s: 160 * MIB <= s.memory.arena_bytes <= 256 * MIB, "within the budget")
    refused = release(daemon, first)
    assert refused["code"] == "no-host-memory", "both together are too much, whoever holds what"
    assert second.intact()
    assert release(daemon, first)["type"] == "ok"
    daemon.wait_state(first.pid, "paged-out")
    assert first.intact()
    assert second.intact()


def test_a_library_takes_no_more_ram_than_its_job_has(
    start: Start, program: Program, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """The emulated GPU memory counts in the job, too: 100 of its 180 MiB. What is left is too
    little for that to go out, and for memory held for speed alone. The kernel would kill a program
    that took more."""
    daemon = start("1x128MiB")
    one, other = preloaded(daemon), program(daemon)
    with limited(one.pid, 180 * MIB):
        one.take(100)
        other.begin_take(60, 2)

        def refused(status: GpuStatus) -> SessionStatus | None:
            ours = next(session for session in status.sessions if session.pid == one.pid)
            return ours if ours.problem == "page-out-refused" else None

        shown = daemon.wait_for(refused, "its page-out is refused")
        assert shown.pager is MovedBy.INPROCESS
        assert "its memory limit is 180 MiB" in shown.problem_text
        assert "in Slurm: --mem=" in shown.problem_text
        words = [line for line in daemon.log().splitlines() if "what=PageOutRefused" in line]
        assert words
        assert all("reason=no-job-memory" in word for word in words), "however often it is tried"
    other.worker.answer()
    assert one.intact(), "with more RAM it is moved out and back as any other"
