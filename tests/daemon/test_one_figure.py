"""Tests that a waiter, a watcher and a reader of the status see the same figure for a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from talker import Talker

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

FIGURES = ("expected_wait_s", "expected_low_s", "expected_high_s", "expected_why")


def figures(talker: Talker, kind: str) -> list[Any]:
    """Return the figures of the next message of that type."""
    message = talker.until(kind)
    told = message if kind == "waiting" else message["gpu"]["queue"][0]
    return [told.get(name) for name in FIGURES]


def test_the_figure_of_a_wait_is_the_same_wherever_it_is_read(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    """Nothing happens during the wait, and one socket keeps the order of the daemon's messages. So
    the message to the waiter and the watcher's status of one round have exactly the same figures,
    and the figures of an answer lie between those of the rounds before and after it."""
    daemon = start("1x256MiB", "--tq", "600", "--anti-thrash", "always")
    holder = program(daemon, 150)
    holder.start_burst()
    daemon.wait_for(lambda s: s.holders, "the holder works")
    with Talker(daemon.sockets()[0]) as talker:
        talker.hello(role="session")
        talker.say("acquire", burst=1)
        before = figures(talker, "waiting")
        talker.say("get-status")
        answer = figures(talker, "status")
        after = figures(talker, "waiting")
        assert all(x >= y >= z for x, y, z in zip(before[:3], answer[:3], after[:3], strict=True))
        assert answer[0] > 60, "a part of the quantum"
        talker.say("get-status", watch=True)
        talker.until("status")
        for _ in range(3):
            assert figures(talker, "waiting") == figures(talker, "status")
    holder.stop_burst()
