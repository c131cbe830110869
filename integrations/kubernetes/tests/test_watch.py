"""Tests of which GPUs are offered: silent daemons, MPS, MIG; with a test's clock and ``/proc``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from daemon import running_daemon
from leftovers import nothing_left
from made_up_status import gpu
from msgspec import structs

import kiwi_emulator as emulator
from kiwi_core.pager import unmovable
from kiwi_kubernetes.watch import GRACE_S, MPS_EVERY_S, NO_ANSWER, Watch

if TYPE_CHECKING:
    from pathlib import Path

A, B = gpu(0, wait_s=0.0), gpu(1, wait_s=None)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> Watch:
    return Watch(tmp_path, tmp_path, clock)


def test_a_daemon_has_a_moment_to_come_back(watch: Watch, clock: Clock) -> None:
    watch.take([A, B])
    assert watch.why_not == {"GPU-0": "", "GPU-1": ""}
    clock.now_s += 10 * GRACE_S  # another daemon hangs
    watch.take([A])
    clock.now_s += GRACE_S - 0.1
    watch.take([A])
    assert watch.why_not == {"GPU-0": "", "GPU-1": ""}
    clock.now_s += 0.1
    watch.take([A])
    assert watch.why_not == {"GPU-0": "", "GPU-1": NO_ANSWER}
    watch.take([A, B])
    assert watch.why_not == {"GPU-0": "", "GPU-1": ""}


def test_a_gpu_with_mig_is_not_offered(watch: Watch, clock: Clock) -> None:
    mig = structs.replace(B, errors=[f"{unmovable.MIG} Programs that fit run; the others wait."])
    watch.take([A, mig])
    assert watch.why_not["GPU-0"] == ""
    assert "nvidia-smi -mig 0" in watch.why_not["GPU-1"]
    clock.now_s += GRACE_S
    watch.take([A])
    assert "nvidia-smi -mig 0" in watch.why_not["GPU-1"]


def test_a_node_with_mps_offers_nothing(watch: Watch, clock: Clock, tmp_path: Path) -> None:
    control = tmp_path / "proc/77/comm"
    control.parent.mkdir(parents=True)
    control.write_text("nvidia-cuda-mps\n")
    watch.take([A])
    assert "quit | nvidia-cuda-mps-control" in watch.why_not["GPU-0"]
    control.write_text("other\n")
    clock.now_s += MPS_EVERY_S
    watch.take([A])
    assert watch.why_not == {"GPU-0": ""}


def test_each_change_is_told_once(watch: Watch, clock: Clock) -> None:
    async def follow() -> list[dict[str, str]]:
        changes = watch.changes()
        told = []
        for news in ([A], [A, B]):
            waiting = asyncio.ensure_future(anext_of(changes))
            await asyncio.sleep(0)
            assert not waiting.done()  # before the first look no empty list is sent
            watch.take(news)
            told.append(await waiting)
            watch.take(news)
        return told

    async def anext_of(changes: object) -> dict[str, str]:
        return await changes.__anext__()  # type: ignore[attr-defined, no-any-return]

    assert asyncio.run(follow()) == [{"GPU-0": ""}, {"GPU-0": "", "GPU-1": ""}]


def test_a_real_daemon_of_a_gpu_with_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin understands the daemon's own text."""
    with nothing_left(monkeypatch), running_daemon("1x256MiB") as daemon:
        emulator.set_quirk(daemon.state_path, "mig")
        killed = daemon.kill_child()
        status = daemon.wait_for(lambda s: s.daemon_pid != killed and s, "a daemon that sees it")
        watch = Watch(daemon.directory, daemon.directory)
        assert asyncio.run(watch.look()) == []
        assert watch.why_not[status.uuid].startswith(unmovable.MIG.sentence)
