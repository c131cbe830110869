"""The contract of every pager backend.

A backend's tests derive from ``PagerContract`` and provide a ``world`` fixture (see ``World``). The
daemon can use a new backend that passes.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import pytest

from kiwi_core.pager.api import Lost, Moved, Observation, Outcome, Refused, Target
from kiwi_core.states import Reason, Residency
from kiwi_core.units import NS_PER_S

SOON_S = 0.3
"""How long a call that is held is watched staying held."""


class Session(Protocol):
    """One session under test: a process, or an object that replaces it."""

    target: Target

    def digest(self) -> str:
        """Return a digest of the contents and their addresses. The call waits while it is held."""
        ...

    def touch(self) -> None:
        """Begin a driver call."""
        ...

    def touched(self, within_s: float = 0.0) -> bool:
        """Return whether the driver call has ended."""
        ...

    def finish_touch(self) -> None: ...

    def kill(self) -> None: ...


class World(Protocol):
    pager: Any
    """A ``Pager`` whose calls block."""
    unit_bytes: int
    """A size that fits the GPU many times over, and more than what can be moved at once."""
    memory_bytes: int
    """Free in the GPU when nobody uses it."""
    overhead_bytes: int
    """The most that a process uses beside what it allocates (its context)."""
    residue_bytes: int
    """The most that a page-out leaves in the GPU, which a second page-out takes. It includes memory
    that comes and goes beside the program's own (a self-test)."""

    slack_bytes: int
    """The largest difference between two readings of the driver's numbers: 0 where they are
    exact."""
    sizes_seen: bool
    """Whether the GPU memory of a process can be read."""

    def start(self, size_bytes: int) -> Session: ...

    def hold_outside(self, free_bytes: int) -> None:
        """Let a program outside Kiwi leave only this much free; with ``memory_bytes``, end it."""
        ...

    def refuse_page_out(self, session: Session) -> None:
        """Make the session's next page-out fail: its lock times out."""
        ...

    def allow_page_out(self, session: Session) -> None:
        """End what has made the page-out fail."""
        ...

    def break_page_in(self, session: Session) -> None:
        """Make the session's next page-in fail for good."""
        ...

    def free_bytes(self) -> int: ...


def soon_ns(seconds: float = 60.0) -> int:
    return time.monotonic_ns() + round(seconds * NS_PER_S)


def moved(outcome: Outcome) -> Moved:
    assert isinstance(outcome, Moved), outcome
    return outcome


def refused(outcome: Outcome, reason: Reason) -> Refused:
    assert isinstance(outcome, Refused), outcome
    assert outcome.reason is reason, outcome
    assert outcome.detail, "the user must be told something"
    return outcome


class PagerContract:
    def look(self, world: World, session: Session) -> Observation:
        return world.pager.observe(session.target)

    def assert_runs(self, session: Session) -> None:
        session.touch()
        assert session.touched(60.0)
        session.finish_touch()

    def assert_held(self, session: Session) -> None:
        """Check that a call is held. The call ends when the session is released."""
        session.touch()
        assert not session.touched(SOON_S)

    def assert_as_free(self, world: World, free_bytes: int) -> None:
        most = world.residue_bytes + world.slack_bytes
        assert abs(world.free_bytes() - free_bytes) <= most

    def test_out_and_in_keeps_every_byte_at_its_address(self, world: World) -> None:
        session = world.start(3 * world.unit_bytes)
        before, free_before = session.digest(), world.free_bytes()
        out = moved(world.pager.page_out(session.target, soon_ns()))
        assert 3 * world.unit_bytes <= out.bytes_moved
        assert out.bytes_moved <= 3 * world.unit_bytes + world.overhead_bytes
        assert world.free_bytes() >= free_before + 3 * world.unit_bytes - world.slack_bytes
        back = moved(world.pager.page_in(session.target, soon_ns()))
        assert back.bytes_moved == out.bytes_moved
        assert session.digest() == before

    def test_repeated_round_trips_leave_nothing_in_the_gpu(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        before = session.digest()
        sizes = []
        for _ in range(5):
            sizes.append(moved(world.pager.page_out(session.target, soon_ns())).bytes_moved)
            moved(world.pager.page_in(session.target, soon_ns()))
        assert session.digest() == before
        assert max(sizes) - min(sizes) <= world.slack_bytes, "nothing is left behind in the GPU"

    def test_a_paged_out_process_is_held_and_runs_after_the_page_in(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        moved(world.pager.page_out(session.target, soon_ns()))
        self.assert_held(session)
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.touched(60.0)
        session.finish_touch()

    def test_suspend_holds_and_resume_lets_go(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        free_before = world.free_bytes()
        assert moved(world.pager.suspend(session.target, soon_ns())).bytes_moved == 0
        self.assert_held(session)
        self.assert_as_free(world, free_before)
        assert moved(world.pager.resume(session.target, soon_ns())).bytes_moved == 0
        assert session.touched(60.0)
        session.finish_touch()

    def test_suspended_then_out_then_in(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        before = session.digest()
        moved(world.pager.suspend(session.target, soon_ns()))
        assert moved(world.pager.page_out(session.target, soon_ns())).bytes_moved > 0
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.digest() == before

    def test_page_in_of_a_suspended_session_lets_it_go(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        moved(world.pager.suspend(session.target, soon_ns()))
        assert moved(world.pager.page_in(session.target, soon_ns())).bytes_moved == 0
        self.assert_runs(session)

    @pytest.mark.parametrize("call", ["suspend", "resume", "page_out", "page_in"])
    def test_a_second_time_changes_nothing(self, world: World, call: str) -> None:
        session = world.start(world.unit_bytes)
        before = session.digest()
        operation = getattr(world.pager, call)
        moved(operation(session.target, soon_ns()))
        if call == "page_out" and world.residue_bytes:
            assert moved(operation(session.target, soon_ns())).bytes_moved > 0
            assert self.look(world, session).resident_bytes == 0
        once = self.look(world, session)
        assert moved(operation(session.target, soon_ns())).bytes_moved == 0
        twice = self.look(world, session)
        assert (twice.residency, twice.resident_bytes, twice.paged_out_bytes) == (
            once.residency,
            once.resident_bytes,
            once.paged_out_bytes,
        )
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.digest() == before

    def test_what_the_driver_has_of_contexts_comes_back_alone(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        before = session.digest()
        out_bytes = moved(world.pager.page_out(session.target, soon_ns())).bytes_moved
        if world.residue_bytes:
            moved(world.pager.page_out(session.target, soon_ns()))
        taken_bytes = self.look(world, session).taken_bytes
        assert bool(taken_bytes) is bool(world.residue_bytes)
        back = moved(world.pager.residue_in(session.target, soon_ns()))
        assert back.bytes_moved == taken_bytes <= world.residue_bytes
        seen = self.look(world, session)
        assert (seen.residency, seen.taken_bytes) == (Residency.PAGED_OUT, 0)
        assert seen.resident_bytes == taken_bytes
        self.assert_held(session)
        assert moved(world.pager.residue_in(session.target, soon_ns())).bytes_moved == 0
        assert moved(world.pager.page_in(session.target, soon_ns())).bytes_moved == out_bytes
        session.finish_touch()
        assert session.digest() == before

    def test_resume_does_not_bring_back_what_is_paged_out(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        moved(world.pager.page_out(session.target, soon_ns()))
        refused(world.pager.resume(session.target, soon_ns()), Reason.DRIVER)
        assert self.look(world, session).residency is Residency.PAGED_OUT
        moved(world.pager.page_in(session.target, soon_ns()))
        self.assert_runs(session)

    def test_observe_says_what_is(self, world: World) -> None:
        session = world.start(2 * world.unit_bytes)
        about = world.residue_bytes + world.slack_bytes
        seen = self.look(world, session)
        size = seen.resident_bytes
        least = 2 * world.unit_bytes if world.sizes_seen else 0
        assert least <= size <= 2 * world.unit_bytes + world.overhead_bytes
        assert (seen.alive, seen.residency, seen.paged_out_bytes) == (True, Residency.RESIDENT, 0)
        assert [p.ref for p in seen.processes] == [session.target.root]
        moved(world.pager.suspend(session.target, soon_ns()))
        seen = self.look(world, session)
        assert seen.residency is Residency.SUSPENDED
        assert abs(seen.resident_bytes - size) <= about
        moved(world.pager.page_out(session.target, soon_ns()))
        seen = self.look(world, session)
        assert seen.residency is Residency.PAGED_OUT
        assert seen.resident_bytes <= world.residue_bytes
        if world.sizes_seen:
            assert size - about <= seen.paged_out_bytes <= size + world.slack_bytes
        moved(world.pager.page_in(session.target, soon_ns()))
        seen = self.look(world, session)
        assert seen.residency is Residency.RESIDENT
        assert abs(seen.resident_bytes - size) <= about
        assert seen.paged_out_bytes == 0

    def test_a_session_that_does_not_use_the_gpu(self, world: World) -> None:
        session = world.start(0)
        for call in (
            world.pager.suspend,
            world.pager.page_out,
            world.pager.page_in,
            world.pager.resume,
        ):
            assert moved(call(session.target, soon_ns())).bytes_moved == 0
            seen = self.look(world, session)
            assert (seen.alive, seen.residency, seen.resident_bytes) == (
                True,
                Residency.RESIDENT,
                0,
            )

    def test_without_room_it_stays_out_and_can_be_tried_again(self, world: World) -> None:
        session = world.start(3 * world.unit_bytes)
        before = session.digest()
        moved(world.pager.page_out(session.target, soon_ns()))
        world.hold_outside(free_bytes=2 * world.unit_bytes)
        for _ in range(2):
            refused(world.pager.page_in(session.target, soon_ns(0.2)), Reason.NO_ROOM)
            assert self.look(world, session).residency is Residency.PAGED_OUT
        self.assert_held(session)
        world.hold_outside(free_bytes=world.memory_bytes)
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.touched(60.0)
        session.finish_touch()
        assert session.digest() == before

    def test_what_filled_the_whole_gpu_comes_back(self, world: World) -> None:
        """All but the little that the driver needs to move it out."""
        session = world.start(world.memory_bytes - world.overhead_bytes - world.unit_bytes)
        before = session.digest()
        moved(world.pager.page_out(session.target, soon_ns()))
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.digest() == before

    def test_two_that_do_not_fit_together_take_turns(self, world: World) -> None:
        size = world.memory_bytes * 6 // 10
        first = world.start(size)
        digests = [first.digest()]
        moved(world.pager.page_out(first.target, soon_ns()))
        second = world.start(size)
        digests.append(second.digest())
        for _ in range(2):
            moved(world.pager.page_out(second.target, soon_ns()))
            moved(world.pager.page_in(first.target, soon_ns()))
            assert first.digest() == digests[0]
            refused(world.pager.page_in(second.target, soon_ns(0)), Reason.NO_ROOM)
            moved(world.pager.page_out(first.target, soon_ns()))
            moved(world.pager.page_in(second.target, soon_ns()))
            assert second.digest() == digests[1]

    def test_a_refused_page_out_leaves_it_running(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        before = session.digest()
        world.refuse_page_out(session)
        outcome = world.pager.page_out(session.target, soon_ns(2.0))
        assert isinstance(outcome, Refused), outcome
        # The library keeps its gate closed for the next try, where work in the GPU did not end.
        assert outcome.reason in (Reason.LOCK_TIMEOUT, Reason.DRAINING), outcome
        world.allow_page_out(session)
        assert self.look(world, session).residency is Residency.RESIDENT
        assert session.digest() == before
        moved(world.pager.page_out(session.target, soon_ns()))
        moved(world.pager.page_in(session.target, soon_ns()))
        assert session.digest() == before

    def test_a_loss_is_told_and_stays(self, world: World) -> None:
        session = world.start(world.unit_bytes)
        moved(world.pager.page_out(session.target, soon_ns()))
        world.break_page_in(session)
        for _ in range(2):
            outcome = world.pager.page_in(session.target, soon_ns())
            assert isinstance(outcome, Lost), outcome
            assert outcome.detail
        assert self.look(world, session).residency is Residency.LOST

    @pytest.mark.kills
    @pytest.mark.parametrize("before", ["nothing", "suspend", "page_out"])
    def test_a_process_that_ended(self, world: World, before: str) -> None:
        free_before = world.free_bytes()
        session = world.start(world.unit_bytes)
        if before != "nothing":
            moved(getattr(world.pager, before)(session.target, soon_ns()))
        session.kill()
        for call in ("suspend", "page_out", "page_in", "resume"):
            refused(getattr(world.pager, call)(session.target, soon_ns()), Reason.GONE)
        seen = self.look(world, session)
        assert (seen.alive, seen.resident_bytes, seen.paged_out_bytes) == (False, 0, 0)
        assert world.free_bytes() >= free_before - world.slack_bytes

    @pytest.mark.kills
    def test_footprints_are_those_of_what_is_out(self, world: World) -> None:
        one, other = world.start(world.unit_bytes), world.start(2 * world.unit_bytes)
        assert world.pager.export_footprints() == {}
        out = moved(world.pager.page_out(one.target, soon_ns()))
        moved(world.pager.page_out(other.target, soon_ns()))
        one_only = {one.target.root: out.bytes_moved}
        assert world.pager.export_footprints(one.target) == one_only
        moved(world.pager.page_in(other.target, soon_ns()))
        assert world.pager.export_footprints() == one_only
        one.kill()
        assert world.pager.export_footprints() == {}
