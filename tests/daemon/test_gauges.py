"""Tests of the gauges: the GPU's load, programs outside Kiwi, sessions' RAM, and who sees them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any, cast

import pytest
from cuda_processes import Worker

import kiwi_emulator as emulator
from kiwi_core.cli.checks import sockets
from kiwi_core.cli.checks.finding import Level
from kiwi_core.daemon.base.peers import Peer, Rights
from kiwi_core.daemon.engine import gauges as gauges_module
from kiwi_core.daemon.engine.gauges import RAM_READS_MAX, GaugeReader, Outside, RamGauge, steadied
from kiwi_core.errors import GpuError
from kiwi_core.gpu import nvml
from kiwi_core.gpu.processes import ProcessRef, ref_of
from kiwi_core.units import MIB, SessionId
from kiwi_core.wire.status import GaugesStatus
from kiwi_core.wire.words import LEFT_REMEDY

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

ADA, BOB = Peer(1, 1000, 1000), Peer(2, 1001, 1001)
RIGHTS = Rights(daemon_uid=0)
READ = nvml.GpuGauges(utilisation_percent=40, temperature_c=60, power_w=300.4, power_limit_w=700.0)


# --- a real daemon ------------------------------------------------------------------------------


def test_a_daemon_says_how_hard_its_gpu_works(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    daemon = start()
    one = program(daemon, 32)
    daemon.wait_for(lambda s: s.gauges.power_w is not None, "the gauges were read")
    status = daemon.status()
    assert status.gauges.temperature_c is not None
    with daemon.client() as client:
        metrics = client.metrics()
        assert metrics.power_limit_w == status.gauges.power_limit_w
    session = daemon.session(one.pid)
    assert session is not None
    assert session.ram_bytes is not None
    assert session.ram_bytes > 8 * MIB, "a Python process has more than that"


@pytest.mark.skipif(not nvml.names_processes(), reason="NVML names processes of the host only")
def test_a_program_outside_kiwi_is_named_and_a_session_is_not(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    daemon = start()
    program(daemon, 32)
    outsider = Worker(
        {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        | emulator.environment(daemon.state_path, emulator.build())
    )
    try:
        outsider.do(f"init(); held = alloc({60 * MIB})")
        (found,) = daemon.wait_for(lambda s: s.outside, "the program was seen")
        assert (found.pid, found.name[:6]) == (outsider.pid, "python")
        assert found.used_bytes >= 60 * MIB
    finally:
        outsider.close()
    daemon.wait_for(lambda s: not s.outside, "its end was seen")


FORK = """
pid = os.fork()
while not pid:
    for pipe in (0, 1, 2, answers.fileno()):
        with contextlib.suppress(OSError):
            os.close(pipe)
    time.sleep(1000)
"""


@pytest.mark.skipif(not nvml.names_processes(), reason="NVML names processes of the host only")
def test_what_a_dead_program_left_to_its_children_is_named_with_what_to_do(
    start: Callable[..., Daemon],
) -> None:
    """Data loaders that outlive a killed kernel keep its memory, and NVML names nobody."""
    daemon = start()
    program = Worker(
        {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        | emulator.environment(daemon.state_path, emulator.build()),
        "setsid",
    )
    program.do(f"import contextlib; init(); held = alloc({60 * MIB})")
    program.do(FORK)
    child = program.get("pid")
    try:
        program.kill()
        (found,) = daemon.wait_for(
            lambda s: [one for one in s.outside if one.left], "what it left was found"
        )
        assert found.pid == child
        assert found.used_bytes >= 60 * MIB
        assert "left by a program that has ended" in found.name
        said = [one for one in sockets.daemons(daemon.directory) if one.level is not Level.OK]
        assert [one.remedy for one in said] == [LEFT_REMEDY]
    finally:
        os.kill(child, signal.SIGKILL)
        program.close()
    daemon.wait_for(lambda s: not s.outside, "the memory is free")


# --- without one --------------------------------------------------------------------------------


class Gpu:
    def __init__(self, *answers: nvml.GpuGauges | Exception) -> None:
        self.answers = list(answers)
        self.used: dict[int, int] = {}

    async def gauges(self) -> nvml.GpuGauges:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def bytes_by_pid(self) -> dict[int, int]:
        return self.used


class World:
    """Gauges that are read once per given answer. ``news`` records what was published."""

    def __init__(self, *answers: nvml.GpuGauges | Exception, outside_bytes: int = 0) -> None:
        self.gpu = Gpu(*answers)
        self.waits: list[float] = []
        self.news: list[GaugesStatus] = []
        self.kiwis: set[ProcessRef] = set()
        self.gauges = GaugeReader(
            cast("Any", self.gpu),
            kiwis=lambda: self.kiwis,
            movers=lambda: [77],
            outside_bytes=lambda: outside_bytes,
            names=lambda _pids: {},
            device="/dev/nvidia-uvm",
            changed=lambda: self.news.append(self.gauges.now),
        )

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            if not self.gpu.answers:
                raise asyncio.CancelledError

        monkeypatch.setattr(gauges_module.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self.gauges.run())


def test_what_hardly_changes_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    other = nvml.GpuGauges(
        utilisation_percent=40, temperature_c=60, power_w=304.0, power_limit_w=700.0
    )
    world = World(READ, other)
    world.run(monkeypatch)
    assert [news.power_w for news in world.news] == [300.0]


@pytest.mark.parametrize(
    "failure", [GpuError("hung", "NVML hangs."), RuntimeError("AttributeError: old pynvml")]
)
def test_a_gpu_that_does_not_answer_has_no_figures_and_is_asked_rarely(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    world = World(READ, failure, READ)
    world.run(monkeypatch)
    assert world.waits == [3.0, 30.0, 3.0]
    assert world.news[1] == GaugesStatus()
    assert world.gauges.now.power_w == 300.0


def test_steady_power_takes_small_steps_only_together() -> None:
    before = GaugesStatus(power_w=300.0)
    assert steadied(GaugesStatus(power_w=None), before).power_w is None
    assert steadied(GaugesStatus(power_w=308.9), before).power_w == 300.0
    assert steadied(GaugesStatus(power_w=310.4), before).power_w == 310.0


def test_which_programs_are_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither a session's process, nor a mover, nor a process that has ended."""
    monkeypatch.setattr(nvml, "names_processes", lambda: True)
    world = World(READ, outside_bytes=1)
    own, parent = ref_of(os.getpid()), ref_of(os.getppid())
    assert own is not None
    assert parent is not None
    world.gpu.used = {parent.pid: 5, own.pid: 6, 77: 7, 2**22 + 1: 8}
    world.kiwis = {own}
    world.run(monkeypatch)
    (found,) = world.gauges.outside(Peer(3, 0, 0), RIGHTS)
    assert (found.pid, found.used_bytes) == (parent.pid, 5)
    assert found.name


def test_others_programs_are_one_sum() -> None:
    world = World()
    world.gauges._outside = [
        Outside(11, ADA.uid, "python", 30), Outside(12, BOB.uid, "secret", 20),
        Outside(13, BOB.uid, "secret", 10),
    ]  # fmt: skip
    seen = world.gauges.outside(ADA, RIGHTS)
    assert [(one.pid, one.name, one.used_bytes) for one in seen] == [
        (11, "python", 30), (0, "another user", 30),
    ]  # fmt: skip
    assert [one.pid for one in world.gauges.outside(BOB, RIGHTS)] == [12, 13, 0]


# --- RAM ----------------------------------------------------------------------------------------


def test_ram_is_read_now_and_then_and_never_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held, reads = [100.0], [1000], []

    def held_bytes(pid: int) -> int:
        reads.append(pid)
        return held[0]

    monkeypatch.setattr(gauges_module.host, "held_bytes", held_bytes)
    monkeypatch.setattr(gauges_module.processes, "alive", lambda _ref: True)
    monkeypatch.setattr(gauges_module.time, "monotonic", lambda: clock[0])
    ram, ids = RamGauge(), [SessionId(f"k{number}") for number in range(RAM_READS_MAX + 1)]
    refs = {id_: [ProcessRef(number + 1, 1)] for number, id_ in enumerate(ids)}
    ram.begin(lambda _session: True)
    told = [ram.of(id_, refs[id_].copy) for id_ in ids]
    assert told == [1000] * RAM_READS_MAX + [None]
    ram.begin(lambda _session: True)
    assert ram.of(ids[0], refs[ids[0]].copy) == 1000
    assert ram.of(ids[-1], refs[ids[-1]].copy) == 1000
    assert len(reads) == RAM_READS_MAX + 1
    clock[0], held[0] = 110.0, 1010
    assert ram.of(ids[0], refs[ids[0]].copy) == 1000, "hardly another"
    clock[0], held[0] = 120.0, 2000
    assert ram.of(ids[0], refs[ids[0]].copy) == 2000
    ram.begin(lambda session: session != ids[0])
    held[0] = 3000
    assert ram.of(ids[0], refs[ids[0]].copy) == 3000, "it was forgotten"


def test_ram_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int) -> int:
        raise GpuError("host-unreadable", "Too many open files.")

    monkeypatch.setattr(gauges_module.host, "held_bytes", refused)
    me = ref_of(os.getpid())
    assert me is not None
    ram = RamGauge()
    ram.begin(lambda _session: True)
    assert ram.of(SessionId("k1"), lambda: [me]) is None
