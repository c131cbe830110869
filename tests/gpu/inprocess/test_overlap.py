"""The same programs where one's memory comes in while the other's goes out: the results are to the
bit those of a run without Kiwi. ``pytest -m gpu tests/gpu/inprocess``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from driver_program import CHECKSUMS

from kiwi_core.sched.actions import PageIn

if TYPE_CHECKING:
    from crowded_gpu import CrowdedGpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_checksums_of_two_that_come_in_beside_each_other(overlapping: CrowdedGpu) -> None:
    said = overlapping.crowded(CHECKSUMS)
    assert said["right"]
    actions = [one for entry in overlapping.daemon.journal() for one in entry.actions]
    beside = [one for one in actions if isinstance(one, PageIn) and one.beside]
    assert beside, "none came in while the other went out"
