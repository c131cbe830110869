"""Tests of two programs with numba-cuda that do not fit together and are swapped at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ledger
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_program import ClientProgram
    from daemon import Daemon
    from pagers import PagerUnderTest

    from kiwi_core.wire.messages import GpuStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

MIB = 1 << 20
GPU_MIB = 80
EACH_MIB = 48
SWAPS = 3
"""How often each program must be out; its bytes are checked after each time."""

PROGRAM = "numba_program.py"


def test_two_programs_are_swapped_in_the_middle_of_their_work(
    make_daemon: Callable[..., Daemon], start: Callable[..., ClientProgram], pager: PagerUnderTest
) -> None:
    """Neither ends its burst: each time one has the GPU, the other was stopped in the middle. The
    test asks for the checksums while the program is out, so that it computes them first when it is
    back."""
    daemon = make_daemon(f"1x{GPU_MIB}MiB", "--tq", "0.3")
    pair = [start(daemon, name, PROGRAM, EACH_MIB, seed) for seed, name in enumerate(("A", "B"))]
    for program in pair:
        assert "Emulated" in program.introduction()["gpu"]
    rounds = {program.name: [0] for program in pair}
    for _ in range(SWAPS):
        for program in pair:
            before = rounds[program.name][-1]
            while rounds[program.name][-1] == before:  # a turn may be over before a whole round
                _wait_until_out(program, pager)
                program.ask("sums")
                found = program.answer()
                assert found["gpu"] == found["host"], f"{program.name} came back with wrong bytes"
                rounds[program.name].append(found["rounds"])
    for program in pair:
        assert program.session.pager.value == pager.name
        assert program.session.suspensions >= SWAPS
        assert sorted(rounds[program.name]) == rounds[program.name]
    _assert_the_journal_has_swaps(daemon, [program.session.id for program in pair])
    for program in pair:
        found, spoilt = program.get("sums"), program.get("spoilt_sums")
        assert found["gpu"] == found["host"]
        assert spoilt["gpu"][:-1] == spoilt["host"][:-1]
        assert spoilt["gpu"][-1] != spoilt["host"][-1], "the checksums miss a wrong byte"
        assert program.end() == 0


def _wait_until_out(program: ClientProgram, pager: PagerUnderTest) -> None:
    """Wait by the daemon's status and the driver's own books."""

    def out(status: GpuStatus) -> bool:
        (session,) = (s for s in status.sessions if s.name == program.name)
        return session.paged_out_bytes >= EACH_MIB * MIB and pager.is_out(program.books)

    program.daemon.wait_for(out, f"{program.name} is out", 90.0)


def _assert_the_journal_has_swaps(daemon: Daemon, sessions: list[str]) -> None:
    read = ledger.read(daemon.journal())
    for session in sessions:
        assert read.stops(session) >= SWAPS, f"stopped in mid-burst: {read.stopped}"
        for way in ("out", "in"):
            moves = [m for m in read.moved if m[:2] == (session, way) and m[2] >= EACH_MIB * MIB]
            assert len(moves) >= SWAPS, f"moved: {read.moved}"
    assert not read.overlaps(), "they do not fit together"
