"""Tests of memory that is brought back before use, and of memory that another client sends out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemon import wait_until

from kiwi_core.client import Client
from kiwi_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

Start = Callable[..., "Daemon"] if TYPE_CHECKING else object
Program = Callable[..., "SessionProgram"] if TYPE_CHECKING else object


def session_of(daemon: Daemon, one: SessionProgram) -> str:
    session = daemon.session(one.pid)
    assert session is not None
    return session.id


def test_memory_is_back_before_it_is_used_with_the_right_bytes(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, 150)
    session = session_of(daemon, one)
    daemon.wait_state(one.pid, "idle")
    with daemon.client() as observer:
        assert observer.bring_back(session) == (False, "its memory is in the GPU")
        observer.release(session)
        daemon.wait_state(one.pid, "paged-out")
        assert observer.bring_back(session) == (True, "")
        daemon.wait_state(one.pid, "idle")
        assert observer.status().holders == []
        moves = [e for e in observer.history().entries if e.kind.value in ("out", "in")]
        assert [(e.kind.value, e.hinted, e.ok) for e in moves] == [
            ("out", False, True), ("in", True, True),
        ]  # fmt: skip
    assert one.worker.get("digest(p, size) == contents"), "in the GPU, without a lease"
    words = len(one.waits())
    assert one.intact()
    assert len(one.waits()) == words, "its cell did not wait"
    assert not one.notices(), "nothing happened that its user must know"


def test_room_is_made_only_of_what_has_been_idle_a_while(start: Start, program: Program) -> None:
    daemon = start("1x256MiB")
    one, other = program(daemon, 150), program(daemon, 150)
    daemon.wait_state(one.pid, "paged-out")
    daemon.wait_state(other.pid, "idle")
    begun, why = one.worker.get("client.bring_back()")
    assert not begun
    assert "just now" in why
    wait_until(lambda: one.worker.get("client.bring_back()")[0], "the other one has been idle")
    daemon.wait_state(one.pid, "idle")
    daemon.wait_state(other.pid, "paged-out")
    # Memory that was just brought back is not sent out again for the next hint.
    begun, why = other.worker.get("client.bring_back()")
    assert not begun
    assert "just now" in why
    assert other.intact(), "who asks for the GPU gets it, hints or not"
    assert one.intact()


def test_nobody_is_brought_back_while_somebody_runs_or_waits(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "3600", "--anti-thrash", "always")
    out, runner, waiter = program(daemon, 20), program(daemon, 20), program(daemon, 20)
    out.worker.do("client.release()")
    daemon.wait_state(out.pid, "paged-out")
    runner.start_burst()
    wait_until(runner.granted, "running")
    assert list(out.worker.get("client.bring_back()")) == [False, "the GPU is in use"]
    waiter.start_burst()
    daemon.wait_state(waiter.pid, "waiting")
    assert not out.worker.get("client.bring_back()")[0]
    assert list(waiter.worker.get("client.bring_back()")) == [
        False, "it is in a burst, or its memory moves",
    ]  # fmt: skip
    assert daemon.session(out.pid).state.value == "paged-out"  # type: ignore[union-attr]
    runner.stop_burst()
    wait_until(waiter.granted, "its turn")
    waiter.stop_burst()
    wait_until(lambda: out.worker.get("client.bring_back()")[0], "nobody is in the way now")
    daemon.wait_state(out.pid, "idle")
    assert out.intact()


def test_an_observer_releases_what_is_at_rest_and_the_log_says_who(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, 150, name="left-alone.ipynb")
    session = session_of(daemon, one)
    with daemon.client() as observer:
        for nobody in ("", "k0000000000"):
            _refused(observer, nobody, "no-such-session")
        one.start_burst()
        wait_until(one.granted, "running")
        _refused(observer, session, "in-burst")
        assert daemon.session(one.pid).state.value == "running"  # type: ignore[union-attr]
        one.stop_burst()
        daemon.wait_state(one.pid, "idle")
        observer.release(session)
        daemon.wait_state(one.pid, "paged-out")
        observer.release(session)
    said = [line for line in daemon.log().splitlines() if "left-alone.ipynb" in line]
    assert any("release" in line and "in-burst" in line for line in said)
    assert any("release" in line and "by=" in line and session in line for line in said)
    assert one.intact()


def test_a_release_that_system_ram_has_no_room_for_says_so(start: Start, program: Program) -> None:
    daemon = start("1x256MiB", "--host-budget", "10MiB")
    one = program(daemon, 150)
    daemon.wait_state(one.pid, "idle")
    with daemon.client() as observer:
        _refused(observer, session_of(daemon, one), "no-host-memory")
    assert daemon.session(one.pid).state.value == "idle"  # type: ignore[union-attr]
    assert one.intact()


def _refused(observer: Client, session: str, code: str) -> None:
    with pytest.raises(PeerError) as caught:
        observer.release(session)
    assert caught.value.code == code
