"""Tests of work that is done and reported as failed, and of refusals and what they leave behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
import scripted_machine
from contract import moved, refused, soon_ns
from scripted_machine import LOCKED, LOOP, OUT, RUNNING, TARGET, Machine, new_pager, out

from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.looks import GpuLook
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager import driver_steps, ending, survey
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.pager.stopped import BY_ANOTHER, BY_SIGNAL
from kiwi_core.pager.unmovable import WhyUnmovable
from kiwi_core.states import Reason, Residency
from kiwi_core.units import GIB, MIB

# --- it failed in reporting, not in doing --------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "after"), [("lock", LOCKED), ("checkpoint", OUT), ("restore", LOCKED)]
)
def test_work_that_was_done_counts(
    machine: Machine, pager: SessionPager, call: str, after: CheckpointState
) -> None:
    machine.faults[call, 2] = [machine.does(2, after, 600 if call == "lock" else 999)]
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert moved(pager.page_in(TARGET, soon_ns())).bytes_moved == 30 * MIB
    assert set(machine.states.values()) == {RUNNING}


def test_an_unlock_that_was_done_counts(machine: Machine, pager: SessionPager) -> None:
    machine.faults["unlock", 1] = [machine.does(1, RUNNING, 999)]
    moved(pager.suspend(TARGET, soon_ns()))
    moved(pager.resume(TARGET, soon_ns()))


def test_an_unlock_is_tried_once_more_and_then_refused(
    machine: Machine, pager: SessionPager
) -> None:
    moved(pager.suspend(TARGET, soon_ns()))
    machine.faults["unlock", 1] = [999]
    moved(pager.resume(TARGET, soon_ns()))
    moved(pager.suspend(TARGET, soon_ns()))
    machine.faults["unlock", 1] = [999, 999]
    refused(pager.resume(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: LOCKED, 2: LOCKED}, "none runs while another is held"
    moved(pager.resume(TARGET, soon_ns()))


# --- refusals and what they leave behind ---------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (600, Reason.LOCK_TIMEOUT),
        (800, Reason.NOT_PERMITTED),
        (801, Reason.UNSUPPORTED),
        (500, Reason.UNSUPPORTED),
        (304, Reason.DRIVER),
        (999, Reason.DRIVER),
    ],
)
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_refused_page_out_lets_everybody_run(
    machine: Machine, pager: SessionPager, call: str, number: int, reason: Reason
) -> None:
    machine.faults[call, 2] = [number]
    refused(pager.page_out(TARGET, soon_ns()), reason)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    assert pager.export_footprints() == {}


@pytest.mark.parametrize("number", [2, 801, 719])
def test_a_refusal_that_can_have_damaged_a_process_is_not_tried_again(
    machine: Machine, pager: SessionPager, number: int
) -> None:
    machine.faults["checkpoint", 2] = [number]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    machine.calls.clear()
    assert refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED) == answer
    assert machine.calls == [], "the driver is not asked"
    del machine.states[2]
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT}, "the others go once it has ended"


def test_memory_that_nobody_is_named_for_has_room_claimed(
    machine: Machine, pager: SessionPager
) -> None:
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.claims == []
    out(machine, pager)
    machine.nameless = 45 * MIB
    moved(pager.page_in(TARGET, soon_ns()))
    first, second = machine.claims
    assert min(first) > 10 * MIB
    assert min(second) > 20 * MIB


def test_a_known_unmovable_program_is_not_tried(machine: Machine) -> None:
    why = WhyUnmovable("It uses managed memory.", "Do without.")
    pager = new_pager(machine, known_unmovable=lambda ref: why if ref.pid == 2 else None)
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    assert answer.detail == "It uses managed memory. Do without."
    assert machine.calls == []


def test_what_is_out_already_comes_back_whatever_is_known(machine: Machine) -> None:
    unmovable: list[int] = []
    why = WhyUnmovable("It uses managed memory.", "Do without.")
    pager = new_pager(machine, known_unmovable=lambda ref: why if ref.pid in unmovable else None)
    out(machine, pager)
    unmovable += [1, 2]
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


@pytest.mark.parametrize(("host_mib", "fits"), [(40, True), (25, False)])
def test_room_in_the_cgroup_is_looked_for_where_nvml_names_nobody(
    machine: Machine, host_mib: int, *, fits: bool
) -> None:
    """Otherwise the kernel would kill the process during its page-out."""
    machine.names, machine.unlisted = False, {1, 2}
    asked: list[list[int]] = []

    def available(pids: Collection[int]) -> int:
        asked.append(sorted(pids))
        return host_mib * MIB

    pager = new_pager(machine, host_available_bytes=available)
    if fits:
        moved(pager.page_out(TARGET, soon_ns()))
    else:
        refused(pager.page_out(TARGET, soon_ns()), Reason.NO_HOST_MEMORY)
        assert machine.calls == []
    assert set(map(tuple, asked)) == {(1, 2)}


def test_a_refusal_names_the_limit_of_the_job_and_what_to_ask_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = host.Shortage(limit_bytes=GIB, needs_bytes=2 * GIB)
    pager = new_pager(machine, host_available_bytes=lambda _pids: 0)
    # A limit that holds for the daemon, too, counts as the machine's RAM.
    for whose, reason in (
        ("shortage", Reason.NO_HOST_MEMORY),
        ("own_shortage", Reason.NO_JOB_MEMORY),
    ):
        monkeypatch.setattr(host, whose, lambda _pids, _more_bytes: lacking)
        answer = refused(pager.page_out(TARGET, soon_ns()), reason)
        assert "ask for 2048 MiB (in Slurm: --mem=2048M)" in answer.detail


def test_what_a_process_had_the_last_time_is_what_it_is_taken_to_need(machine: Machine) -> None:
    """It does not need everything that NVML lists no process for: others use a part of it."""
    machine.names, machine.unlisted = False, {1, 2, 99}
    available_bytes = 100 * MIB
    pager = new_pager(machine, host_available_bytes=lambda _pids: available_bytes)
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    machine.outside = 60 * MIB
    available_bytes = 32 * MIB
    moved(pager.page_out(TARGET, soon_ns()))


class WithoutNvml(Machine):
    """NVML has failed for so long that it is not asked any more: the driver says what is free."""

    async def look(self, pids: Sequence[int] = ()) -> GpuLook:
        return GpuLook(None, states=(await super().look(pids)).states)

    async def bytes_by_pid(self) -> dict[int, int]:
        return {}


@pytest.fixture
def without_nvml(machine: Machine) -> WithoutNvml:
    """The processes of ``machine``."""
    other = WithoutNvml(p1=10 * MIB, p2=20 * MIB)
    other.states = machine.states
    return other


def test_without_nvml_it_needs_no_more_ram_than_is_in_use(without_nvml: WithoutNvml) -> None:
    pager = new_pager(without_nvml, host_available_bytes=lambda _pids: 40 * MIB)
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB


def test_without_nvml_nothing_is_moved_out_of_a_full_gpu(
    without_nvml: WithoutNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(scripted_machine.CONFIG, checkpoint_room_bytes=64 * MIB)
    monkeypatch.setattr(scripted_machine, "CONFIG", config)
    without_nvml.outside = 70 * MIB
    refused(new_pager(without_nvml).page_out(TARGET, soon_ns()), Reason.NO_ROOM)
    assert without_nvml.calls == []


def test_what_is_out_already_needs_no_more_ram_though_nvml_names_nobody(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a program that Ctrl-Z has stopped goes on, RAM is looked at."""
    machine.names = False
    pager = new_pager(machine, host_available_bytes=lambda _pids: 25 * MIB)
    machine.states[1] = OUT
    pager.import_footprints({ProcessRef(1, 0): 10 * MIB})
    monkeypatch.setattr(SessionPager, "why_stopped", lambda _self, _target: BY_SIGNAL)
    assert moved(pager.page_out(TARGET, soon_ns())).bytes_moved == 30 * MIB


def test_one_that_may_not_be_controlled(
    machine: Machine, pager: SessionPager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reports only "OS call failed"; the owner of the process explains it."""
    monkeypatch.setattr(ending, "may_control", lambda _pid: False)
    monkeypatch.setattr(driver_steps, "may_control", lambda _pid: False)
    machine.faults["state", 1] = [304]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.NOT_PERMITTED)
    assert "CAP_SYS_PTRACE" in answer.detail
    moved(pager.page_out(TARGET, soon_ns()))
    machine.faults["restore", 1] = [304]
    refused(pager.page_in(TARGET, soon_ns()), Reason.NOT_PERMITTED)


def test_a_machine_that_cannot_do_it(machine: Machine, pager: SessionPager) -> None:
    machine.faults["state", 1] = [801] * 10
    refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED)
    seen = pager.observe(TARGET)
    assert (seen.residency, seen.resident_bytes) == (Residency.RESIDENT, 30 * MIB)


def test_nvml_that_fails_after_the_lock(machine: Machine) -> None:
    def fails(*_: object) -> None:
        machine.nvml_fails = True

    pager = new_pager(machine, store_footprints=fails)
    machine.unlisted = {2}  # so that NVML is asked again
    refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert machine.states == {1: OUT, 2: LOCKED}, "nobody runs while a part is out"
    machine.nvml_fails = False
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_remembering_that_fails_leaves_everybody_running(machine: Machine) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        new_pager(machine, store_footprints=fails).page_out(TARGET, soon_ns())
    assert machine.states == {1: RUNNING, 2: RUNNING}


@pytest.mark.parametrize("call", ["lock", "measured_checkpoint"])
def test_a_page_out_that_is_cancelled_is_undone(
    machine: Machine, pager: SessionPager, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    begun = threading.Event()
    really = getattr(machine, call)

    async def waits_for_ever(pid: int, limit: float) -> object:
        if pid == 2 and not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return await really(pid, limit)

    monkeypatch.setattr(machine, call, waits_for_ever)
    stopped = LOOP.begin(cancelled_once(pager, begun))
    assert stopped.result(10)
    assert machine.states == {1: RUNNING, 2: RUNNING}
    # The driver may still take out the second one.
    assert len(pager.export_footprints()) == (2 if call == "measured_checkpoint" else 0)


async def cancelled_once(pager: SessionPager, begun: threading.Event) -> bool:
    paging = asyncio.ensure_future(pager._wrapped.page_out(TARGET, soon_ns()))  # type: ignore[attr-defined]
    while not begun.is_set():
        await asyncio.sleep(0)
    paging.cancel()
    await asyncio.wait([paging])
    return paging.cancelled()


def test_a_process_on_two_gpus_is_left_alone(machine: Machine, pager: SessionPager) -> None:
    machine.elsewhere = {2: "GPU-y", 77: "GPU-z"}
    assert "GPU-y" in refused(pager.page_out(TARGET, soon_ns()), Reason.UNSUPPORTED).detail
    assert machine.calls == []


def test_a_session_that_never_stops_starting_processes(
    machine: Machine, pager: SessionPager
) -> None:
    def one_more(pid: int) -> Callable[[], int]:
        def act() -> int:
            machine.states[pid + 1] = RUNNING
            machine.faults["lock", pid + 1] = [one_more(pid + 1)]
            return 0

        return act

    machine.faults["lock", 2] = [one_more(2)]
    refused(pager.suspend(TARGET, soon_ns()), Reason.LOCK_TIMEOUT)
    assert set(machine.states.values()) == {RUNNING}


@pytest.mark.parametrize("number", [999, None])
def test_what_was_moved_out_is_brought_back_though_the_driver_does_not_say_where_it_is(
    machine: Machine, pager: SessionPager, number: int | None
) -> None:
    """Its footprint is kept as long as it can be out."""

    def no_driver() -> int:
        raise GpuError("no-driver", "There is no driver.")

    def fails() -> int:
        machine.faults["state", 1] += [number or no_driver]
        return 999

    machine.faults["checkpoint", 2] = [fails]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    if number:
        assert machine.states == {1: RUNNING, 2: RUNNING}
        assert pager.export_footprints() == {}
    else:
        assert "There is no driver" in answer.detail
        assert machine.states == {1: OUT, 2: LOCKED}
        assert pager.export_footprints()[ProcessRef(1, 0)] == 10 * MIB
        moved(pager.page_in(TARGET, soon_ns()))


def test_what_cannot_be_undone_is_said(machine: Machine, pager: SessionPager) -> None:
    machine.faults["checkpoint", 2] = [999]
    machine.faults["restore", 1] = [999]
    answer = refused(pager.page_out(TARGET, soon_ns()), Reason.DRIVER)
    assert "stays in system RAM until it can be paged in" in answer.detail
    assert pager.observe(TARGET).residency is Residency.PAGED_OUT
    moved(pager.page_in(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}


def test_what_somebody_else_has_taken_out_is_left_alone(
    machine: Machine, pager: SessionPager
) -> None:
    assert pager.observe(TARGET).stopped == ""
    machine.states[1] = OUT
    for call in (pager.suspend, pager.page_out, pager.page_in, pager.resume):
        assert BY_ANOTHER in refused(call(TARGET, soon_ns()), Reason.STOPPED).detail
    seen = pager.observe(TARGET)
    assert (seen.residency, seen.stopped) == (Residency.RESIDENT, BY_ANOTHER)
    assert seen.resident_bytes == sum(machine.sizes.values()), "its room is kept"
    assert machine.states == {1: OUT, 2: RUNNING}
    machine.states[1] = RUNNING
    assert pager.observe(TARGET).stopped == ""
    moved(pager.page_out(TARGET, soon_ns()))
    moved(pager.page_in(TARGET, soon_ns()))


def test_what_somebody_else_takes_out_right_after_its_first_context_is_left_alone(
    machine: Machine, pager: SessionPager
) -> None:
    """Kiwi has never seen it with a context, but it has seen that it was not out."""
    del machine.states[2]
    machine.states[3] = CheckpointState.NOT_A_CUDA_PROCESS
    assert pager.observe(TARGET).stopped == ""
    machine.sizes[3], machine.states[3] = 20 * MIB, OUT
    refused(pager.page_in(TARGET, soon_ns()), Reason.STOPPED)
    assert machine.calls == []


def test_a_lock_that_lasts_is_a_late_call_of_a_killed_daemon(
    machine: Machine, pager: SessionPager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pager.observe(TARGET).stopped == ""
    machine.states[1] = LOCKED
    assert pager.observe(TARGET).stopped == BY_ANOTHER
    monkeypatch.setattr(survey, "_LOCKED_MAX_NS", 0)
    assert pager.observe(TARGET).residency is Residency.SUSPENDED
    moved(pager.resume(TARGET, soon_ns()))
    assert machine.states == {1: RUNNING, 2: RUNNING}
