"""Probes of states and result codes: legal and illegal calls."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from callers import CALL_S, SHORT_S, named, within
from targets import Target, target

if TYPE_CHECKING:
    from callers import Caller
    from quirks_book import Book

STATES = {0: "RUNNING", 1: "LOCKED", 2: "CHECKPOINTED", 3: "FAILED", 4: "4", 5: "5"}


def wrong_states(book: Book, caller: Caller) -> None:
    """Probe every call in every state, illegal calls first: those must have no effect."""
    with target(caller) as one:
        path = {
            "running": (("checkpoint", "restore", "unlock"), "lock"),
            "locked": (("lock", "restore"), "checkpoint"),
            "checkpointed": (("lock", "checkpoint", "unlock"), "restore"),
        }
        for state, (wrong, onward) in path.items():
            for call in (*wrong, onward):
                _ask_in(book, caller, state, call, one.pid)
        _ask_in(book, caller, "restored", "unlock", one.pid)
        book.note("state.round_trip", "intact" if one.well() else f"not intact {one.died}")


def _ask_in(book: Book, caller: Caller, state: str, call: str, pid: int) -> None:
    answer = caller.ask(call, CALL_S, pid=pid)
    book.note(f"state.{state}.{call}", str(answer), seconds=answer.seconds)
    if answer.code is None:
        raise RuntimeError(f"{call} hangs, and with it whatever else is asked about this process")


def strangers(book: Book, caller: Caller) -> None:
    """Probe process ids that belong to no CUDA process."""
    stage = caller.stage
    plain = stage.spawn([sys.executable, "-c", "import sys; sys.stdin.read()"], stage.env)
    gone = stage.spawn([sys.executable, "-c", ""], stage.env)
    gone.end()
    keeper = Target(stage, "--zombie")
    try:
        pids = {"missing": gone.pid, "no_cuda": plain.pid, "zombie": keeper.ready()["zombie"]}
        for who, pid in pids.items():
            for call, words in (("state", {}), ("lock", {"timeout_ms": 1000})):
                answer = caller.ask(call, SHORT_S, pid=pid, **words)
                book.note(f"stranger.{who}.{call}", _with_state(answer), seconds=answer.seconds)
    finally:
        plain.end()
        keeper.kill()
    with target(caller) as one:
        threads = [int(tid) for tid in os.listdir(f"/proc/{one.pid}/task")]
        tid = next((t for t in threads if t != one.pid), 0)
        book.note("stranger.thread_id.state", _with_state(caller.ask("state", SHORT_S, pid=tid)))


def _with_state(answer: object) -> str:
    value = getattr(answer, "value", None)
    ok = getattr(answer, "ok", False)
    return (
        f"{answer}, state {STATES.get(value, value)}" if ok and value is not None else str(answer)
    )


def lock_limits(book: Book, caller: Caller) -> None:
    """Probe a lock while a kernel runs, with and without a time limit, and while a thread is in a
    synchronise call."""
    with target(caller) as one:
        one.do("spin_3s")
        short = caller.ask("lock", SHORT_S, pid=one.pid, timeout_ms=1000)
        book.note("lock.time_out", f"{short} ({short.seconds:.3f} s)", seconds=short.seconds)
        state = caller.ask("state", SHORT_S, pid=one.pid)
        book.note("lock.time_out.state_after", _with_state(state))
        long = caller.ask("lock", 10.0, pid=one.pid, timeout_ms=0)
        waited = "waits for the kernel, then " if long.seconds > 0.5 else "at once "
        book.note("lock.no_limit", f"{waited}{long}", seconds=long.seconds)
        caller.ask("unlock", SHORT_S, pid=one.pid)
        book.note("lock.job_afterwards", "intact" if one.well() else f"not intact {one.died}")
    with target(caller) as one:
        _lock_during_sync(book, caller, one)


def _lock_during_sync(book: Book, caller: Caller, one: Target) -> None:
    one.say("spin_2s_then_ctx_sync")
    time.sleep(0.5)  # the thread is inside by now; if not, the row says that the lock came first
    lock = caller.ask("lock", 10.0, pid=one.pid, timeout_ms=0)
    said = one.line(1.0)
    when = "returns before the unlock" if said else one.died or "waits for the unlock"
    code = f" with {named(said['code'])}" if said else ""
    book.note("lock.while_in_sync", f"lock {lock}; the sync {when}{code}", seconds=lock.seconds)
    caller.ask("unlock", SHORT_S, pid=one.pid)
    if said is None:
        one.line(within(caller.stage, SHORT_S))
