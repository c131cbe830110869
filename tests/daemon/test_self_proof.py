"""Tests of the daemon that lets its GPU prove itself: real daemon, real proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemon import wait_until
from proof_cache import unproven

import kiwi_emulator as emulator
from kiwi_core.gpu import proofs
from kiwi_core.gpu.proofs import Proof
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from pathlib import Path

    from daemon import Daemon
    from preloaded_program import PreloadedProgram

Start = "Callable[..., Daemon]"
Preloaded = "Callable[..., PreloadedProgram]"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in unproven(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)


def auto(preloaded: Preloaded, daemon: Daemon, size_mib: int = 16) -> PreloadedProgram:
    """Start a program that asks for nothing, and let it take memory."""
    program: PreloadedProgram = preloaded(daemon, KIWI_PRELOAD_OWN="auto")
    program.take(size_mib)
    return program


def moved_by(daemon: Daemon, program: PreloadedProgram) -> tuple[MovedBy, str]:
    def told() -> tuple[MovedBy, str] | None:
        session = daemon.session(program.pid)
        return (session.pager, session.pager_text) if session and session.resident_bytes else None

    return wait_until(told, "the daemon has looked at it")


@pytest.mark.usefixtures("cache")
def test_a_daemon_proves_its_machine_when_it_is_idle(start: Start, preloaded: Preloaded) -> None:
    daemon = start("1x256MiB")
    early = auto(preloaded, daemon)
    assert "until this machine has proven itself" in daemon.status().pager_text
    assert moved_by(daemon, early) == (MovedBy.CHECKPOINT, "")
    wait_until(lambda: "own library" in daemon.status().pager_text, "it has proven itself", 60)
    assert proofs.load(*proofs.EMULATED)
    by, why = moved_by(daemon, early)
    assert (by, "began before this machine had proven itself" in why) == (MovedBy.CHECKPOINT, True)
    late = auto(preloaded, daemon)
    wait_until(lambda: moved_by(daemon, late) == (MovedBy.INPROCESS, ""), "its library owns")
    assert early.intact()


@pytest.mark.usefixtures("cache")
def test_a_proof_gives_way_to_a_program(start: Start, preloaded: Preloaded) -> None:
    """The bus is so slow that the proof would take minutes."""
    daemon = start("1x256MiB", "--emulate-copy-rate", "4MiB")
    books = lambda: emulator.books(daemon.state_path)  # noqa: E731
    wait_until(lambda: books().processes and books().gpus[0].used_bytes, "the proof is at work")
    (proving,) = (process.pid for process in books().processes if process.device_bytes)
    program = preloaded(daemon, KIWI_PRELOAD_OWN="auto")
    program.do("p = alloc(8 * 1024 * 1024)")
    wait_until(lambda: books().process(proving) is None, "the proof has given way")
    assert proofs.load(*proofs.EMULATED) is None
    assert "the proof stops" in daemon.log()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("args", "failed", "said"),
    [
        ((), "A byte was lost.", "failed the proof for Kiwi's library: A byte was lost."),
        (("--pager", "checkpoint"), "", "as the daemon was told"),
    ],
    ids=["failed", "setting"],
)
def test_the_driver_moves_where_the_library_must_not(
    start: Start, preloaded: Preloaded, args: tuple[str, ...], failed: str, said: str
) -> None:
    model, driver = proofs.EMULATED
    proofs.save(Proof(gpu=model, driver=driver, failed=failed))
    daemon = start("1x256MiB", *args)
    assert said in daemon.status().pager_text
    assert moved_by(daemon, auto(preloaded, daemon)) == (MovedBy.CHECKPOINT, "")
    asks: PreloadedProgram = preloaded(daemon, KIWI_PRELOAD_OWN="1")
    asks.take(16)
    wait_until(
        lambda: moved_by(daemon, asks) == (MovedBy.INPROCESS, ""), "it gets what it asks for"
    )
