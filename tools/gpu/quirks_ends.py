"""Probes of how held processes end, of stopped processes, and of a restore that fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from callers import CALL_S, HERE, SHORT_S, START_S, Caller, within
from quirks_moves import nvml
from quirks_states import STATES
from stage import GIB, MIB
from targets import CHECKPOINTED, LOCKED, QUIET_S, Target, hold, let_go, target, targets

if TYPE_CHECKING:
    from quirks_book import Book

STOPPED_S = 3.0
"""Limit of calls about a stopped process; the lock has its own limit of one second."""
FREED_S = 1.0
"""Time after the end of a process in which its memory may become free."""
SMALL_BYTES = 32 * MIB
"""Differences of free memory below this are the driver's own."""
ROOM_STEPS = 3
"""Number of times that a failed restore is repeated."""


def exits(book: Book, caller: Caller) -> None:
    """Probe the normal end of a held Python program that does not wait for the GPU."""
    for state in (LOCKED, CHECKPOINTED):
        with target(caller) as one:
            why = hold(caller, [one], state)[0]
            one.say("exit")
            one.line(QUIET_S)
            when = "at once" if one.died else "after the unlock"
            if not one.died:
                let_go(caller, [one])
                one.line(SHORT_S)
            book.note(f"exit.while_{state.lower()}", why or f"{one.died or 'never'} {when}")


def signals(book: Book, caller: Caller) -> None:
    """Probe signals to processes that are out."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with target(caller) as one:
            why = hold(caller, [one], CHECKPOINTED)[0]
            began_s = time.monotonic()
            os.kill(one.pid, number)
            one.line(SHORT_S)
            words = f"{one.died or 'does not end'} ({time.monotonic() - began_s:.2f} s)"
            book.note(f"signal.{number.name}", why or words)
    with target(caller) as one:
        _interrupt(book, caller, one)


def _interrupt(book: Book, caller: Caller, one: Target) -> None:
    """Probe SIGINT, whose Python handler cannot run while the program is inside a call."""
    why = hold(caller, [one], CHECKPOINTED)[0]
    one.say("cuMemcpyDtoH")
    time.sleep(0.5)
    os.kill(one.pid, signal.SIGINT)
    during = one.line(QUIET_S)
    let_go(caller, [one])
    after = during or one.line(SHORT_S)
    when = "at once" if during else "after the resume"
    words = f"its handler runs {when}" if after else one.died or "its handler never runs"
    book.note("signal.SIGINT.in_a_call", why or words)


# --- stopped ------------------------------------------------------------------------------------


def stopped(book: Book, caller: Caller) -> None:
    """Probe calls about processes under SIGSTOP: each from a caller of its own, because the caller
    may hang. Meanwhile the same caller asks about a healthy process, to see whether one caller's
    calls are serialised."""
    calls: dict[str, dict[str, Any]] = {"state": {}, "lock": {"timeout_ms": 1000}, "restore": {}}
    held = {"restore": CHECKPOINTED}
    others = {call: Caller(caller.stage) for call in calls}
    for other in others.values():
        other.start()
    try:
        with targets(caller, 2 * len(calls)) as found:
            pairs = dict(zip(calls, zip(found[::2], found[1::2], strict=True), strict=True))
            for call, (one, _) in pairs.items():
                if call in held:
                    hold(caller, [one], held[call])
            for call, (one, healthy) in pairs.items():
                _while_stopped(book, caller, others[call], (call, calls[call]), one, healthy)
            let_go(caller, found)
            well = [one.well() for one, _ in pairs.values()]
            book.note("stopped.jobs_afterwards", "intact" if all(well) else f"not intact {well}")
    finally:
        for other in others.values():
            other.close()


def _while_stopped(
    book: Book,
    caller: Caller,
    other: Caller,
    asked: tuple[str, dict[str, Any]],
    one: Target,
    healthy: Target,
) -> None:
    """Let ``other`` make a call about ``one`` while it is stopped; meanwhile ask about a healthy
    process, from the same calling process and from another."""
    call, words = asked
    other.ask("state", SHORT_S, pid=healthy.pid)  # waits until the caller is up
    os.kill(one.pid, signal.SIGSTOP)
    try:
        hung = other.begin(call, pid=one.pid, **words)
        time.sleep(0.3)
        beside = other.answer(other.begin("state", pid=healthy.pid), SHORT_S)
        second = other.begin("state", pid=one.pid)
        time.sleep(0.3)
        beside_two = other.answer(other.begin("state", pid=healthy.pid), SHORT_S)
        elsewhere = caller.ask("state", SHORT_S, pid=healthy.pid)
        answer = other.answer(hung, STOPPED_S)
    finally:
        os.kill(one.pid, signal.SIGCONT)
    book.note(f"stopped.{call}", str(answer), seconds=answer.seconds)
    if answer.code is not None:
        return
    book.note(f"stopped.{call}.healthy_same_caller", str(beside), seconds=beside.seconds)
    book.note(f"stopped.{call}.healthy_beside_two", str(beside_two), seconds=beside_two.seconds)
    book.note(f"stopped.{call}.healthy_other_caller", str(elsewhere), seconds=elsewhere.seconds)
    other.answer(second, CALL_S)
    after = other.answer(hung, CALL_S)
    book.note(f"stopped.{call}.after_SIGCONT", str(after), seconds=after.seconds)


# --- a restore that fails -----------------------------------------------------------------------


def failed_restore(book: Book, caller: Caller) -> None:
    """Fill the GPU with a hog, so that a restore has no room. The restore keeps the memory that it
    takes until its process is killed, which happens at the very end."""
    size = 32 * MIB if caller.stage.emulated else 2 * GIB
    empty_free = _free(caller)
    victim = Target(caller.stage, f"--bytes={size}")
    try:
        victim.ready()
        why = hold(caller, [victim], CHECKPOINTED)[0]
        if why:
            book.note("failed_restore.restore", f"not tried: {why}")
            return
        _without_room(book, caller, victim, size)
    finally:
        let_go(caller, [victim])  # on other drivers the victim is well, and must not be killed
        victim.retire(caller)
    time.sleep(FREED_S)
    missing = empty_free - _free(caller)
    words = (
        "all is free again" if missing < SMALL_BYTES else f"less is free ({missing / MIB:.0f} MiB)"
    )
    book.note("failed_restore.after_the_kill", words, missing_bytes=missing)


def _without_room(book: Book, caller: Caller, victim: Target, size: int) -> None:
    stage, free = caller.stage, _free(caller)
    words = [sys.executable, str(HERE / "quirks_target.py"), f"--hog={size // 2}"]
    hog = stage.spawn(words, stage.env)
    try:
        hog.line(within(stage, START_S))
        left = _free(caller)
        first = caller.ask("restore", pid=victim.pid)
        book.note("failed_restore.restore", str(first), seconds=first.seconds)
        kept = left - _free(caller)
        owner = nvml(caller)["by_pid"].get(str(victim.pid))
        book.note("failed_restore.grabs", _grabbed(kept, left), bytes=kept, free_bytes=left)
        book.note("failed_restore.nvml_row", "no row" if owner is None else "a row", bytes=owner)
        state = caller.ask("state", SHORT_S, pid=victim.pid)
        book.note("failed_restore.state", STATES.get(state.value, str(state)))
    finally:
        hog.end()
    time.sleep(FREED_S)
    _with_room_again(book, caller, victim, free)


def _grabbed(kept: int, free: int) -> str:
    if kept < min(SMALL_BYTES, free // 2):
        return "nothing"
    share = "all" if kept > 0.9 * free else "a part"
    return f"{share} of what was free ({kept / MIB:.0f} of {free / MIB:.0f} MiB)"


def _with_room_again(book: Book, caller: Caller, victim: Target, free: int) -> None:
    missing = free - _free(caller)
    small = min(SMALL_BYTES, free // 16)
    words = "nothing" if missing < small else f"GPU memory ({missing / MIB:.0f} MiB)"
    book.note("failed_restore.keeps", words, bytes=missing)
    again = {str(caller.ask("restore", pid=victim.pid)) for _ in range(ROOM_STEPS)}
    book.note("failed_restore.again_with_room", " or ".join(sorted(again)))
    for call in ("unlock", "checkpoint"):
        book.note(f"failed_restore.{call}", str(caller.ask(call, SHORT_S, pid=victim.pid)))


def _free(caller: Caller) -> int:
    return int(nvml(caller)["free"])
