"""Tests of a full GPU: a program that has filled it under a real daemon goes out and comes back."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_processes import Worker

from kiwi_core.units import MIB


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_program_that_filled_the_gpu_comes_back(
    stage: Any, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the GPU belongs to a program outside Kiwi, and no byte of the rest is free."""
    last = part("last")
    monkeypatch.setattr(last, "PAGERS", ("checkpoint",))  # the one that has to keep a margin
    last.full(stage)
    row = stage.rows["full and back, checkpoint"]
    assert row["passed"] is True, row
    assert row["value"].startswith("8"), "96 MiB, less a context"
    assert row["moved_bytes"]["out"] > 80 * MIB


def test_a_byte_that_differs_is_seen(stage: Any) -> None:
    program = Worker(stage.env)
    try:
        program.do(
            "import sys; sys.path.insert(0, 'tools/gpu'); import filling_job;"
            "filling = filling_job.Filling()"
        )
        assert program.get("filling.wrong_bytes()") == 0
        program.do("ck(driver.cuMemsetD8(filling.parts[-1][0] + 4711, 1, 1))")
        assert program.get("filling.wrong_bytes()") == 2 * MIB
    finally:
        program.close()
