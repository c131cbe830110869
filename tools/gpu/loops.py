"""Loops of another project: the sizes of nvshare's published test (28,000 × 28,000 floats, 4,000
iterations of an addition; the matrix product takes too long for as many iterations here)."""

from __future__ import annotations

from stage import Stage, daemon, job_command

LOOPS = {"add": 4000, "matmul": 8}


def run(stage: Stage) -> None:
    """Run each loop alone, alone under the gate, and two that share the GPU."""
    for kind, rounds in LOOPS.items():
        command = job_command(kind, side=28_000, rounds=rounds)
        if stage.emulated:  # no PyTorch there: plain copies stand for it
            command = job_command("driver", bytes=stage.size(0.3), rounds=40)
        with stage.attempt(kind):
            _loop(stage, kind, command)


def _loop(stage: Stage, kind: str, command: list[str]) -> None:
    def seconds(said: dict[str, float]) -> float:
        return said["ended_s"] - said["ready_s"]

    alone = stage.run(command)
    stage.row(f"{kind}: alone", round(seconds(alone), 3), unit="s", rounds=alone["rounds"])
    with daemon(stage, 30.0) as one:
        program = one.run(kind, command, "inprocess")
        try:
            gated = program.finish(stage.left_s)
        finally:
            program.end()
        stage.at_most(
            f"{kind}: under the gate against alone", seconds(gated) / seconds(alone), 1.01
        )
        said = stage.together([one.run(name, command, "inprocess") for name in ("a", "b")])
    whole = max(one["ended_s"] for one in said) - min(one["ready_s"] for one in said)
    stage.row(f"{kind}: two shared against one alone", round(whole / seconds(alone), 3), unit="×")
    same = {one["digest"] for one in (alone, gated, *said)}
    stage.row(f"{kind}: results identical", len(same) == 1, target="True", passed=len(same) == 1)
