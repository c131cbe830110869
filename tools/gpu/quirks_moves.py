"""Probes of moves that take a while: queries and kills during a move, and the freed memory."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callers import CALL_S, SHORT_S, Caller
from quirks_states import STATES
from stage import GIB, MIB
from targets import target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from callers import Answer
    from quirks_book import Book
    from stage import Stage
    from targets import Target

REAL_BYTES, EMULATED_BYTES = 2 * GIB, 32 * MIB
"""Size that takes about a second each way; with less, a query could be late for other reasons."""
EMULATED_BYTES_PER_S = 32 * MIB
IN_THE_MIDDLE_S = 0.25
"""Time into a move: after the call has begun, and long before it ends."""
SETTLE_S = 20.0


def size_of(stage: Stage) -> int:
    return EMULATED_BYTES if stage.emulated else REAL_BYTES


@contextmanager
def visible_moves(stage: Stage) -> Iterator[None]:
    """Make moves of the emulated driver take as long as on a real one."""
    if not stage.emulated:
        yield
        return
    import kiwi_emulator as emulator

    state = Path(stage.env[emulator.ENV_STATE])
    emulator.set_copy_bandwidth(state, EMULATED_BYTES_PER_S)
    try:
        yield
    finally:
        emulator.set_copy_bandwidth(state, 0)


def queries_during_moves(book: Book, caller: Caller) -> None:
    """Ask for the state of a process that another caller moves, and the moving caller itself."""
    with target(caller, size_of(caller.stage)) as one, Caller(caller.stage) as other:
        other.need("state", pid=one.pid)
        caller.need("lock", SHORT_S, pid=one.pid, timeout_ms=1000)
        with visible_moves(caller.stage):
            for move in ("checkpoint", "restore"):
                _query_during(book, caller, other, one, move)
        caller.ask("unlock", SHORT_S, pid=one.pid)


def _query_during(book: Book, caller: Caller, other: Caller, one: Target, move: str) -> None:
    began_s = time.monotonic()
    moving = caller.begin(move, pid=one.pid)
    # Each call has a thread of its own: without this wait the query may come before the move.
    answer = caller.answer(moving, 0.05)
    own = caller.begin("state", pid=one.pid)
    longest = {"state": 0.0, "nvml": 0.0}
    while answer.code is None and time.monotonic() - began_s < CALL_S:
        for call, words in (("state", {"pid": one.pid}), ("nvml", {"uuid": caller.stage.uuid})):
            seen = other.ask(call, CALL_S, **words)
            longest[call] = max(longest[call], seen.seconds)
        answer = caller.answer(moving, 0.05)
    own_s = caller.answer(own, SHORT_S).seconds
    book.figure(f"move.{move}_s", round(answer.seconds, 4), "s")
    for name, seconds in (
        ("", longest["state"]),
        (".same_caller", own_s),
        (".nvml", longest["nvml"]),
    ):
        words = _blocked(seconds, answer)
        book.note(f"query.during_{move}{name}", words, seconds=seconds, move_s=answer.seconds)


def _blocked(seconds: float, move: Answer) -> str:
    if not move.ok:
        return f"the move did not end well: {move}"
    waits = seconds > max(0.1, move.seconds / 2)
    words = "waits until the move ends" if waits else "answers meanwhile"
    return f"{words} ({seconds:.3f} of {move.seconds:.3f} s)"


# --- memory -------------------------------------------------------------------------------------


def memory(book: Book, caller: Caller) -> None:
    """Probe the GPU memory that a paged-out process gives back, and the RAM that it takes."""
    stage = caller.stage
    with target(caller, size_of(stage)) as one:
        before, ram_before = nvml(caller), _status_bytes(one.pid, "VmRSS")
        caller.need("lock", SHORT_S, pid=one.pid, timeout_ms=1000)
        caller.need("checkpoint", pid=one.pid)
        out, ram_out = nvml(caller), _status_bytes(one.pid, "VmRSS")
        pinned = _status_bytes(one.pid, "VmLck") + _status_bytes(one.pid, "VmPin")
        caller.need("restore", pid=one.pid)
        back, ram_back = nvml(caller), _status_bytes(one.pid, "VmRSS")
        caller.ask("unlock", SHORT_S, pid=one.pid)
    figure = before["by_pid"].get(str(one.pid))
    book.note("nvml.row_while_checkpointed", _row_words(figure, out["by_pid"].get(str(one.pid))))
    freed = out["free"] - before["free"]
    book.note("memory.given_back", _over_words(freed, figure), freed_bytes=freed, nvml_bytes=figure)
    book.note("memory.taken_again", _over_words(out["free"] - back["free"], figure))
    book.note("memory.pinned_while_out", "none" if pinned == 0 else f"{pinned} bytes")
    book.figure("memory.ram_while_out_bytes", ram_out - ram_before, "B")
    book.figure("memory.ram_kept_afterwards_bytes", ram_back - ram_before, "B")


def nvml(caller: Caller) -> dict[str, Any]:
    found: dict[str, Any] = caller.need("nvml", SHORT_S, uuid=caller.stage.uuid).value
    return found


def _row_words(before: int | None, out: int | None) -> str:
    if before is None:
        return "NVML shows no row for a running process either"
    return "no row" if out is None else f"a row of {out / MIB:.0f} MiB"


def _over_words(freed: int, figure: int | None) -> str:
    if figure is None:
        return f"NVML has no figure to compare ({freed / MIB:.0f} MiB)"
    return f"NVML's figure {(freed - figure) / MIB:+.0f} MiB"


def _status_bytes(pid: int, field: str) -> int:
    """Return a field of ``/proc/<pid>/status``; 0 if it is missing."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


# --- killed meanwhile ---------------------------------------------------------------------------


def killed_callers(book: Book, caller: Caller) -> None:
    """Kill the calling process in the middle of a move; another process checks the state, and goes
    on."""
    with target(caller, size_of(caller.stage)) as one:
        caller.need("lock", SHORT_S, pid=one.pid, timeout_ms=1000)
        for move, before in (("checkpoint", "LOCKED"), ("restore", "CHECKPOINTED")):
            with Caller(caller.stage) as victim, visible_moves(caller.stage):
                victim.begin(move, pid=one.pid)
                time.sleep(IN_THE_MIDDLE_S)
                os.kill(victim.pid, signal.SIGKILL)
                after = _settled(caller, one.pid, before)
            words = "does not complete" if after == before else "completes"
            book.note(f"killed_caller.{move}", f"{words}: {after}")
        unlock = caller.ask("unlock", SHORT_S, pid=one.pid)
        book.note("killed_caller.unlock_by_another", str(unlock))
        book.note(
            "killed_caller.job_afterwards", "intact" if one.well() else f"not intact {one.died}"
        )


def _settled(caller: Caller, pid: int, before: str) -> str:
    """Return the state that a process reaches, or ``before`` if it does not change."""
    ends_s = time.monotonic() + SETTLE_S
    state = before
    while state in (before, "4", "5") and time.monotonic() < ends_s:
        answer = caller.ask("state", SHORT_S, pid=pid)
        if not answer.ok:
            return str(answer)
        state = STATES.get(answer.value, str(answer.value))
        time.sleep(0.05)
    return state


def killed_in_mid_move(book: Book, caller: Caller) -> None:
    """Kill the target in the middle of its checkpoint."""
    with target(caller, size_of(caller.stage)) as one:
        caller.need("lock", SHORT_S, pid=one.pid, timeout_ms=1000)
        before = nvml(caller)["free"]
        with visible_moves(caller.stage):
            moving = caller.begin("checkpoint", pid=one.pid)
            time.sleep(IN_THE_MIDDLE_S)
            os.kill(one.pid, signal.SIGKILL)
            answer = caller.answer(moving, CALL_S)
        one.kill()
        book.note("killed_target.checkpoint", str(answer), seconds=answer.seconds)
        freed = nvml(caller)["free"] - before >= size_of(caller.stage)
        book.note("killed_target.memory", "all given back" if freed else "not given back at once")
