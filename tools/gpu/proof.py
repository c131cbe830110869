"""A part of run_all.py: ``kiwi doctor --prove``, check by check."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kiwi_core.bench import proof
from kiwi_core.gpu import nvml

if TYPE_CHECKING:
    from stage import Stage

GB = 1e9


def run(stage: Stage) -> None:
    os.environ.update(stage.env)
    gpu = next(gpu for gpu in nvml.gpus() if gpu.uuid == stage.uuid)
    found = proof.prove(gpu, lambda _name: None)
    stage.row("checks passed", len(found.checks), checks=list(found.checks))
    stage.row("proof", found.failed or "passed", target="passed", passed=found.passed)
    for way, speed in (("out", found.out_bytes_per_s), ("in", found.in_bytes_per_s)):
        stage.row(f"moved {way}, GB/s", round(speed / GB, 1))
