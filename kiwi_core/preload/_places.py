"""Where the compiled libraries are, found without looking at their sources.

Imports little: a kernel reads this at its start.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from zlib import crc32

HERE = Path(__file__).parent
SOURCES = HERE / "src"
SHIPPED = HERE / "lib"
"""Where a wheel has the libraries, in a directory named by the machine."""
GATE_NAME = "libkiwi_gate.so"
"""The library under the driver's own SONAME, libcuda.so.1."""
ALIAS_NAME = "libkiwi_gate_alias.so"
"""An empty library with the SONAME libcuda.so, which needs libcuda.so.1: some programs ask for it
by that name."""
ENV_LIBRARY = "KIWI_PRELOAD_LIBRARY"


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kiwi"


def why_unsafe(found: os.stat_result) -> str:
    """Why a directory is no place to load code from; "" if it is one."""
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid not in (0, os.getuid()):
        return "it belongs to another user"
    return "others can write to it" if found.st_mode & stat.S_IWOTH else ""


def compiled_gate(cache_dir: Path | None = None) -> Path | None:
    """The gate library that is there: beside the named one, a wheel's, else the one that was
    compiled last from these sources. Never compiles."""
    if named := os.environ.get(ENV_LIBRARY):
        return _if_there(Path(named).with_name(GATE_NAME))
    if shipped := _if_there(SHIPPED / os.uname().machine / GATE_NAME):
        return shipped
    return _noted(cache_dir if cache_dir is not None else default_cache_dir())


def note_gate(cache_dir: Path, library: Path) -> None:
    """Remember where the gate is that was compiled with ``library``. Raises ``OSError``."""
    gate = library.with_name(GATE_NAME)
    stamp = _stamp()
    text = f"{stamp}\n{gate}\n"
    note = _note(cache_dir, stamp)
    if not gate.is_file() or _read(note) == text:
        return
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    with open(fresh, "w", opener=_for_this_user) as file:
        file.write(text)
    fresh.rename(note)


def _note(cache_dir: Path, stamp: str) -> Path:
    """A file that says which gate was compiled from the sources with that stamp."""
    return cache_dir / f"gate-{crc32(stamp.encode()):08x}"


def _noted(cache_dir: Path) -> Path | None:
    stamp = _stamp()
    said, _, gate = _read(_note(cache_dir, stamp)).partition("\n")
    path = _if_there(Path(gate.strip())) if said == stamp else None
    if path is None or any(why_unsafe(os.lstat(p)) for p in (path.parent, path.parent.parent)):
        return None
    return path


def _stamp() -> str:
    """Changes with the sources; reading all of them would take a kernel's start too long."""
    found = [entry.stat() for entry in os.scandir(SOURCES) if entry.is_file()]
    newest_ns = max((one.st_mtime_ns for one in found), default=0)
    return f"{SOURCES} {len(found)} {sum(one.st_size for one in found)} {newest_ns}"


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
