"""A part of run_all.py: whether results are the same, to the last bit, after random suspensions.

Rows: ``checkpoint.KIND`` (the driver's checkpoint by Kiwi's own pager, from outside)
and ``inprocess.KIND`` (``kiwi run --pager inprocess``, taking turns under a daemon).
``run_dangerous`` has a job that waits for the GPU by a bare synchronise, which kills a checkpointed
process: its row says how it ends.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

from callers import within
from stage import MIB
from suspending import (
    COUNT,
    EMULATED_COUNT,
    READY_S,
    Outside,
    Suspended,
    command,
    from_outside,
    under_a_daemon,
)

if TYPE_CHECKING:
    from stage import Program, Stage

LIBRARIES = ("torch", "cupy", "jax")
SIZE, EMULATED_SIZE = 64 * MIB, 16 * MIB
"""Ballast of a job that is moved from outside: the fixed cost of a move dominates, not the
bytes."""
OUTSIDE_SHARE, INSIDE_SHARE = 0.5, 0.55
"""Shares of the remaining time for suspensions from outside, and of the rest under a daemon. The
undisturbed run, which does the same rounds without pauses, gets what remains."""
OUTSIDE_MAX_S, INSIDE_MAX_S = 170.0, 90.0
DANGEROUS_S, DANGEROUS_COUNT = 20.0, 20

Found = dict[str, list[Suspended]]


def run(stage: Stage) -> None:
    kinds = _kinds(stage)
    if not kinds:
        return
    count = EMULATED_COUNT if stage.emulated else COUNT
    found: Found = {"checkpoint": _from_outside(stage, kinds, count)}
    seconds = min(INSIDE_MAX_S, stage.left_s * INSIDE_SHARE)
    with stage.attempt("inprocess"):
        found["inprocess"] = under_a_daemon(stage, kinds, seconds, count)
        for job in found["inprocess"]:
            _tell(stage, "inprocess", job)
    with stage.attempt("undisturbed"):
        _compare(stage, found)


def run_dangerous(stage: Stage) -> None:
    """Suspend jobs that wait for the GPU by a bare synchronise. On a real driver such a call kills
    a process that is checkpointed, unless a gate in front of the driver holds it back."""
    for kind in ["driver"] if stage.emulated else ["driver", *_kinds(stage)]:
        with stage.attempt(f"synchronise.{kind}"):
            one = Outside(stage, kind, EMULATED_SIZE, DANGEROUS_COUNT, "--synchronise")
            try:
                from_outside([one], min(DANGEROUS_S, stage.left_s / 3), lambda _: None)
            finally:
                one.close()
            job = one.job
            words = f"{job.count} suspensions, then {job.trouble or 'it ended well'}"
            stage.row(f"synchronise.{kind}", words, **job.figures())


def _kinds(stage: Stage) -> list[str]:
    if stage.emulated:
        _left_out(stage, LIBRARIES, "needs the CUDA runtime")
        return ["driver"]
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    _left_out(stage, missing, "is not installed")
    return [name for name in LIBRARIES if name not in missing] or ["driver"]


def _left_out(stage: Stage, kinds: Any, why: str) -> None:
    for kind in kinds:
        for pager in ("checkpoint", "inprocess"):
            stage.row(f"{pager}.{kind}", f"left out: {kind} {why}")


def _from_outside(stage: Stage, kinds: list[str], count: int) -> list[Suspended]:
    size = EMULATED_SIZE if stage.emulated else SIZE
    seconds = min(OUTSIDE_MAX_S, stage.left_s * OUTSIDE_SHARE)
    threads = [Outside(stage, kind, size, count) for kind in kinds]
    try:
        from_outside(threads, seconds, lambda job: _tell(stage, "checkpoint", job))
    finally:
        for one in threads:
            one.close()
    for one in threads:
        _tell(stage, "checkpoint", one.job)
    return [one.job for one in threads]


# --- rows ---------------------------------------------------------------------------------------


def _tell(stage: Stage, pager: str, job: Suspended) -> None:
    """Record what is known before the comparison, for a part that is cut off."""
    words = f"{job.count} of {job.wanted}, not compared yet"
    _row(stage, pager, job, words, False if job.trouble else None)


def _row(stage: Stage, pager: str, job: Suspended, words: str, passed: bool | None) -> None:
    if job.trouble:
        words = f"{words}; {job.trouble}"
    target = f"{job.wanted} of {job.wanted}, identical"
    more = job.figures() | ({"rounds": job.said["rounds"]} if job.said else {})
    stage.row(f"{pager}.{job.name}", words, target=target, passed=passed, **more)


def _judge(stage: Stage, pager: str, job: Suspended, digest: str | None) -> None:
    reached = f"{job.count} of {job.wanted}"
    if job.said is None or digest is None:
        why = "there is no result to compare" if job.said is None else "not compared: no time"
        _row(stage, pager, job, f"{reached}, {why}", False if job.trouble else None)
        return
    same = job.said["digest"] == digest and job.said["ballast_same"]
    whole = job.count >= job.wanted
    words = f"{reached}, {'identical' if same else 'DIFFERENT'}"
    if not whole and not job.trouble:
        words += "; the time was up"
    verdict = same and not job.trouble and (True if whole else None)
    _row(stage, pager, job, words, verdict)


# --- the undisturbed run ------------------------------------------------------------------------


def _compare(stage: Stage, found: Found) -> None:
    """Run each kind once more, undisturbed, for the same number of rounds, all in parallel."""
    marks: dict[str, set[int]] = {}
    for jobs in found.values():
        for job in jobs:
            if job.said:
                marks.setdefault(job.kind, set()).add(job.said["rounds"])
    programs = {
        kind: stage.spawn(command(kind, MIB, f"--marks={','.join(map(str, sorted(rounds)))}"))
        for kind, rounds in marks.items()
    }
    try:
        digests = {kind: _digests(stage, programs[kind], len(marks[kind])) for kind in programs}
    finally:
        for program in programs.values():
            program.end()
    for pager, jobs in found.items():
        for job in jobs:
            rounds = job.said["rounds"] if job.said else -1
            _judge(stage, pager, job, digests.get(job.kind, {}).get(rounds))


def _digests(stage: Stage, program: Program, count: int) -> dict[int, str]:
    """Return digests by number of rounds, without those that the time did not suffice for."""
    found: dict[int, str] = {}
    ends_s = time.monotonic() + within(stage, 2 * READY_S)
    try:
        program.line(ends_s - time.monotonic())
        while len(found) < count:
            said = program.line(ends_s - time.monotonic())
            found[said["rounds"]] = said["digest"]
    except (TimeoutError, RuntimeError):
        pass  # the rows say what is missing
    return found
