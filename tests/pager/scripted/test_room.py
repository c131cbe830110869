"""Tests of the sizes of processes, and of the room that a restore needs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from contract import moved, refused, soon_ns
from scripted_machine import CONFIG, LOOP, OUT, RUNNING, TARGET, Machine, new_pager, out

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.movers.pool import MOST
from kiwi_core.pager import room as room_module
from kiwi_core.pager.ending import Stop
from kiwi_core.pager.room import GpuRoom, Reservation
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.states import Reason
from kiwi_core.units import MIB


def test_a_process_that_nvml_does_not_list_needs_what_it_gave_up(
    machine: Machine, pager: SessionPager
) -> None:
    """The process is in its own PID namespace, or NVML has not noticed it yet."""
    machine.unlisted = {1, 2}
    moved(pager.page_out(TARGET, soon_ns()))
    sizes = {ref.pid: size for ref, size in pager.export_footprints().items()}
    assert sizes == {1: 10 * MIB, 2: 20 * MIB}
    machine.outside = 67 * MIB  # process 99, 30 MiB and the margin do not fit together
    answer = refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert answer.detail == (
        "It needs 30 MiB of GPU memory and 16.3 MiB to spare; 33 MiB are free."
    )


def room(machine: Machine) -> GpuRoom:
    return GpuRoom(machine, CONFIG)


def fits(room: GpuRoom, reservation: Reservation) -> bool:
    try:
        LOOP.run(room.wait(reservation, 0, lambda: None))
    except Stop:
        return False
    return True


def test_the_margin_counts_beside_others() -> None:
    machine = Machine()
    assert fits(room(machine), Reservation(100 * MIB, [])), "what filled the GPU can come back"
    machine.outside = 10 * MIB
    assert fits(room(machine), Reservation(81 * MIB, []))
    assert not fits(room(machine), Reservation(82 * MIB, []))
    assert fits(room(machine), Reservation(90 * MIB, [99])), "its own other process is no other"


@pytest.mark.parametrize("hidden_mib", [5, 6])
def test_what_filled_all_that_others_left_can_come_back_and_not_into_less(
    machine: Machine, pager: SessionPager, hidden_mib: int
) -> None:
    """The 2 processes have 30 MiB by NVML's count, and the program outside has the rest."""
    machine.hidden = hidden_mib * MIB
    machine.outside = machine.total - 30 * MIB - 2 * machine.hidden
    out(machine, pager)
    machine.outside += 256 * 1024  # a window was opened
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert "restore 2" not in machine.calls
    assert machine.states == {1: OUT, 2: OUT}
    machine.outside -= 256 * 1024
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_a_claim_asks_for_no_more_than_was_left_free(machine: Machine, pager: SessionPager) -> None:
    """The other program has started since the GPU was seen empty, and NVML does not name it."""
    machine.hidden = 6 * MIB
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    machine.nameless = machine.total - 30 * MIB - 2 * machine.hidden
    out(machine, pager)
    moved(pager.page_in(TARGET, soon_ns()))
    assert [min(claims) for claims in machine.claims] == [18 * MIB, 26 * MIB]


@pytest.mark.parametrize(("grows_mib", "fits_again"), [(14, True), (18, False)])
def test_the_margin_counts_on_all_but_a_little_of_what_was_free(
    machine: Machine, pager: SessionPager, grows_mib: int, fits_again: bool
) -> None:
    machine.total = 8 * 1024 * MIB
    machine.hidden = 6 * MIB
    machine.outside = machine.total - 30 * MIB - 2 * machine.hidden - 20 * MIB
    out(machine, pager)
    machine.outside += grows_mib * MIB
    outcome = pager.page_in(TARGET, soon_ns())
    moved(outcome) if fits_again else refused(outcome, Reason.NO_ROOM)


def test_a_session_that_left_much_free_has_the_usual_margin(
    machine: Machine, pager: SessionPager
) -> None:
    machine.total = 8 * 1024 * MIB
    machine.outside = machine.total - 200 * MIB
    out(machine, pager)
    machine.outside += 200 * MIB - 62 * MIB
    answer = refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert answer.detail == "It needs 30 MiB of GPU memory and 32.3 MiB to spare; 62 MiB are free."


def test_others_that_come_and_go_while_it_goes_out_do_not_count(
    machine: Machine, pager: SessionPager
) -> None:
    """A program outside ends at the same time: not all that got free belongs to the session."""
    machine.outside = machine.total - 30 * MIB

    def ends() -> int:
        machine.states[2] = OUT
        machine.outside -= 40 * MIB
        return 201

    machine.faults["checkpoint", 2] = [ends]
    out(machine, pager)
    machine.outside += 26 * MIB
    moved(pager.page_in(TARGET, soon_ns()))


def test_what_a_session_left_free_outlives_the_daemon(
    machine: Machine, pager: SessionPager
) -> None:
    machine.hidden = 6 * MIB
    machine.outside = machine.total - 30 * MIB - 2 * machine.hidden
    out(machine, pager)
    successor = new_pager(machine)
    successor.import_footprints(pager.export_footprints())
    refused(successor.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    successor.import_page_out_readings(pager.export_page_out_readings())
    moved(successor.page_in(TARGET, soon_ns()))
    assert successor.export_page_out_readings() == {}


def test_the_margin_is_that_of_those_that_are_left(machine: Machine, pager: SessionPager) -> None:
    """Four of six come back at once. Nobody knows what their page-out left free."""
    machine.total, machine.hidden = 1000 * MIB, 6 * MIB
    machine.sizes = dict.fromkeys(range(1, 7), 10 * MIB)
    machine.states.update(dict.fromkeys(machine.sizes, OUT))
    pager.import_footprints({ProcessRef(pid, 0): size for pid, size in machine.sizes.items()})
    machine.outside = machine.total - 108 * MIB
    refused(pager.page_in(TARGET, soon_ns()), Reason.NO_ROOM)
    assert machine.calls == [], "60, 6 times 8, and a hundredth"
    machine.outside -= MIB
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}


def test_the_margin_grows_with_the_need() -> None:
    machine = Machine()
    machine.total, machine.outside = 80 * 1024 * MIB, 1024 * MIB
    need = (79 * 1024 - 32) * MIB * 100 // 101
    assert fits(room(machine), Reservation(need - MIB, []))
    assert not fits(room(machine), Reservation(need + MIB, []))


@pytest.mark.parametrize(("spare_mib", "margin_mib"), [(3, 3), (20, 8), (40, 24), (1000, 268)])
def test_a_session_alone_has_the_margin_that_an_empty_gpu_can_spare(
    spare_mib: int, margin_mib: int
) -> None:
    """Processes take 5 MiB more than NVML reports, and a restore that fails is permanent."""
    machine = Machine()
    machine.total = 24 * 1024 * MIB
    shared = room(machine)

    def would_fit(need_bytes: int) -> bool:
        reservation = Reservation(need_bytes, [])
        with shared.reserved(reservation):
            return fits(shared, reservation)

    assert would_fit(0), "it has been seen empty"
    machine.sizes, machine.states = {7: 0}, {7: RUNNING}
    need_bytes = machine.total - spare_mib * MIB
    for used_mib in range(spare_mib + 1):
        machine.sizes[7] = used_mib * MIB  # a process that NVML does not list
        machine.unlisted = {7}
        if not would_fit(need_bytes):
            break
    left_mib = spare_mib - used_mib + 1
    assert left_mib == pytest.approx(margin_mib, abs=1)


def test_a_small_need_has_32_mib_to_spare_beside_others() -> None:
    machine = Machine()
    machine.total = 24 * 1024 * MIB
    machine.outside = machine.total - 200 * MIB
    assert fits(room(machine), Reservation(166 * MIB, []))
    assert not fits(room(machine), Reservation(167 * MIB, []))


@pytest.mark.parametrize("named", [True, False])
def test_nobody_is_known_to_be_alone_where_nvml_names_nobody(named: bool) -> None:
    """In a PID namespace, a process that NVML does not list uses 30 of 100 MiB."""
    machine = Machine()
    machine.names = named
    shared = room(machine)

    def would_fit(need_bytes: int | None) -> bool:
        reservation = Reservation(need_bytes, [])
        with shared.reserved(reservation):
            return fits(shared, reservation)

    assert would_fit(100 * MIB), "it is as empty as it was ever seen"
    machine.sizes, machine.states = {2: 30 * MIB}, {2: RUNNING}
    machine.unlisted = {2}
    assert not would_fit(70 * MIB), "an empty GPU has more to spare"
    assert would_fit(61 * MIB)
    assert would_fit(None) is named


@pytest.mark.parametrize("halted", [True, False])
def test_what_one_that_stands_still_has_taken_does_not_count_twice(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, halted: bool
) -> None:
    """It is frozen during its restore: NVML counts 60 MiB for it, and it has not reported."""
    machine.total = 200 * MIB
    machine.sizes, machine.states = {1: 60 * MIB, 2: 10 * MIB}, {1: OUT, 2: RUNNING}
    shared = room(machine)
    one, two = Reservation(60 * MIB, [1]), Reservation(100 * MIB, [2])
    with shared.reserved(one), shared.reserved(two):
        assert fits(shared, one)
        monkeypatch.setattr(room_module, "why_stopped", lambda _ref: "frozen" if halted else "")
        monkeypatch.setattr(processes, "ref_of", lambda pid: ProcessRef(pid, 0))
        assert fits(shared, two), "beside the 60 that are to come"
        machine.states[1] = RUNNING
        assert fits(shared, two) is halted


def test_room_is_promised_once_and_given_back() -> None:
    machine = Machine()
    shared = room(machine)
    one, two = Reservation(60 * MIB, []), Reservation(60 * MIB, [])
    with shared.reserved(one):
        assert fits(shared, one)
        assert fits(shared, one), "its own promise does not stand in its way"
        with shared.reserved(two):
            assert not fits(shared, two)
            one.spend(50 * MIB)  # back in the GPU: from here on NVML would count it
            assert fits(shared, two)
    assert fits(shared, Reservation(90 * MIB, []))


def test_an_unknown_size_waits_for_all_others_and_makes_them_wait() -> None:
    machine = Machine()
    shared = room(machine)
    unknown, known = Reservation(None, [5]), Reservation(MIB, [])
    machine.outside = MIB
    assert not fits(shared, unknown)
    machine.outside = 0
    with shared.reserved(unknown):
        assert fits(shared, unknown)
        assert not fits(shared, known)
    with shared.reserved(known):
        assert fits(shared, known)
        assert not fits(shared, unknown)


def test_waiting_for_room_is_given_up_when_nobody_wants_it() -> None:
    machine = Machine()
    machine.outside = 100 * MIB

    def unwanted() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        LOOP.run(room(machine).wait(Reservation(MIB, []), time.monotonic_ns() + 10**12, unwanted))


def test_what_started_while_others_went_out_is_measured_once_it_stands_still(
    machine: Machine, pager: SessionPager
) -> None:
    """Until it is locked it allocates. Brought back into less room, it would be lost."""

    def starts() -> int:
        machine.states[3], machine.sizes[3] = RUNNING, 5 * MIB
        return 0

    def grows() -> int:
        machine.sizes[3] = 30 * MIB
        return 0

    machine.faults["checkpoint", 2] = [starts]
    machine.faults["lock", 3] = [grows]
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT, 2: OUT, 3: OUT}
    assert pager.export_footprints()[ProcessRef(3, 0)] == 30 * MIB


def test_a_session_of_many_processes_leaves_movers_for_others(
    machine: Machine, pager: SessionPager, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.states.update(dict.fromkeys(range(1, 10), RUNNING))
    machine.sizes = dict.fromkeys(range(1, 10), MIB)
    under_way, most = Counter[str](), Counter[str]()

    def watched(name: str) -> None:
        call = getattr(machine, name)

        async def watch(*args: object) -> object:
            under_way[name] += 1
            most[name] = max(most[name], under_way[name])
            await asyncio.sleep(0)
            under_way[name] -= 1
            return await call(*args)

        monkeypatch.setattr(machine, name, watch)

    for name in ("lock", "measured_checkpoint", "restore"):
        watched(name)
    moved(pager.page_out(TARGET, soon_ns()))
    moved(pager.page_in(TARGET, soon_ns()))
    assert set(machine.states.values()) == {RUNNING}
    assert set(most.values()) == {MOST // 2}
