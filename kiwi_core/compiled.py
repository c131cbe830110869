"""C libraries that are compiled on first use into the user's cache.

The emulated driver and the preloaded library share this. Kernels import it when they start, so it
imports the standard library only, and little of that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPILE_TIMEOUT_S = 300.0
"""Limit of one compiler run: on first use Zig compiles its C library, which can take a minute."""


class Unavailable(RuntimeError):  # noqa: N818 (a state of this machine, not a mistake)
    """No library exists for this machine, and none can be built on it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message, self.remedy = message, remedy


ROOTS_CACHE = "/var/cache"
"""Cache of root, whose daemon gives its libraries to all users: they cannot enter root's home."""


def default_cache_dir() -> Path:
    own = ROOTS_CACHE if os.getuid() == 0 else os.path.expanduser("~/.cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "kiwi"


def cached(what: str, directory: Path, files: Sequence[str], make: Callable[[Path], None]) -> None:
    """Let ``make`` fill ``directory`` with ``files``, unless the files exist.

    Several processes may call this at once: one makes them under a lock, and the finished directory
    appears by a rename. ``what`` begins the error, for example "The emulated GPU driver". Raise
    ``Unavailable`` if the cache cannot be used.
    """
    import fcntl

    parent = directory.parent
    try:
        _make_readable(parent)
        check_owner(parent, directory)
        if _complete(directory, files):
            return
        lock_name = directory.name.rpartition("-")[0] + ".lock"
        with open(parent / lock_name, "w", opener=_for_this_user) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _complete(directory, files):
                _make(directory, make)
    except OSError as error:
        raise Unavailable(
            f"{what} cannot be built in {parent}: {error}.",
            "Set XDG_CACHE_HOME to a directory that you may write to.",
        ) from error


def _complete(directory: Path, files: Sequence[str]) -> bool:
    return all((directory / name).is_file() for name in files)


def _make(directory: Path, make: Callable[[Path], None]) -> None:
    import shutil
    import tempfile

    work = Path(tempfile.mkdtemp(prefix="building-", dir=directory.parent))
    try:
        make(work)
        for made in (*work.iterdir(), work):
            made.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)  # from an incomplete build
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_readable(directory: Path) -> None:
    """Create ``directory`` and its missing parents, with at most mode 0755: programs load code from
    there, so only its owner may write. Root's directories have that mode, whatever the umask.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)
        if os.getuid() == 0:
            path.chmod(0o755)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def check_owner(*places: Path) -> None:
    """Raise ``OSError`` if another user could put a library into one of ``places``: every user of
    the cache would run that code."""
    for place in filter(os.path.lexists, places):
        if why := _why_unsafe(os.lstat(place)):
            raise PermissionError(f"{place}: {why}")


def _why_unsafe(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid not in (0, os.getuid()):
        return "it belongs to another user"
    return "others can write to it" if found.st_mode & stat.S_IWOTH else ""


def fingerprint(options: Sequence[str], sources: Sequence[Path]) -> str:
    """Return a hash of everything that the compiled library depends on, except for the compiler."""
    import hashlib
    import sys

    digest = hashlib.sha256(" ".join((*options, sys.platform, os.uname().machine)).encode())
    for source in sources:
        if source.suffix in {".c", ".h", ".def", ".py"}:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """Return the command of a C compiler. Raise ``Unavailable``."""
    import shutil

    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return [found]
    return zig()


def zig() -> list[str]:
    from importlib.util import find_spec

    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise Unavailable(
            "Kiwi's C libraries must be compiled once, and there is no C compiler here "
            "(looked for $CC, cc, gcc, clang and the Python package ziglang).",
            "Install one of them, for example: pip install ziglang",
        )
    # Run the program itself: ``python -m ziglang`` would import from the working directory.
    return [str(Path(spec.origin).with_name("zig")), "cc"]


def run(command: Sequence[str]) -> None:
    """Run a compiler. Raise ``OSError`` or ``subprocess.SubprocessError``."""
    import subprocess

    subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)


def failed(what: str, compiler: Sequence[str], error: Exception, remedy: str) -> Unavailable:
    """Return an error that quotes the compiler's output."""
    said = getattr(error, "stderr", None) or error
    return Unavailable(f"Compiling {what} failed ({' '.join(compiler)}):\n{said}\n", remedy)
