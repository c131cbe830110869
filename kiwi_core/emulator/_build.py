"""Compile the two libraries on first use; the result is cached by the content of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
COMMON = ("state.c",)
CUDA = (
    "core.c",
    "context.c",
    "green.c",
    "memory.c",
    "vmm.c",
    "pool.c",
    "host.c",
    "copy.c",
    "stream.c",
    "event.c",
    "graph.c",
    "graph_info.c",
    "graph_nodes.c",
    "graph_exec.c",
    "user_object.c",
    "capture.c",
    "capture_info.c",
    "launch.c",
    "device.c",
    "checkpoint.c",
    "server.c",
    "control.c",
    "table.c",
    "names.c",
)
NVML = ("nvml.c", "nvml_use.c")
FLAGS = (
    *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # -Bsymbolic: the driver calls its own functions, even if another library defines the names
    *("-shared", "-Wl,-z,nodelete", "-Wl,-z,defs", "-Wl,-Bsymbolic"),
)
COMPILE_TIMEOUT_S = 300.0
"""Limit of one compiler run: on first use Zig compiles its C library, which can take a minute."""


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """Paths of the built libraries; ``directory`` holds both under their sonames."""

    directory: Path
    libcuda: Path
    libnvml: Path

    @classmethod
    def at(cls, directory: Path) -> Libraries:
        return cls(directory, directory / "libcuda.so.1", directory / "libnvidia-ml.so.1")

    def complete(self) -> bool:
        return self.libcuda.is_file() and self.libnvml.is_file()


ROOTS_CACHE = "/var/cache"
"""Cache of root, whose daemon gives the library to all users: they cannot enter root's home."""


def default_cache_dir() -> Path:
    own = ROOTS_CACHE if os.getuid() == 0 else os.path.expanduser("~/.cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "kiwi"


def build(cache_dir: Path | None = None) -> Libraries:
    """Return the libraries, compiling them unless the cache has them.

    Several processes may call this at once: one compiles under a lock, and the finished directory
    appears by a rename. Raise ``BuildError``, with a remedy.
    """
    parent = cache_dir if cache_dir is not None else default_cache_dir()
    libs = Libraries.at(parent / f"emulator-{_fingerprint()}")
    try:
        _make_readable(parent)
        _check_owner(parent, libs.directory)
        if libs.complete():
            return libs
        with open(parent / "emulator.lock", "w", opener=_for_this_user) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not libs.complete():
                _build_into(libs.directory)
    except OSError as e:
        raise BuildError(
            f"The emulated GPU driver cannot be built in {parent}: {e}. "
            "Set XDG_CACHE_HOME to a directory that you may write to."
        ) from e
    return libs


def _make_readable(directory: Path) -> None:
    """Create ``directory`` and its missing parents, with at most mode 0755: programs load code from
    there, so only its owner may write. Those of root have that mode, whatever the umask."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)
        if os.getuid() == 0:
            path.chmod(0o755)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check_owner(*places: Path) -> None:
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


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, sys.platform, os.uname().machine)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".c", ".h", ".def"}:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(target: Path) -> None:
    compiler = _find_compiler()
    work = Path(tempfile.mkdtemp(prefix="building-", dir=target.parent))
    try:
        libs = Libraries.at(work)
        _compile(compiler, (*COMMON, *CUDA), libs.libcuda)
        _compile(compiler, (*COMMON, *NVML), libs.libnvml)
        for made in (libs.libcuda, libs.libnvml, work):
            made.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)  # from an incomplete build
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _find_compiler() -> list[str]:
    named = os.environ.get("CC")
    for name in (named, "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return [found]
    # Run the program itself: ``python -m ziglang`` would import from the working directory.
    spec = find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        return [str(Path(spec.origin).with_name("zig")), "cc"]
    raise BuildError(
        "The emulated GPU driver must be compiled once, and there is no C compiler here "
        "(looked for $CC, cc, gcc, clang and the Python package ziglang). "
        "Install one of them, for example: pip install ziglang"
    )


def _compile(compiler: list[str], sources: tuple[str, ...], output: Path) -> None:
    command = [
        *compiler,
        *FLAGS,
        f"-Wl,-soname,{output.name}",
        *("-o", str(output)),
        *(str(SOURCES / name) for name in sources),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"Compiling the emulated GPU driver failed: {e}") from e
    if done.returncode != 0:
        raise BuildError(
            f"Compiling the emulated GPU driver failed ({' '.join(compiler)}, exit status "
            f"{done.returncode}):\n{done.stderr.strip()}"
        )
