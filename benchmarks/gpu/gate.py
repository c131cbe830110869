"""The cost of the gate for a training loop whose GPU waits for launches."""

from __future__ import annotations

import statistics
import time

from stage import Skipped, Stage, daemon, job_command

LIMIT = 1.01


WAYS = ("without", "checkpoint", "inprocess", "control")
"""The loop as it is, under each pager, and as it is once more."""


def run(stage: Stage) -> None:
    """Run the loop in each way, in turns. With the default pager the library is only a gate."""
    kind, rounds = ("launches", 40) if stage.emulated else ("steps", 1500)
    command = job_command(kind, rounds=rounds)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with daemon(stage, 30.0) as one:
        for number in range(5):
            began_s = time.monotonic()
            for way in WAYS:
                bare = way in ("without", "control")
                program = stage.spawn(command) if bare else one.run("gate", command, way)
                try:
                    found[way].append(program.finish(stage.left_s))
                finally:
                    program.end()
            _tell(stage, found, number + 1)
            if stage.left_s < 1.2 * (time.monotonic() - began_s):
                return


def _tell(stage: Stage, found: dict[str, list[dict[str, float]]], rounds: int) -> None:
    for way, name in (("checkpoint", "the gate"), ("inprocess", "the in-process pager")):
        stage.at_most(
            f"a training step under {name}", _ratio(found, way), LIMIT, rounds=rounds,
            of_the_last_third=_ratio(found, way, "late_s"), control=_ratio(found, "control"),
        )  # fmt: skip
    stage.row(
        "the same without the gate, as a control", round(_ratio(found, "control"), 4), unit="×"
    )
    step_s = statistics.median(one["median_s"] for one in found["without"])
    stage.row("a step without the gate", round(step_s * 1e6, 1), unit="µs")


def _ratio(found: dict[str, list[dict[str, float]]], way: str, which: str = "median_s") -> float:
    pairs = zip(found[way], found["without"], strict=True)
    return statistics.median(a[which] / b[which] for a, b in pairs)


def calls(stage: Stage) -> None:
    """Time single calls of PyTorch without the library and under each pager."""
    if stage.emulated:
        raise Skipped("it needs the CUDA runtime")
    command = job_command("calls", rounds=50)
    found: dict[str, dict[str, float]] = {}
    with daemon(stage, 30.0) as one:
        for way in WAYS:
            bare = way in ("without", "control")
            program = stage.spawn(command) if bare else one.run("gate", command, way)
            try:
                found[way] = program.finish(stage.left_s)["calls"]
            finally:
                program.end()
    for name in found["without"]:
        microseconds = {way: round(found[way][name] * 1e6, 3) for way in WAYS}
        stage.row(name, microseconds["checkpoint"], unit="µs", **microseconds)
