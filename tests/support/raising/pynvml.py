"""The real ``pynvml``, whose functions raise what a test writes into a file.

Put this directory on PYTHONPATH and name the file in ``KIWI_TEST_RAISES``: JSON of function names,
each with the name of an exception of ``pynvml`` or of Python, or with an NVML error number.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

_elsewhere = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]
_spec = importlib.machinery.PathFinder.find_spec("pynvml", _elsewhere)
assert _spec is not None
assert _spec.loader is not None
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)


def _raising(name: str, call: Any) -> Any:
    @wraps(call)
    def wrapper(*args: Any, **named: Any) -> Any:
        path = Path(os.environ["KIWI_TEST_RAISES"])
        what = json.loads(path.read_text()).get(name) if path.exists() else None
        if isinstance(what, int):
            raise _real.NVMLError(what)
        if what is not None:
            raise getattr(_real, what, None) or getattr(builtins, what)("as the test asks")
        return call(*args, **named)

    return wrapper


globals().update(
    {
        name: _raising(name, what) if name.startswith("nvml") and callable(what) else what
        for name, what in vars(_real).items()
        if not name.startswith("__")
    }
)
