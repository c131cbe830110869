"""What Kiwi costs a program whose GPU waits for launches, in each of the ways in which it can run.

A process that measures differs from the next one by several per cent, without Kiwi, too. So every
measurement is a child of a zygote (``zygote.py``), the ways are run in random order, several times,
and the table shows beside each ratio how far two equal ways (``bare`` and ``bare2``) lie apart.
Each way has a zygote of its own: its environment is fixed, and where a process has its libraries
counts as noise, not as a way's cost.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage import Skipped, Stage, daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stage import Program

LIMIT = 1.01
ROUNDS, EMULATED_ROUNDS = 12, 2
AFTERWARDS_S = 35.0
"""Time that the loop leaves for what comes after it."""
SEED = 20261128
LOOP_STEPS, ADDED_STEPS, EMULATED_STEPS = 900, 500, 40
IMPORT_S = 90.0
CHILD_S = 40.0

OWN, GATE_ONLY = {"KIWI_PRELOAD_OWN": "1"}, {"KIWI_PRELOAD_OWN": "0"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
WAYS: dict[str, tuple[str, dict[str, str] | None, bool]] = {
    "bare": ("without Kiwi", None, False),
    "bare2": ("without Kiwi, once more", None, False),
    "off": ("the library, switched off", {"KIWI_DISABLE": "1"}, True),
    "gate": ("the gate", GATE_ONLY, True),
    "own": ("in-process", OWN, True),
    "alone": ("in-process, without a daemon", OWN, False),
    "expandable": ("expandable segments, without Kiwi", EXPANDABLE, False),
}
"""In words; what the environment adds under the library, for ``expandable`` without it; whether
there is a daemon. Without one nothing is pinned."""
WITHOUT_KIWI = ("bare", "bare2", "expandable")
FOR_LARGE = ("bare", "bare2", "own", "expandable")
FOR_CALLS = ("bare", "bare2", "gate", "own")

Found = dict[str, list[dict[str, Any]]]


def run(stage: Stage) -> None:
    """Run the loop in each way, in rounds; then large kernels, and what owning adds."""
    names = [way for way in WAYS if not (stage.emulated and way == "expandable")]
    steps = EMULATED_STEPS if stage.emulated else LOOP_STEPS
    with zygotes(stage, names) as found:
        for rounds, results in enumerate(_rounds(stage, found, "loop", steps, AFTERWARDS_S), 1):
            _tell(stage, results, rounds)
        with stage.attempt("large kernels"):
            _large(stage, found)
        with stage.attempt("what owning adds to a process, one thing after the other"):
            steps = EMULATED_STEPS if stage.emulated else ADDED_STEPS
            _tell_added(stage, _measure(stage, found["bare"], "added", steps))


def _large(stage: Stage, found: dict[str, Program]) -> None:
    if stage.emulated:
        raise Skipped("they need the CUDA runtime")
    ms = {way: _measure(stage, found[way], "large", 20) for way in FOR_LARGE}
    for name, bare_ms in ms["bare"].items():
        times = {way: round(one[name] / bare_ms, 4) for way, one in ms.items()}
        stage.row(f"{name}: in-process", times["own"], unit="×", bare_ms=round(bare_ms, 3), **times)


def calls(stage: Stage) -> None:
    """Time single calls of PyTorch in the ways that matter."""
    if stage.emulated:
        raise Skipped("it needs the CUDA runtime")
    with zygotes(stage, FOR_CALLS) as found:
        for rounds, results in enumerate(_rounds(stage, found, "calls", 50, 0.0), 1):
            _tell_calls(stage, results, rounds)


# --- zygotes ------------------------------------------------------------------------------------


@contextmanager
def zygotes(stage: Stage, names: Sequence[str]) -> Iterator[dict[str, Program]]:
    """Start a zygote for each way, all at the same time, and a daemon; end them all."""
    kind = "driver" if stage.emulated else "torch"
    command = [sys.executable, str(Path(__file__).with_name("zygote.py")), kind]
    with ExitStack() as stack:
        one = stack.enter_context(daemon(stage, 30.0))
        found = {}
        for way in names:
            found[way] = stage.spawn(command, environment(stage, way, str(one.directory)))
            stack.callback(found[way].end)
        for way in names:
            found[way].line(min(IMPORT_S, stage.left_s))
        yield found


def environment(stage: Stage, way: str, sockets: str) -> dict[str, str]:
    """Return the environment of a way's zygote."""
    from kiwi_core import preload

    _, more, connected = WAYS[way]
    nowhere = str(stage.work / "no-daemon")
    env = stage.env | {"KIWI_SOCKET_DIR": sockets if connected else nowhere} | (more or {})
    if way not in WITHOUT_KIWI:
        env |= preload.environment(preload.library(), env)
    return env


def _rounds(
    stage: Stage, found: dict[str, Program], what: str, steps: int, leave_s: float
) -> Iterator[Found]:
    """Measure each way once in a round, in random order, while the time allows another round;
    yield all results after each."""
    order = random.Random(SEED)
    results: Found = {way: [] for way in found}
    for _ in range(EMULATED_ROUNDS if stage.emulated else ROUNDS):
        began_s = time.monotonic()
        for way in order.sample(list(found), len(found)):
            results[way].append(_measure(stage, found[way], what, steps))
        yield results
        if stage.left_s < leave_s + 1.2 * (time.monotonic() - began_s):
            return


def _measure(stage: Stage, zygote: Program, what: str, steps: int) -> dict[str, Any]:
    zygote.say(json.dumps({"what": what, "rounds": steps}) + "\n")
    said = zygote.line(max(1.0, min(CHILD_S, stage.left_s)))
    if "failed" in said:
        raise RuntimeError(said["failed"])
    return said


# --- rows ---------------------------------------------------------------------------------------


def ratios(results: Found, way: str, value: str) -> list[float]:
    """Return what each round's measurement of a way is, compared with the same round's ``bare``."""
    pairs = zip(results[way], results["bare"], strict=True)
    return [one[value] / bare[value] for one, bare in pairs]


def spread(values: Sequence[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


def _tell(stage: Stage, results: Found, rounds: int) -> None:
    step_us = statistics.median(one["median_us"] for one in results["bare"])
    stage.row("a step without Kiwi", round(step_us, 1), unit="µs", rounds=rounds)
    noise = ratios(results, "bare2", "median_us")
    for way in results:
        if way == "bare":
            continue
        values = ratios(results, way, "median_us")
        ratio = statistics.median(values)
        judged = way in ("gate", "own") and not stage.emulated
        stage.row(
            f"a step: {WAYS[way][0]}", round(ratio, 4), unit="×",
            target=f"≤ {LIMIT:g} ×" if judged else "",
            passed=ratio <= LIMIT if judged else None, spread=spread(values),
            noise=round(statistics.median(noise), 4), noise_spread=spread(noise),
            **_details(results[way]),
        )  # fmt: skip
    _tell_owned(stage, results)


def _details(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the other values, and each run's median."""
    names = [name for name in runs[0] if name not in ("owned_bytes", "median_us")]
    details = {name: round(statistics.median(one[name] for one in runs), 3) for name in names}
    return details | {"medians_us": [round(one["median_us"], 1) for one in runs]}


def _tell_owned(stage: Stage, results: Found) -> None:
    """Record whether each way was what its name says."""
    owning = {way: all(one["owned_bytes"] > 0 for one in runs) for way, runs in results.items()}
    right = all(owns == (way in ("own", "alone")) for way, owns in owning.items())
    stage.row("the library owned in-process, and nowhere else", right, target="True", passed=right)


def _tell_added(stage: Stage, said: dict[str, float]) -> None:
    first_us = said["as it is"]
    for name, us in said.items():
        stage.row(f"added: {name}", round(us / first_us, 4), unit="×", us=round(us, 1))


def _tell_calls(stage: Stage, results: Found, rounds: int) -> None:
    for name in results["bare"][0]:
        us = {
            way: round(statistics.median(one[name] for one in runs) * 1e6, 3)
            for way, runs in results.items()
        }
        stage.row(name, round(us["own"] / us["bare"], 4), unit="×", rounds=rounds, us=us)
