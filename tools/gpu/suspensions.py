"""Parts of run_all.py: whether results are the same, to the last bit, after suspensions.

Rows: ``checkpoint.KIND`` (``kiwi run``: the driver's checkpoint behind the gate) and
``inprocess.KIND`` (``kiwi run --pager inprocess``), each taking turns under a daemon; ``many.KIND``
and ``crowd.KIND`` are longer runs of the latter.
``run_dangerous`` suspends jobs from outside, with nothing before the driver: a synchronise call, or
a library that asks for events in a thread of its own (JAX), kills a checkpointed process. Its rows
say how the jobs end.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

from callers import within
from stage import GIB, MIB
from suspending import (
    READY_S,
    Outside,
    Suspended,
    Way,
    command,
    from_outside,
    under_a_daemon,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stage import Program, Stage

KINDS = {"torch": "torch", "expandable": "torch", "cupy": "cupy", "jax": "jax"}
"""Jobs by the package that each needs. ``expandable`` is PyTorch with expandable segments; these
and JAX map their memory themselves."""
FOUR = ("torch", "expandable", "cupy", "jax")
SIZE, EMULATED_SIZE = 64 * MIB, 16 * MIB
"""Ballast of a job that is moved from outside: the fixed cost of a move dominates, not the
bytes."""
WAYS = {
    "checkpoint": Way("checkpoint", ("torch", "cupy", "jax"), 4 * GIB, 512 * MIB, wanted=10),
    "inprocess": Way("inprocess", FOUR, 12 * GIB, 2 * GIB, wanted=50),
    "many": Way("inprocess", FOUR, 12 * GIB, 2 * GIB, wanted=100, most_s=330.0),
    "crowd": Way(
        "inprocess", (*FOUR, "driver", "torch"), 12 * GIB, 2 * GIB, wanted=100, most_s=400.0,
        words=("--nvml",),
    ),
}  # fmt: skip
"""What the pagers are given. Each job fits the rest of the GPU, the contexts of all (0.6 GiB each)
and the memory that its library keeps free included (JAX takes up to four times what it needs); the
jobs together do not. Three of the crowd fill the GPU."""
SHARE = 0.7
"""Share of the remaining time for the turns, at most. The undisturbed run, which does the same
rounds without pauses, gets what remains."""
STANDSTILL_S = 5.0
DANGEROUS_S, DANGEROUS_COUNT = 20.0, 20

Found = dict[str, list[Suspended]]


def run(stage: Stage) -> None:
    _in_turns(stage, "checkpoint")


def run_inprocess(stage: Stage) -> None:
    _in_turns(stage, "inprocess")


def run_many(stage: Stage) -> None:
    _in_turns(stage, "many")


def run_crowd(stage: Stage) -> None:
    """Run six programs, each of which reads NVML every second, as monitoring does."""
    for job in _in_turns(stage, "crowd"):
        if job.said:
            longest_s = job.said["longest_nvml_s"]
            stage.row(
                f"crowd.{job.name}: longest call of NVML", longest_s, unit="s",
                target=f"≤ {STANDSTILL_S:g} s", passed=longest_s <= STANDSTILL_S,
            )  # fmt: skip


def _in_turns(stage: Stage, name: str) -> list[Suspended]:
    way, kinds = WAYS[name], _kinds(stage, name, WAYS[name].kinds)
    found: Found = {}
    with stage.attempt(name):
        seconds = min(way.most_s, stage.left_s * SHARE)
        found[name] = under_a_daemon(stage, kinds, seconds, way)
        for job in found[name]:
            _tell(stage, name, job)
    with stage.attempt("undisturbed"):
        _compare(stage, found)
    return found.get(name, [])


def run_dangerous(stage: Stage) -> None:
    """Suspend jobs from outside that have no gate: loops as they are, then loops that wait for the
    GPU by a bare synchronise."""
    kinds = ["driver"]
    if not stage.emulated:
        kinds += _kinds(stage, "bare", WAYS["checkpoint"].kinds)
    for name, words in (("bare", ()), ("synchronise", ("--synchronise",))):
        with stage.attempt(name):
            _outside(stage, name, kinds, words)


def _outside(stage: Stage, name: str, kinds: list[str], words: tuple[str, ...]) -> None:
    jobs = [Outside(stage, kind, EMULATED_SIZE, DANGEROUS_COUNT, *words) for kind in kinds]
    try:
        from_outside(jobs, min(DANGEROUS_S, stage.left_s / 3), lambda _: None)
    finally:
        for one in jobs:
            one.close()
    for one in jobs:
        ended = f"{one.job.count} suspensions, then {one.job.trouble or 'it ended well'}"
        stage.row(f"{name}.{one.job.kind}", ended, **one.job.figures())


def _kinds(stage: Stage, name: str, wanted: Sequence[str]) -> list[str]:
    """Return those of ``wanted`` that can run here, with a row ``name.KIND`` for each that
    cannot."""
    why = {}
    for kind in wanted:
        if kind in KINDS and stage.emulated:
            why[kind] = "needs the CUDA runtime"
        elif kind in KINDS and importlib.util.find_spec(KINDS[kind]) is None:
            why[kind] = "is not installed"
    for kind, words in why.items():
        stage.row(f"{name}.{kind}", f"left out: {kind} {words}")
    return [kind for kind in wanted if kind not in why] or ["driver"]


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
