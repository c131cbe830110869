"""A target process (``quirks_target.py``), for the probe that holds it."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from callers import HERE, SHORT_S, START_S, hangs, within

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from callers import Caller
    from stage import Program, Stage

QUIET_S = 2.0
"""Time after which an unanswered call of a held process counts as waiting."""
AFTER_S = 10.0
"""Time after the unlock when an unanswered call counts as waiting for ever."""
EXIT_S = 5.0

LOCKED, CHECKPOINTED = "LOCKED", "CHECKPOINTED"


class Target:
    """A target. ``died`` says how it died, once it has."""

    def __init__(self, stage: Stage, *words: str) -> None:
        self.stage = stage
        command = [sys.executable, str(HERE / "quirks_target.py"), *words]
        self.program: Program = stage.spawn(command, stage.env)
        self.pid = self.program.pid
        self.died = ""

    def ready(self) -> dict[str, Any]:
        return self.program.line(within(self.stage, START_S))

    def say(self, call: str) -> None:
        with suppress(OSError):  # the target has died: line() reports that
            self.program.say(call + "\n")

    def line(self, within_s: float) -> dict[str, Any] | None:
        """Return its next answer; ``None``: there is none in time, or it has died."""
        try:
            return self.program.line(within(self.stage, within_s))
        except TimeoutError:
            return None
        except RuntimeError:
            self.died = ended(self.program.end())
            return None

    def do(self, call: str, within_s: float = SHORT_S) -> str:
        """Make one call while nothing holds the target; return its result in words."""
        self.say(call)
        said = self.line(within_s)
        while said is not None and said["did"] != call:  # the late answer to an earlier call
            said = self.line(within_s)
        if said is None:
            return self.died or hangs(within_s)
        return "ok" if said["code"] == 0 else said.get("why", f"answered {said['code']}")

    def well(self) -> bool:
        """Return whether the target runs, with every byte unchanged."""
        return not self.died and self.do("intact", AFTER_S) == "ok"

    def retire(self, caller: Caller) -> None:
        """End the target, and never kill it while it is restored and alive: on 595 with the open
        module that hangs the host 20-35 s later (N#53). It is suspended first."""
        if self.pid in caller.hung_pids:
            self.kill()  # the driver would not suspend it
        if self.died:
            return
        self.say("exit")
        ends_s = time.monotonic() + within(self.stage, EXIT_S)
        while not self.died and time.monotonic() < ends_s:
            self.line(ends_s - time.monotonic())
        if not self.died:
            if caller.ask("lock", SHORT_S, pid=self.pid, timeout_ms=1000).ok:
                caller.ask("checkpoint", pid=self.pid)
            self.died = ended(self.program.end())

    def kill(self) -> None:
        """Kill the target; the caller knows that it is suspended, or never was."""
        if not self.died:
            self.died = ended(self.program.end())


def ended(status: int | None) -> str:
    """Return words for an exit status of ``subprocess``."""
    if status is None:
        return "cannot be ended"
    if status >= 0:
        return f"exit {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


@contextmanager
def targets(caller: Caller, count: int = 1, size: int = 0) -> Iterator[list[Target]]:
    """Start ``count`` targets in parallel; at the end none is left, in whatever state they are."""
    words = [f"--bytes={size}"] if size else []
    found = [Target(caller.stage, *words) for _ in range(count)]
    caller.start()
    try:
        for one in found:
            one.ready()
        yield found
    finally:
        let_go(caller, found)
        for one in found:  # side by side
            if not one.died and one.pid not in caller.hung_pids:
                one.say("exit")
        for one in found:
            one.retire(caller)


@contextmanager
def target(caller: Caller, size: int = 0) -> Iterator[Target]:
    """Start one target."""
    with targets(caller, 1, size) as found:
        yield found[0]


def let_go(caller: Caller, held: Sequence[Target]) -> None:
    """Restore and unlock all held targets; a running target answers ILLEGAL_STATE."""
    pids = [one.pid for one in held if not one.died and one.pid not in caller.hung_pids]
    if pids:
        caller.ask_all([{"call": "restore", "pid": pid} for pid in pids])
        caller.ask_all([{"call": "unlock", "pid": pid} for pid in pids], SHORT_S)


def hold(caller: Caller, found: Sequence[Target], state: str) -> list[str]:
    """Bring each target into ``state``; return for each "", or why it is not in that state."""
    steps: list[tuple[str, dict[str, int]]] = [("lock", {"timeout_ms": 3000})]
    if state == CHECKPOINTED:
        steps.append(("checkpoint", {}))
    why = [""] * len(found)
    for call, words in steps:
        there = [i for i, one in enumerate(found) if not why[i] and not one.died]
        calls = [{"call": call, "pid": found[i].pid, **words} for i in there]
        for i, answer in zip(there, caller.ask_all(calls), strict=True):
            why[i] = "" if answer.ok else f"the {call} before it: {answer}"
    return why
