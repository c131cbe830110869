"""Tests that the checkpoint pager on the emulated driver passes the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import PagerContract

if TYPE_CHECKING:
    from worlds import EmulatedWorld


@pytest.fixture
def world(emulated: EmulatedWorld) -> EmulatedWorld:
    return emulated


class TestEmulated(PagerContract):
    pass
