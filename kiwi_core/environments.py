"""Whether the kernels of another Python environment load Kiwi: a look at its files, which starts no
Python.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

EXTENSION: Final = "kiwi_jupyter.kernel"
CONFIG_NAME: Final = "ipython_kernel_config.py"


def loads_kiwi(python: str) -> bool | None:
    """Return whether a kernel of the interpreter ``python`` loads Kiwi; ``None`` if that cannot be
    told: the interpreter is not a file of this machine.
    """
    if not os.path.isabs(python) or not os.access(python, os.X_OK):
        return None
    prefix = Path(python).parent.parent  # of a virtual environment, too: its python is a link
    home = Path.home()
    packages = [
        *prefix.glob("lib*/python3*/*-packages"),
        *home.glob(".local/lib/python3*/*-packages"),
    ]
    if not any(next(folder.glob("kiwi_jupyter*"), None) for folder in packages):
        return False
    ipython = Path(os.environ.get("IPYTHONDIR") or home / ".ipython")
    places = (
        prefix / "etc/ipython",
        Path("/usr/local/etc/ipython"),
        Path("/etc/ipython"),
        ipython / "profile_default",
    )
    return any(_names_kiwi(place / CONFIG_NAME) for place in places)


def _names_kiwi(config: Path) -> bool:
    try:
        return EXTENSION in config.read_text()
    except (OSError, UnicodeDecodeError):
        return False
