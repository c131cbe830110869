from __future__ import annotations

from pathlib import Path

import pytest
from tested_library import tested_library


@pytest.fixture(scope="session")
def library() -> Path:
    return tested_library()
