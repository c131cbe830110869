"""Two programs on one GPU that fit together, and two that do not."""

from __future__ import annotations

import importlib.util
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from stage import MIB, Program, Stage, daemon, job_command

if TYPE_CHECKING:
    from collections.abc import Callable

PAGERS = ("inprocess", "checkpoint")
"""Pagers, the fast one first: time may run out."""
TQ_S = 30.0


def kind_of_job(stage: Stage) -> str:
    """Return "torch" if PyTorch runs here, else "driver"."""
    return "torch" if not stage.emulated and importlib.util.find_spec("torch") else "driver"


def calibrated(stage: Stage, kind: str, size: int, seconds: float) -> list[str]:
    """Return the command of a job that takes about ``seconds`` by itself."""
    sample_s = 0.5 if stage.emulated else 2.0
    said = stage.run(job_command(kind, bytes=size, calibrate=sample_s))
    rate = said["rounds"] / (said["ended_s"] - said["ready_s"])
    return job_command(kind, bytes=size, rounds=max(10, int(rate * seconds)))


def _wall(run: Callable[[], list[dict[str, Any]]]) -> tuple[float, list[dict[str, Any]]]:
    began_s = time.monotonic()
    said = run()
    return time.monotonic() - began_s, said


def not_fitting(stage: Stage) -> None:
    """Compare two jobs of 60 % each that share with a quantum with one after the other."""
    tq_s = 1.0 if stage.emulated else TQ_S
    size = stage.size(0.6)
    with ExitStack() as stack:
        ballast(stage, size, stack)
        command = calibrated(stage, kind_of_job(stage), size, stage.job_s)
        serial_s, alone = _wall(lambda: [stage.run(command) for _ in range(2)])
        stage.row("bytes of a job", size)
        stage.row("one after the other", round(serial_s, 2), unit="s")
        digests = {one["digest"] for one in alone}
        for pager in PAGERS:
            # The driver's checkpoint moves some 4 GB/s out and 7 in, about four times each.
            moves_s = 0.0 if stage.emulated or pager == "inprocess" else 4 * size / 2.5e9
            if stage.left_s < serial_s + moves_s + 10:
                stage.row(f"sharing, {pager}", f"left out: {stage.left_s:.0f} s are left")
                continue
            with stage.attempt(f"sharing, {pager}"):
                _shared(stage, command, tq_s, pager, serial_s, digests)


def ballast(stage: Stage, size: int, stack: ExitStack) -> None:
    """If RAM limits the jobs, start a program outside Kiwi that takes the rest of the GPU."""
    spare = stage.total_bytes - int(size / 0.6)
    if spare > stage.total_bytes // 20:
        program = stage.spawn(job_command("ballast", bytes=spare // MIB * MIB))
        stack.callback(program.end)
        program.line(60)
        stage.row("held by a program outside", spare)


def _shared(
    stage: Stage, command: list[str], tq_s: float, pager: str, serial_s: float, digests: set[str]
) -> None:
    with daemon(stage, tq_s) as one:
        seconds, said = _wall(
            lambda: stage.together([one.run(name, command, pager) for name in ("a", "b")])
        )
        swaps = one.swaps()
    same = len(digests | {job["digest"] for job in said}) == 1
    stage.at_most(
        f"sharing, {pager}: time against one after the other", seconds / serial_s, 1.03,
        sharing_s=round(seconds, 2), swaps=[_rate(swap) for swap in swaps],
        longest_pause_s=[job["slowest_round_s"] for job in said],
    )  # fmt: skip
    stage.row(f"sharing, {pager}: results identical", same, target="True", passed=same)
    stage.row(
        f"sharing, {pager}: swaps", len(swaps), target="≥ 1 (they really took turns)",
        passed=bool(swaps),
    )  # fmt: skip


def _rate(swap: dict[str, Any]) -> str:
    return f"{swap['direction']} {swap['bytes_moved'] / swap['seconds'] / 1e9:.3f} GB/s"


def fitting(stage: Stage) -> None:
    """Run two notebooks of 30 % each, ten cells each at the same time, with Kiwi and without, in
    turns. The time counts from when both have set up, which is the usual state of notebooks."""
    kind = kind_of_job(stage)
    command = calibrated(stage, kind, stage.size(0.3), min(4.0, stage.job_s / 4))
    command += ["--cells=10"]
    without: list[float] = []
    with_kiwi: list[float] = []
    digests: set[str] = set()
    with daemon(stage, TQ_S) as one:
        for number in range(3):
            began_s = time.monotonic()
            without.append(_pair(stage, command, stage.env, digests))
            with_kiwi.append(_pair(stage, [*command, "--kiwi"], one.env, digests))
            ratio = statistics.median(with_kiwi) / statistics.median(without)
            stage.at_most(
                "two that fit: time with Kiwi against without", ratio, 1.02, rounds=number + 1,
                without_s=without, with_kiwi_s=with_kiwi,
            )  # fmt: skip
            if stage.left_s < 1.2 * (time.monotonic() - began_s):
                break
        swaps = len(one.swaps())
    same = len(digests) == 1
    stage.row("two that fit: results identical", same, target="True", passed=same)
    stage.row("two that fit: swaps", swaps)


def _pair(stage: Stage, command: list[str], env: dict[str, str], digests: set[str]) -> float:
    pair: list[Program] = [stage.spawn(command, env) for _ in range(2)]
    try:
        for _ in range(2):
            for one in pair:
                one.line(stage.left_s)
            time.sleep(1.0)
            for one in pair:
                one.say("go\n")
    except BaseException:
        for one in pair:
            one.end()
        raise
    said = stage.together(pair)
    digests.update(one["digest"] for one in said)
    return float(max(one["ended_s"] for one in said) - min(one["began_s"] for one in said))
