"""Command lines that start Python for a part of Kiwi. Nothing else of Kiwi starts Python.

``python -m`` and ``python -c`` put the working directory first on ``sys.path``: a file named
``queue.py`` there would run with the rights of whoever starts a daemon. ``-P`` mends that from
Python 3.11 on only, ``-I`` ignores PYTHONPATH, by which Kiwi runs from a checkout, and
PYTHONSAFEPATH would pass on to the programs of users. So Python is given the path of a file,
``start.py``, which takes its own directory off ``sys.path``, too.

An empty or relative entry in PYTHONPATH still means the working directory. So whoever starts one of
these commands does it in ``DIRECTORY``, where only root can put files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

DIRECTORY: Final = "/"
"""The working directory for these commands; it also pins no file system that is to be unmounted."""

_START: Final = Path(__file__).with_name("start.py")


def module(name: str, *words: str) -> list[str]:
    """Return the command that runs the module ``name`` as ``python -m`` does, with ``words``."""
    return [sys.executable, str(_START), name, *words]


def source(text: str, *words: str) -> list[str]:
    """Return the command that runs the program ``text`` as ``python -c`` does, with ``words``."""
    return [sys.executable, str(_START), "-c", text, *words]


def bare(script: Path, *words: str) -> list[str]:
    """Return the command that runs a file that imports the standard library only: it starts in a
    few milliseconds and reads no configuration."""
    return [sys.executable, "-I", "-S", str(script), *words]
