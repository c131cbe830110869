"""Tests of page-ins, of calls that were given up, and of states in which the driver works."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from contract import moved, refused, soon_ns
from scripted_machine import (
    BACK_UNDER_WAY,
    FAILED,
    LOCKED,
    OUT,
    RUNNING,
    TARGET,
    UNDER_WAY,
    Machine,
    out,
)

from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.movers.errors import died, hung
from kiwi_core.pager.api import Lost
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB


def test_nobody_runs_before_all_are_back(machine: Machine, pager: SessionPager) -> None:
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.calls == ["restore 1", "restore 2", "unlock 1", "unlock 2"]


def test_a_driver_that_can_try_again_after_out_of_memory(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 2] = [2]
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_out_of_memory_twice_is_no_room_and_nothing_has_changed(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 2] = [2, 2]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert machine.states == {1: OUT, 2: OUT}
    moved(pager.page_in(TARGET, soon_ns()))


def test_a_restore_that_fails_in_the_same_way_three_times_with_room_is_lost(
    machine: Machine, pager: SessionPager
) -> None:
    """Driver 580 answers INVALID_VALUE every time if memory was shared."""
    out(machine, pager)
    machine.faults["restore", 1] = [1] * 10
    for _ in range(2):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    assert isinstance(pager.page_in(TARGET, soon_ns()), Lost)
    assert machine.states == {1: OUT, 2: RUNNING}, "the rest of it runs"


def test_restores_that_fail_in_different_ways_or_succeed_between_are_not_lost(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [1, 1, 999, 999, 0, 1, 1]
    for _ in range(4):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    moved(pager.page_in(TARGET, soon_ns()))
    out(machine, pager)
    for _ in range(2):
        refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    moved(pager.page_in(TARGET, soon_ns()))


def test_what_a_failed_restore_keeps_is_told(machine: Machine, pager: SessionPager) -> None:
    """Real drivers take the free memory, answer OUT_OF_MEMORY, and then report an OS error."""
    out(machine, pager)

    def grabs() -> int:
        machine.nameless = 7 * MIB
        return 2

    machine.faults["restore", 1] = [grabs, 304]
    outcome = pager.page_in(TARGET, soon_ns())
    assert isinstance(outcome, Lost)
    assert "It holds 7 MiB of GPU memory until it is restarted." in outcome.detail


def test_what_others_took_is_not_told_as_held_by_a_failed_restore(
    machine: Machine, pager: SessionPager
) -> None:
    """The first process comes back at the same time."""
    out(machine, pager)
    machine.faults["restore", 2] = [304]
    outcome = pager.page_in(TARGET, soon_ns())
    assert isinstance(outcome, Lost)
    assert "holds" not in outcome.detail


def test_a_loss_is_told_though_nvml_fails(machine: Machine, pager: SessionPager) -> None:
    out(machine, pager)

    def fails() -> int:
        machine.nvml_fails = True
        return 304

    machine.faults["restore", 2] = [fails]
    assert isinstance(pager.page_in(TARGET, soon_ns()), Lost)


def test_room_that_vanishes_half_way(machine: Machine, pager: SessionPager) -> None:
    """Beside memory that nobody is named for, one comes back after the other."""
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    out(machine, pager)
    machine.nameless = 45 * MIB

    def grab() -> int:
        machine.outside = 35 * MIB
        return 0

    machine.faults["restore", 1] = [grab]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert machine.calls == ["restore 1", "checkpoint 1"], "the second was never tried"
    machine.outside = 0
    moved(pager.page_in(TARGET, soon_ns()))


def test_room_that_vanishes_while_the_first_of_many_come_back(
    machine: Machine, pager: SessionPager
) -> None:
    machine.states.update(dict.fromkeys(range(1, 7), RUNNING))
    machine.sizes = dict.fromkeys(range(1, 7), 10 * MIB)
    moved(pager.page_out(TARGET, soon_ns()))

    def grab() -> int:
        machine.outside = 45 * MIB
        return 0

    machine.faults["restore", 1] = [grab]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert set(machine.states.values()) == {OUT}


@pytest.mark.parametrize("state", [OUT, FAILED])
def test_what_can_never_come_back_is_lost_and_the_rest_runs(
    machine: Machine, pager: SessionPager, state: CheckpointState
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [machine.does(1, state, 304), 304]
    assert isinstance(pager.page_in(TARGET, soon_ns()), Lost)
    assert machine.states == {1: state, 2: RUNNING}


def test_lost_in_a_page_out(machine: Machine, pager: SessionPager) -> None:
    machine.faults["checkpoint", 2] = [machine.does(2, FAILED, 304)]
    assert isinstance(pager.page_out(TARGET, soon_ns()), Lost)
    assert machine.states == {1: RUNNING, 2: FAILED}
    assert pager.observe(TARGET).residency is Residency.LOST
    assert isinstance(pager.suspend(TARGET, soon_ns()), Lost)
    assert machine.states == {1: RUNNING, 2: FAILED}


@pytest.mark.parametrize("call", ["state", "restore", "unlock"])
def test_a_child_that_ends_meanwhile_is_no_error(
    machine: Machine, pager: SessionPager, call: str
) -> None:
    out(machine, pager)
    machine.faults[call, 2] = [machine.dies(2, 304)]
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING}
    assert pager.export_footprints() == {}


def test_what_is_back_and_cannot_be_released_is_not_moved_out_again(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    machine.faults["unlock", 2] = [999, 999]
    refused(pager.page_in(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: LOCKED, 2: LOCKED}, "none runs while another is held"
    machine.calls.clear()
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.calls == ["unlock 1", "unlock 2"]
    assert pager.export_footprints() == {}


def test_a_paged_out_process_is_not_merely_resumed(machine: Machine, pager: SessionPager) -> None:
    out(machine, pager)
    answer = refused(pager.resume(TARGET, soon_ns()), Reason.DRIVER)
    assert "has to be paged in" in answer.detail
    assert machine.calls == []


@pytest.mark.parametrize("left", [LOCKED, OUT])
@pytest.mark.parametrize("call", ["suspend", "resume", "page_out", "page_in"])
def test_what_a_dead_root_leaves_behind_is_let_go(
    machine: Machine,
    pager: SessionPager,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    left: CheckpointState,
) -> None:
    del machine.states[1]
    machine.states[2] = left
    monkeypatch.setattr(processes, "tree", lambda *_: (ProcessRef(2, 0),))
    refused(getattr(pager, call)(TARGET, soon_ns()), Reason.GONE)
    assert machine.states == {2: RUNNING}


@pytest.mark.parametrize("call", ["state", "lock", "checkpoint"])
def test_a_root_that_dies_in_mid_operation_leaves_nothing_held(
    machine: Machine, pager: SessionPager, call: str
) -> None:
    """Its child is not among its descendants any more, and is not in a terminal session of it."""
    if call == "state":
        out(machine, pager)
    machine.faults[call, 1] = [machine.dies(1, 304)]
    refused(pager.page_out(TARGET, soon_ns()), Reason.GONE)
    assert machine.states == {2: RUNNING}


def test_a_child_whose_parent_dies_in_mid_operation_is_let_go(
    machine: Machine, pager: SessionPager, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = {2: 3}
    machine.states[3], machine.sizes[3] = RUNNING, MIB

    def tree(root: ProcessRef, _without: object = ()) -> tuple[ProcessRef, ...]:
        found = [pid for pid in machine.states if parents.get(pid, root.pid) in machine.states]
        return tuple(ProcessRef(pid, 0) for pid in found)

    def refuses() -> int:
        del machine.states[3]
        return 999

    monkeypatch.setattr(processes, "tree", tree)
    machine.faults["checkpoint", 1] = [refuses]
    refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: RUNNING, 2: RUNNING}


def test_a_mixture_that_a_crash_left(machine: Machine, pager: SessionPager) -> None:
    machine.states.update({1: OUT, 2: LOCKED})
    pager.import_footprints({ProcessRef(1, 0): 10 * MIB})
    seen = pager.observe(TARGET)
    assert seen.residency is Residency.PAGED_OUT
    assert (seen.paged_out_bytes, seen.resident_bytes) == (10 * MIB, 20 * MIB)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
    machine.states.update({1: OUT, 2: RUNNING})
    pager.import_footprints({ProcessRef(1, 0): 10 * MIB})
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert machine.states == {1: OUT, 2: OUT}


# --- calls that were given up --------------------------------------------------------------------


def given_up(error: GpuError) -> Callable[[], int]:
    """Return a fault of a call whose result is unknown and that the driver does not show in
    progress."""

    def act() -> int:
        raise error

    return act


DIED, HANGS = died("a call"), hung("a call", 1.0)


def test_a_checkpoint_that_was_cut_short_is_asked_for_again(
    machine: Machine, pager: SessionPager
) -> None:
    """The second call is answered after the first one has ended."""
    machine.faults["checkpoint", 1] = [given_up(DIED), machine.does(1, OUT, 401)]
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB


def test_a_restore_that_was_cut_short_is_asked_for_again(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    machine.faults["restore", 1] = [given_up(DIED), machine.does(1, LOCKED, 401)]
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert machine.states == {1: RUNNING, 2: RUNNING}


@pytest.mark.parametrize("error", [DIED, HANGS])
def test_what_goes_out_after_its_call_was_given_up_comes_back_beside_others(
    machine: Machine, pager: SessionPager, error: GpuError
) -> None:
    machine.faults["checkpoint", 1] = [given_up(error), given_up(error)]
    refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    machine.states[1] = OUT
    machine.outside = 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 10 * MIB
    assert pager.export_footprints() == {}


def test_what_the_session_has_in_the_gpu_does_not_keep_an_unknown_size_out(
    machine: Machine, pager: SessionPager
) -> None:
    machine.states.update({1: OUT, 2: RUNNING})
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 10 * MIB


# --- states 4 and 5 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "then"), [(UNDER_WAY, OUT), (BACK_UNDER_WAY, LOCKED)])
def test_a_call_under_way_is_waited_for(
    machine: Machine, pager: SessionPager, state: CheckpointState, then: CheckpointState
) -> None:
    machine.states[2] = state
    refused(pager.page_in(TARGET, soon_ns(0.03)), Reason.DRIVER)
    timer = threading.Timer(0.05, machine.states.update, [{2: then}])
    timer.start()
    moved(pager.page_in(TARGET, soon_ns()))
    timer.join()
    assert machine.states == {1: RUNNING, 2: RUNNING}


def test_a_late_call_of_a_killed_caller_is_caught_up_with(
    machine: Machine, pager: SessionPager
) -> None:
    """Its checkpoint begins only when the new caller unlocks the process."""
    machine.states.update({1: OUT, 2: LOCKED})
    machine.faults["unlock", 2] = [machine.does(2, OUT, 401)]
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
    moved(pager.suspend(TARGET, soon_ns()))
    machine.faults["checkpoint", 2] = [machine.does(2, UNDER_WAY, 401)]
    timer = threading.Timer(0.05, machine.states.update, [{2: OUT}])
    timer.start()
    moved(pager.page_out(TARGET, soon_ns()))
    timer.join()
    assert machine.states == {1: OUT, 2: OUT}


def test_a_reading_that_fails_after_a_nameless_process_went_out_leaves_nothing_running(
    machine: Machine, pager: SessionPager
) -> None:
    """Its size is not known then, so it stays out until nobody else uses the GPU."""
    machine.unlisted = {1, 2}

    def goes_out_and_nvml_with_it() -> int:
        machine.states[1], machine.nvml_fails = OUT, True
        return 401

    machine.faults["checkpoint", 1] = [goes_out_and_nvml_with_it]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert "stays in system RAM" in answer.detail
    assert machine.states == {1: OUT, 2: LOCKED}
    machine.nvml_fails = False
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
