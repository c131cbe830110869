"""Fixtures: small traces and an exact machine."""

from __future__ import annotations

import pytest

from kiwi_core.simulate.model import SimulatedMachine
from kiwi_core.units import GIB, NS_PER_MS


@pytest.fixture
def exact() -> SimulatedMachine:
    """Return a machine that always moves 10 GiB/s after 100 ms, and whose looks take no time."""
    return SimulatedMachine(
        out_bytes_per_s=10.0 * GIB,
        in_bytes_per_s=10.0 * GIB,
        swap_fixed_ns=100 * NS_PER_MS,
        noise=0.0,
        look_ns=0,
    )
