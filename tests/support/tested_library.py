"""Kiwi's library with the parts that only tests need: ``native/tests/library``."""

from __future__ import annotations

import fcntl
import functools
import hashlib
from pathlib import Path

from kiwi_core import preload
from kiwi_core.compiled import default_cache_dir
from kiwi_core.preload import _build

PARTS = Path(__file__).parents[2] / "native/tests/library"


@functools.cache
def tested_library() -> Path:
    """Return the library to preload, with the gate beside it. It is compiled once for all
    processes."""
    digest = hashlib.sha256(_build._fingerprint(_build.find_header()).encode())
    for part in sorted(PARTS.iterdir()):
        digest.update(part.read_bytes())
    parent = default_cache_dir()
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / f"tested-{digest.hexdigest()[:16]}" / preload.NAME
    with open(parent / "tested.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            target.parent.mkdir(exist_ok=True)
            made = target.with_name("made") / preload.NAME
            made.parent.mkdir(exist_ok=True)
            _build.build(made, tested=PARTS)
            for one in sorted(made.parent.iterdir(), key=lambda path: path.name == preload.NAME):
                one.rename(target.with_name(one.name))
    return target
