"""Two ways to suspend a job: from outside by the driver at random moments, and under a daemon."""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from callers import HERE, START_S, Caller, see_off, within
from stage import MIB, daemon
from targets import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stage import Daemon, Program, Stage

SEED = 20
EMULATED_COUNT = 10
GAP_S = (0.01, 0.2)
"""Range of the random time that a job runs between two suspensions, some rounds long."""
OUT_S = (0.0, 0.05)
MOVE_S = 20.0
REFUSALS_MAX = 5
"""Number of refused locks that are tolerated: a lock may come too late in a long kernel."""
READY_S = 60.0
ENDS_S = 15.0
"""Time limit of the last digest of a job, which hashes all that the job holds."""
SET_UP_TQ_S, TQ_S = 5.0, 0.3
"""Quantum while the jobs set up, one after the other, and afterwards."""
SHORT_TURNS = ("--anti-thrash", "always", "--policy", "round-robin", "--swap-floor", "0")
LATE_S = 3.0
"""Time limit for a program that is probably held, and for a call that is past its own limit."""
PACE_S = 0.003
"""Rest after each round, for a job that would otherwise do more rounds than an undisturbed run of
the same length has time for: under a daemon, and on the emulated driver."""


@dataclass(frozen=True)
class Way:
    """How jobs take turns: their pager, the GPU memory that a program outside leaves to them, the
    ballast of each, and how often each is to be suspended. ``kinds`` are the jobs, of which one may
    come twice; ``most_s`` limits the time for the turns; ``words`` are for each job."""

    pager: str
    kinds: tuple[str, ...]
    leave_bytes: int
    size_bytes: int
    wanted: int
    most_s: float = 110.0
    words: tuple[str, ...] = ()


EMULATED_LEAVE_BYTES, EMULATED_BYTES = 96 * MIB, 48 * MIB


@dataclass
class Suspended:
    """The outcome of a job: how often it was suspended, and its last output."""

    kind: str
    name: str
    count: int = 0
    wanted: int = 0
    out_s: list[float] = field(default_factory=list)
    in_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    gb_s: dict[str, float] = field(default_factory=dict)
    """Median of the last moves, each way."""
    refused: list[str] = field(default_factory=list)
    trouble: str = ""
    said: dict[str, Any] | None = None

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {"suspensions": self.count, "moved_bytes": self.moved_bytes}
        for name, seconds in (("out", self.out_s), ("in", self.in_s)):
            if seconds:
                found[f"mean_{name}_s"] = round(sum(seconds) / len(seconds), 4)
                found[f"longest_{name}_s"] = round(max(seconds), 4)
        found |= {f"{way}_gb_s": rate for way, rate in self.gb_s.items()}
        if self.refused:
            found["refused"] = self.refused
        return found


def command(kind: str, size: int, *words: str) -> list[str]:
    return [sys.executable, str(HERE / "suspended_job.py"), kind, f"--bytes={size}", *words]


def last_words(job: Suspended, program: Program, within_s: float) -> None:
    """End a job's input and record its last output, or how it died."""
    try:
        job.said = program.finish(within_s)
    except TimeoutError:
        job.trouble = job.trouble or f"it did not end in {within_s:.0f} s"
    except RuntimeError:
        job.trouble = f"{job.trouble}; it died: " if job.trouble else "it died: "
        job.trouble += ended(program.end())


# --- from outside, by the driver's checkpoint ---------------------------------------------------


class Outside(threading.Thread):
    """A thread that suspends a job by Kiwi's checkpoint pager, through a helper process, until the
    job has been suspended ``count`` times or the time is over."""

    def __init__(self, stage: Stage, kind: str, size: int, count: int, *words: str) -> None:
        super().__init__(daemon=True)
        self.stage, self.job = stage, Suspended(kind, kind, wanted=count)
        self.caller = Caller(stage)
        pace = [f"--pace={PACE_S}"] if stage.emulated else []
        self.program = stage.spawn(command(kind, size, *pace, *words))
        self.caller.start()
        self._random = random.Random(f"{SEED} {kind}")
        self.ends_s = 0.0

    def prepare(self) -> None:
        """Wait until the job is set up; the time for suspensions begins afterwards."""
        try:
            self.program.line(within(self.stage, READY_S))
        except (TimeoutError, RuntimeError) as error:
            self.job.trouble = f"it did not come up: {error}"

    def run(self) -> None:
        try:
            while self._goes_on():
                self._once()
        except Exception as error:  # noqa: BLE001 - said in this job's row; others go on
            self.job.trouble = f"{type(error).__name__}: {error}"[:300]

    def close(self) -> None:
        """End the job gently, and the helper."""
        if self.job.trouble.startswith("it did not come up"):
            self.program.end()
        else:
            held = self.job.trouble.startswith("page_")
            last_words(self.job, self.program, within(self.stage, LATE_S if held else ENDS_S))
        see_off(self.caller, self.program, 0.5)
        self.caller.close()

    def _goes_on(self) -> bool:
        job = self.job
        well = not job.trouble and len(job.refused) <= REFUSALS_MAX
        return well and job.count < job.wanted and time.monotonic() < self.ends_s

    def _once(self) -> None:
        time.sleep(self._random.uniform(*GAP_S))
        out = self._move("page_out")
        if not out.ok:
            self._failed("page_out", out, final=out.code is None)
            return
        time.sleep(self._random.uniform(*OUT_S))
        back = self._move("page_in")
        if not back.ok:
            self._failed("page_in", back, final=True)
            return
        self.job.count += 1
        self.job.out_s.append(out.value["seconds"])
        self.job.in_s.append(back.value["seconds"])
        self.job.moved_bytes += out.value["bytes"]

    def _move(self, way: str) -> Any:
        words = {"pid": self.program.pid, "uuid": self.stage.uuid, "within_s": MOVE_S}
        return self.caller.ask(way, MOVE_S + LATE_S, **words)

    def _failed(self, way: str, answer: Any, *, final: bool) -> None:
        if final or self.program.status() is not None:
            self.job.trouble = f"{way}: {answer}"
        else:
            self.job.refused.append(f"{way}: {answer}")


def from_outside(
    threads: Sequence[Outside], seconds: float, tell: Callable[[Suspended], None]
) -> None:
    """Suspend all jobs at the same time; call ``tell`` with each from time to time, and at its end
    before anything is compared. The caller closes them."""
    for one in threads:
        one.prepare()
    ends_s = time.monotonic() + seconds
    for one in threads:
        one.ends_s = ends_s
        one.start()
    told_s = time.monotonic()
    while any(one.is_alive() for one in threads) and time.monotonic() < ends_s + 2 * MOVE_S:
        time.sleep(0.1)
        if time.monotonic() > told_s + 3.0:
            told_s = time.monotonic()
            for one in threads:
                tell(one.job)


# --- under a daemon -------------------------------------------------------------------------------


def under_a_daemon(stage: Stage, kinds: Sequence[str], seconds: float, way: Way) -> list[Suspended]:
    """Let jobs take the shortest turns. Another program fills the GPU so far that the jobs do not
    fit together, so that their memory really moves."""
    leave, size, count = way.leave_bytes, way.size_bytes, way.wanted
    if stage.emulated:
        leave, size, count = EMULATED_LEAVE_BYTES, EMULATED_BYTES, EMULATED_COUNT
    jobs = [
        Suspended(kind, f"{kind}-2" if kind in kinds[:number] else kind, wanted=count)
        for number, kind in enumerate(kinds)
    ]
    if len(jobs) < 2:
        jobs.append(Suspended("driver", "partner", wanted=count))
    hog = stage.spawn([sys.executable, str(HERE / "quirks_target.py"), f"--hog={leave}"])
    try:
        hog.line(within(stage, START_S))
        with daemon(stage, SET_UP_TQ_S, *SHORT_TURNS) as one:
            programs = [
                one.run(
                    job.name, command(job.kind, size, f"--pace={PACE_S}", *way.words), way.pager
                )
                for job in jobs
            ]
            try:
                _take_turns(stage, one, jobs, programs, seconds)
            finally:
                for program in programs:
                    program.end()
    finally:
        hog.end()
    return jobs


def _take_turns(
    stage: Stage, one: Daemon, jobs: list[Suspended], programs: list[Program], seconds: float
) -> None:
    """Wait until the jobs have set up, and then until all were suspended often enough or
    ``seconds`` are over since the beginning."""
    ends_s = time.monotonic() + seconds
    ready_by_s = time.monotonic() + within(stage, READY_S)
    for job, program in zip(jobs, programs, strict=True):
        try:
            program.line(ready_by_s - time.monotonic())
        except (TimeoutError, RuntimeError) as error:
            job.trouble = f"it did not come up: {error}"
            program.show_stacks()
    one.set(f"tq={TQ_S}")
    while time.monotonic() < ends_s and any(job.count < job.wanted for job in jobs):
        time.sleep(0.25)
        _look(one, jobs)
    for program in programs:
        program.end_input()
    for job, program in zip(jobs, programs, strict=True):
        if not job.trouble:
            last_words(job, program, within(stage, ENDS_S + START_S))


def _look(one: Daemon, jobs: list[Suspended]) -> None:
    """Read from ``kiwi status --json`` the suspensions by session, and the last moves."""
    with suppress(Exception):  # a daemon that does not answer now answers the next time
        status = one.status()
        by_name = {session["name"]: session for session in status["sessions"]}
        for job in jobs:
            session = by_name.get(job.name)
            if session is None:
                continue
            job.count = max(job.count, session["suspensions"])
            moves = [
                s for s in status["swaps"] if s["session"] == session["id"] and s["seconds"] > 0
            ]
            for way, known in (("out", job.out_s), ("in", job.in_s)):
                mine = [s for s in moves if s["direction"] == way]
                known[:] = [s["seconds"] for s in mine] or known
                if mine:
                    rates = [s["bytes_moved"] / s["seconds"] / 1e9 for s in mine]
                    job.gb_s[way] = round(statistics.median(rates), 2)
            job.moved_bytes = sum(s["bytes_moved"] for s in moves) or job.moved_bytes
