"""Which GPU a new kernel is placed on, from made-up statuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kiwi_core.states import AntiThrash, SessionState
from kiwi_core.units import GIB
from kiwi_core.wire.messages import (
    GpuStatus,
    MemoryStatus,
    QueueEntry,
    SchedulerStatus,
    SessionStatus,
    SwapStatus,
)
from kiwi_jupyter.server_ext.placement import (
    SOON_S,
    SPEED_BYTES_PER_S,
    Placed,
    choose,
    expected_wait_s,
)
from kiwi_jupyter.server_ext.placer import _usable

TQ_S = 30.0


def session(name: str = "s", *, kernel: str = "", **changes: Any) -> SessionStatus:
    fields: dict[str, Any] = {
        "id": name, "pid": 1, "owner": "me", "name": name, "state": SessionState.IDLE,
        "resident_bytes": 0, "paged_out_bytes": 0, "suspensions": 0, "held_s": 0.0,
        "waited_s": 0.0, "kernel_id": kernel,
    }  # fmt: skip
    return SessionStatus(**fields | changes)


def gpu(
    index: int = 0,
    *sessions: SessionStatus,
    outside_bytes: int = 0,
    emulated: bool = False,
    anti_thrash: AntiThrash = AntiThrash.ON,
    round_trip_s: float | None = None,
    waiting_s: tuple[float | None, ...] = (),
    swaps: tuple[SwapStatus, ...] = (),
) -> GpuStatus:
    """Sessions that run are its holders; ``waiting_s`` are the queue's expected waits."""
    used_bytes = outside_bytes + sum(one.resident_bytes for one in sessions)
    queue = [
        QueueEntry(session=f"w{n}", position=n, expected_wait_s=wait_s)
        for n, wait_s in enumerate(waiting_s, 1)
    ]
    return GpuStatus(
        uuid=f"GPU-{index}",
        name="Test GPU",
        index=index,
        emulated=emulated,
        memory=MemoryStatus(
            total_bytes=80 * GIB,
            free_bytes=80 * GIB - used_bytes,
            paged_out_bytes=0,
            host_budget_bytes=100 * GIB,
            outside_bytes=outside_bytes,
        ),
        scheduler=SchedulerStatus(
            tq_s=TQ_S, anti_thrash=anti_thrash, serialised=False, swap_round_trip_s=round_trip_s
        ),
        holders=[one.id for one in sessions if one.state is SessionState.RUNNING],
        queue=queue,
        sessions=[*sessions],
        swaps=[*swaps],
    )


def running(name: str = "r", left_s: float | None = None, **changes: Any) -> SessionStatus:
    return session(name, state=SessionState.RUNNING, time_left_s=left_s, **changes)


def chosen(*gpus: GpuStatus, placed: tuple[Placed, ...] = (), kernel: str = "k") -> int:
    found = choose(gpus, placed, kernel)
    assert found is not None
    return found.index


# --- how long it would wait ---------------------------------------------------------------------


def test_nobody_is_in_the_way() -> None:
    assert expected_wait_s(gpu()) == 0.0
    assert expected_wait_s(gpu(0, session(state=SessionState.PAGED_OUT))) == 0.0


def test_what_lies_idle_in_the_gpu_moves_out_first() -> None:
    idle = session(resident_bytes=40 * GIB)
    assert expected_wait_s(gpu(0, idle)) == 40 * GIB / SPEED_BYTES_PER_S
    measured = SwapStatus(session="s", direction="out", bytes_moved=GIB, seconds=0.1, ago_s=9.0)
    inwards = SwapStatus(session="s", direction="in", bytes_moved=GIB, seconds=9.0, ago_s=9.0)
    assert expected_wait_s(gpu(0, idle, swaps=(measured, inwards))) == pytest.approx(4.0)


def test_holders_run_to_the_end_of_their_time() -> None:
    assert expected_wait_s(gpu(0, running(left_s=7.0), round_trip_s=2.0)) == 9.0
    assert expected_wait_s(gpu(0, running("a", 3.0), running("b", 11.0))) == 11.0
    assert expected_wait_s(gpu(0, running())) == TQ_S


def test_the_queue_goes_first_and_each_of_it_has_its_turn() -> None:
    busy = gpu(0, running(left_s=7.0), waiting_s=(7.0, 37.0), round_trip_s=1.0)
    assert expected_wait_s(busy) == 37.0 + TQ_S + 1.0
    unknown = gpu(0, running(left_s=7.0), waiting_s=(None, None))
    assert expected_wait_s(unknown) == 3 * TQ_S


def test_where_nothing_is_serialised_nobody_waits() -> None:
    assert expected_wait_s(gpu(0, running(), anti_thrash=AntiThrash.OFF)) == 0.0


def test_beside_programs_that_cannot_be_moved_it_would_wait_for_ever() -> None:
    assert expected_wait_s(gpu(0, outside_bytes=30 * GIB)) == 0.0
    assert math.isinf(expected_wait_s(gpu(0, outside_bytes=41 * GIB)))


# --- the choice ---------------------------------------------------------------------------------


def test_without_gpus_there_is_no_choice() -> None:
    assert choose([]) is None


def test_the_shortest_wait_wins() -> None:
    busy, idle = gpu(0, running(left_s=5.0)), gpu(1, session("a"), session("b"), session("c"))
    assert chosen(busy, idle) == 1
    assert chosen(gpu(0, running(left_s=5.0)), gpu(1, running(left_s=25.0))) == 0


def test_all_but_full_gpus_are_the_last_resort() -> None:
    full = gpu(0, outside_bytes=70 * GIB)
    assert chosen(full, gpu(1, running(left_s=25.0))) == 1
    assert chosen(full, gpu(1, outside_bytes=60 * GIB)) == 1


def test_equal_waits_are_decided_by_sessions_then_memory_then_index() -> None:
    little = session("little", resident_bytes=GIB)  # a quarter of a second: nobody would notice
    out = {"state": SessionState.PAGED_OUT}
    assert chosen(gpu(0, session("a", **out), session("b", **out)), gpu(1, little)) == 1
    assert chosen(gpu(0, outside_bytes=30 * GIB), gpu(1)) == 1
    assert chosen(gpu(1), gpu(0)) == 0


def test_kernels_that_are_started_at_once_spread() -> None:
    placed: list[Placed] = []
    counts = [0, 0, 0]
    for number in range(9):
        index = chosen(gpu(0), gpu(1), gpu(2), placed=(*placed,), kernel=f"k{number}")
        placed.append(Placed(f"k{number}", f"GPU-{index}", ago_s=0.1))
        counts[index] += 1
    assert counts == [3, 3, 3]


def test_one_that_was_just_placed_is_taken_for_one_that_is_about_to_ask() -> None:
    idle, busy = gpu(0), gpu(1, running(left_s=10.0))
    assert chosen(idle, busy) == 0
    just = Placed("other", "GPU-0", ago_s=1.0)
    assert chosen(idle, busy, placed=(just,)) == 1
    long_ago = Placed("other", "GPU-0", ago_s=SOON_S)
    assert chosen(idle, busy, placed=(long_ago,)) == 0


def test_one_that_has_joined_is_counted_once() -> None:
    placed = (Placed("one", "GPU-0", ago_s=1.0), Placed("two", "GPU-1", ago_s=1.0))
    joined = gpu(0, session("s1", kernel="one"))
    assert chosen(joined, gpu(1), placed=placed) == 0


def test_a_restarted_kernel_is_not_in_its_own_way() -> None:
    before = gpu(0, session("s1", kernel="k", resident_bytes=GIB))
    placed = (Placed("k", "GPU-0", ago_s=1.0),)
    other = gpu(1, session("s2", kernel="other", state=SessionState.PAGED_OUT))
    assert chosen(before, other, placed=placed, kernel="k") == 0


@pytest.mark.parametrize(
    ("emulated", "index"), [((False, True), 0), ((True, True), 1), ((False, False), 1)], ids=str
)
def test_an_emulated_gpu_does_not_hide_a_real_one(emulated: tuple[bool, bool], index: int) -> None:
    """The second one has more free memory."""
    first = gpu(0, outside_bytes=GIB, emulated=emulated[0])
    assert chosen(*_usable([first, gpu(1, emulated=emulated[1])])) == index
