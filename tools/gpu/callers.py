"""Driver calls about other processes, made by a helper process with a deadline for each call.

A part never makes such a call itself: it would hang with the call. A call without an answer within
its limit is reported as such (``Answer.code`` is ``None``), and its helper is ended and replaced.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stage import Program, Stage

HERE = Path(__file__).resolve().parent

START_S = 40.0
"""Limit for the start of a helper or a target: imports and ``cuInit``, 1-3 s each, in parallel."""
CALL_S = 15.0
"""Limit of a call, unless the caller says otherwise: a 16 GB process took the driver 15 s
(N#29)."""
SHORT_S = 5.0
"""Limit of a call that takes milliseconds if it does not hang."""
RESERVE_S = 4.0
"""Part of the time reserved for the end of processes; the stage keeps more for those that hang."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a call. ``code`` is the driver's number; ``None``: the call never answered,
    and ``why`` says what is known. -1: the call failed outside the driver, and ``value`` says
    how."""

    code: int | None
    seconds: float
    value: Any = None
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.code is None:
            return self.why
        return str(self.value) if self.code == -1 else named(self.code)


_NAMES = {
    0: "SUCCESS", 1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 3: "NOT_INITIALIZED",
    201: "INVALID_CONTEXT", 304: "OPERATING_SYSTEM", 401: "ILLEGAL_STATE", 600: "NOT_READY",
    700: "ILLEGAL_ADDRESS", 719: "LAUNCH_FAILED", 800: "NOT_PERMITTED", 801: "NOT_SUPPORTED",
}  # fmt: skip


def named(code: int) -> str:
    return f"{code} {_NAMES[code]}" if code in _NAMES else str(code)


def hangs(within_s: float) -> str:
    return f"hangs (no answer in {within_s:.0f} s)"


def within(stage: Stage, wanted_s: float) -> float:
    """Return ``wanted_s``, or what is left of the part's time, but never 0."""
    return max(0.05, min(wanted_s, stage.left_s - RESERVE_S / 2))


class Caller:
    """A helper process (``driver_caller.py``), started when it is first needed."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._program: Program | None = None
        self._ready = False
        self._answers: dict[int, Answer] = {}
        self._next_id = 0
        self.hung_pids: set[int] = set()
        """Processes on which a call hung: any other call about them would hang, too."""

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._started().pid

    def start(self) -> None:
        """Start the helper without waiting for it: ``cuInit`` takes seconds."""
        if self._program is None:
            command = [sys.executable, str(HERE / "driver_caller.py")]
            self._program = self.stage.spawn(command, self.stage.env)
            self._ready = False

    def begin(self, call: str, **words: Any) -> int:
        """Send a call; ``answer`` waits for it."""
        program = self._started()
        self._next_id += 1
        with suppress(OSError):  # answer() detects a helper that has died
            program.say(json.dumps({"id": self._next_id, "call": call, **words}) + "\n")
        return self._next_id

    def answer(self, number: int, within_s: float = CALL_S) -> Answer:
        """Wait for the answer to call ``number``; the helper stays as it is if there is none."""
        within_s = within(self.stage, within_s)
        began_s = time.monotonic()
        while number not in self._answers:
            if self._program is None:
                return Answer(None, 0.0, why="its calling process had to be ended")
            left_s = began_s + within_s - time.monotonic()
            try:
                self._read(max(0.0, left_s))
            except TimeoutError:
                return Answer(None, within_s, why=hangs(within_s))
            except RuntimeError as error:
                took_s = time.monotonic() - began_s
                return Answer(None, took_s, why=f"the calling process died: {error}")
        return self._answers.pop(number)

    def ask(self, call: str, limit_s: float = CALL_S, **words: Any) -> Answer:
        """Make one call. A helper in which it hangs, or which it kills, is replaced."""
        return self.ask_all([{"call": call, **words}], limit_s)[0]

    def ask_all(self, calls: Sequence[dict[str, Any]], within_s: float = CALL_S) -> list[Answer]:
        """Make several calls side by side."""
        numbers = [self.begin(**call) for call in calls]
        ends_s = time.monotonic() + within_s
        found = [self.answer(n, max(0.05, ends_s - time.monotonic())) for n in numbers]
        if any(one.code is None for one in found):
            self.close()
        for call, one in zip(calls, found, strict=True):
            if one.code is None and "pid" in call:
                self.hung_pids.add(call["pid"])
        return found

    def need(self, call: str, limit_s: float = CALL_S, **words: Any) -> Answer:
        """Make a call without which the rest means nothing. Raises RuntimeError if it fails."""
        answer = self.ask(call, limit_s, **words)
        if not answer.ok:
            raise RuntimeError(
                f"{call} of a process: {answer}" if "pid" in words else f"{call}: {answer}"
            )
        return answer

    def close(self) -> None:
        """End the helper, whatever hangs in it."""
        program, self._program = self._program, None
        self._answers.clear()
        if program is not None:
            program.end()

    def _started(self) -> Program:
        self.start()
        assert self._program is not None
        if not self._ready:
            try:
                self._program.line(within(self.stage, START_S))
            except (TimeoutError, RuntimeError):
                self.close()
                raise
            self._ready = True
        return self._program

    def _read(self, within_s: float) -> None:
        assert self._program is not None
        said = self._program.line(within_s)
        self._answers[said["id"]] = Answer(said["code"], said["seconds"], said["value"])


def see_off(caller: Caller, program: Program, within_s: float = 10.0) -> int | None:
    """End a program that may be restored and alive, by the end of its input. A program that does
    not end is suspended before it is killed: on 595 with the open module, killing a restored
    process hangs the host 20-35 s later (N#53)."""
    if program.pid in caller.hung_pids:
        return program.end()
    try:
        program.finish(within(caller.stage, within_s))
    except TimeoutError:
        if caller.ask("lock", SHORT_S, pid=program.pid, timeout_ms=1000).ok:
            caller.ask("checkpoint", pid=program.pid)
    except RuntimeError:
        pass  # it has ended by itself: its status says how
    return program.end()
