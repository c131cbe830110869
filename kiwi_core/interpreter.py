"""Command lines that start Python for a part of Kiwi. Nothing else of Kiwi starts Python.

``python -m`` and ``python -c`` put the working directory first on ``sys.path``: a file named
``queue.py`` there would run with the rights of the user who starts a daemon. ``-P`` prevents that
only from Python 3.11 on, ``-I`` ignores PYTHONPATH, which a checkout of Kiwi needs, and the
programs of users would inherit PYTHONSAFEPATH. So Python gets the path of a file, ``start.py``,
which also removes its own directory from ``sys.path``.

An empty or relative entry in PYTHONPATH still means the working directory. So callers start these
commands in ``DIRECTORY``, where only root can put files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

DIRECTORY: Final = "/"
"""The working directory for these commands; it also keeps no other file system from unmounting."""

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
