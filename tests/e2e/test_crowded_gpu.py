"""Tests of the base of the in-process pager's GPU tests (``crowded_gpu``), on the emulated driver.

A program that is moved out and in repeatedly computes the same as alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from crowded_gpu import CrowdedGpu
from driver_program import CHECKSUMS
from pagers import DEFAULT, PagerUnderTest

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("pager")]

MIB = 1 << 20
GPU_MIB = 128


@pytest.fixture(scope="module")
def pager() -> PagerUnderTest:
    return DEFAULT


def test_a_program_computes_the_same_beside_a_rival(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(f"1x{GPU_MIB}MiB", "--tq", "0.5")
    state = daemon.directory / "gpus-alone"
    emulator.create_state(state, emulator.parse_gpus(f"1x{GPU_MIB}MiB"))
    stage = CrowdedGpu(daemon, GPU_MIB * MIB, emulator.environment(state, emulator.build()))
    alone, beside = stage.alone(CHECKSUMS), stage.crowded(CHECKSUMS)
    assert alone["right"]
    assert beside == alone
