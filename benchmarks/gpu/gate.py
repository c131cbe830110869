"""The cost of the gate for a training loop whose GPU waits for launches."""

from __future__ import annotations

import statistics
import time

from stage import Stage, daemon, job_command

LIMIT = 1.01


def run(stage: Stage) -> None:
    """Run the loop with the library and without, in turns, and without once more as a control."""
    kind, rounds = ("launches", 40) if stage.emulated else ("steps", 1500)
    command = job_command(kind, rounds=rounds)
    found: dict[str, list[float]] = {"without": [], "with": [], "control": []}
    with daemon(stage, 30.0) as one:
        for number in range(5):
            began_s = time.monotonic()
            for name in found:
                program = (
                    one.run("gate", command, "inprocess")
                    if name == "with"
                    else stage.spawn(command)
                )
                try:
                    found[name].append(program.finish(stage.left_s)["median_s"])
                finally:
                    program.end()
            _tell(stage, found, number + 1)
            if stage.left_s < 1.2 * (time.monotonic() - began_s):
                return


def _tell(stage: Stage, found: dict[str, list[float]], rounds: int) -> None:
    pairs = list(zip(found["with"], found["without"], strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    control = statistics.median(
        a / b for a, b in zip(found["control"], found["without"], strict=True)
    )
    stage.at_most("a training step under the gate", ratio, LIMIT, rounds=rounds, control=control)
    stage.row("the same without the gate, as a control", round(control, 4), unit="×")
    stage.row(
        "a step without the gate", round(statistics.median(found["without"]) * 1e6, 1), unit="µs"
    )
