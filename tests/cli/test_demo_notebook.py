"""Tests of a notebook of the demo, without the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

RUN = """
import os, sys
from pathlib import Path
from kiwi_core.cli.demo.notebook import Notebook

notebook = Notebook(Path(sys.argv[1]), "A", dict(os.environ), print)
notebook.open()
notebook.start()
notebook.join(60.0)
notebook.close()
sys.exit(notebook.failure or 0)
"""


def test_its_kernel_ends_by_itself(tmp_path: Path) -> None:
    """Its memory may have been moved out and back; killing such a program has hung hosts."""
    ended, path = tmp_path / "ended", tmp_path / "one.ipynb"
    source = f"import atexit, pathlib; atexit.register(pathlib.Path({str(ended)!r}).touch)"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [source]}]}))
    command = [sys.executable, "-c", RUN, str(path)]
    subprocess.run(command, env={**os.environ, "KIWI_DISABLE": "1"}, check=True, timeout=200)
    assert ended.exists()
