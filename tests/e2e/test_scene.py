"""Tests of the scene of ``scene.py`` under both policies, and of the simulator's prediction.

``benchmarks/bench_scene.py`` compares more scenes, and more closely.
"""

from __future__ import annotations

import json
import math
import tempfile
from typing import Any

import pytest
import scene
from cli_process import finish, start_kiwi

from kiwi_core.sched.replay import encode_line

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SEED = 4
"""A scene whose mean wait, in the simulator, hardly depends on milliseconds: by 1 % under round
robin, by 2 % under interactive. (In other scenes it makes 5 % whether a training just gets in
between.)"""

RELATIVE, ABSOLUTE_S = 0.2, 0.5
"""Tolerance of the predicted mean wait: a fifth, or a little more on a busy machine. Waits in this
scene take seconds."""


def test_a_training_and_four_notebooks_wait_as_the_simulator_says() -> None:
    """Short cells wait less under ``interactive``. From the journal of either run, the simulator
    and the command line tell how long they wait under both policies."""
    recorded = scene.play(SEED)
    fair, quick = measured = [scene.measured(recorded[policy]) for policy in scene.POLICIES]
    assert quick.mean_s < 0.85 * fair.mean_s, (quick, fair)
    assert quick.training_s > fair.training_s, "it pays for them"
    for policy, outcome in zip(scene.POLICIES, measured, strict=True):
        for told_by, records in recorded.items():
            said_s = scene.foretold(records, policy).mean_s
            assert math.isclose(said_s, outcome.mean_s, rel_tol=RELATIVE, abs_tol=ABSOLUTE_S), (
                f"{policy}: waited {outcome.mean_s:.2f} s, foretold {said_s:.2f} s by {told_by}"
            )
    told = _by_command(recorded["round-robin"])
    means_s = [one["short"]["wait_s"]["mean"] for one in (told["real"], *told["results"])]
    assert math.isclose(means_s[0], means_s[1], rel_tol=RELATIVE, abs_tol=ABSOLUTE_S), means_s
    assert means_s[2] < 0.85 * means_s[1], means_s


def _by_command(records: scene.Records) -> Any:
    options = ("--contention", "0", "--policy", *scene.POLICIES, "--json", "-")
    with tempfile.NamedTemporaryFile(suffix=".journal") as file:
        file.writelines(map(encode_line, records))
        file.flush()
        result = finish(start_kiwi("simulate", "--journal", file.name, *options))
    assert result.code == 0, result.err
    return json.loads(result.out)
