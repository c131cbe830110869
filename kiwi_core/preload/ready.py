"""Find the library without waiting for a compiler, or build it for later callers.

A kernel starts in a second and must not wait for a compiler. ``_build.library`` also looks for the
newest header and hashes all sources, which takes longer than Kiwi's whole start in a kernel may
take. So a process that has time calls ``ensure``, which leaves a pointer; ``find`` only follows the
pointer. Run as a module, this file calls ``ensure`` with low priority.
"""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from kiwi_core import compiled
from kiwi_core.preload import _paths


def find() -> Path | None:
    """Return the library if it exists now: the one that the environment names, a wheel's, or the
    cached one."""
    if named := os.environ.get(_paths.ENV_LIBRARY):
        return Path(named) if os.path.isfile(named) else None
    shipped = _paths.SHIPPED / os.uname().machine / _paths.NAME
    if shipped.is_file():
        return shipped
    pointer = _pointer()
    with suppress(OSError):
        found = Path(os.readlink(pointer))
        # The same rule as for compiling: no other user may be able to put code there.
        compiled.check_owner(pointer.parent, found.parent)
        if found.parent.parent == pointer.parent and found.is_file():
            return found
    return None


def ensure() -> Path:
    """Return the library, compiled now if need be, so that ``find`` returns it from now on. This
    takes seconds, and a minute the first time. Raise ``Unavailable``."""
    from kiwi_core.preload import _build

    library = _build.library()
    pointer = _pointer()
    if library.parent.parent == pointer.parent:
        beside = pointer.with_name(f"{pointer.name}.{os.getpid()}")
        with suppress(OSError):  # without a pointer, every kernel calls this and finds the library
            beside.symlink_to(library)
            beside.rename(pointer)
    return library


@functools.cache
def sources_digest() -> str:
    """Return a digest of the library's sources: the same whatever compiler and header built it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _paths.SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(_paths.SOURCES).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _pointer() -> Path:
    """Return the path of the pointer for these sources, named by their sizes and times: reading all
    of them takes longer than a kernel has."""
    digest = hashlib.sha256(os.uname().machine.encode())
    for folder, _, names in sorted(os.walk(_paths.SOURCES)):
        for path in (os.path.join(folder, name) for name in sorted(names)):
            found = os.stat(path)
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return compiled.default_cache_dir() / f"ready-{digest.hexdigest()[:16]}"


if __name__ == "__main__":
    os.nice(10)
    ensure()
