"""Compile ``libkiwi_preload.so``: on first use into the user's cache, or for a wheel."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core import compiled
from kiwi_core.compiled import Unavailable
from kiwi_core.config import Config
from kiwi_core.preload import _generate
from kiwi_core.preload._paths import (
    ALIAS_NAME,
    ENV_LIBRARY,
    GATE_NAME,
    HERE,
    NAME,
    SHIPPED,
    SOURCES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FLAGS = (
    *("-std=gnu11", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"),
    "-ftls-model=initial-exec",  # else the library needs glibc's loader by name, which musl lacks
    "-fno-strict-aliasing",  # function pointers and driver handles go through words
    f"-DKP_ROOM_BYTES={Config.checkpoint_room_bytes}ull",
    f"-DKP_ROOM_SHARE={Config.checkpoint_room_share}ull",
)
LINK_FLAGS = ("-shared", "-Wl,-z,nodelete", "-Wl,-z,defs")
PRELOAD_FLAGS = (f"-Wl,--version-script={SOURCES / 'exports.map'}",)
GATE_FLAGS = ("-DKP_GATE",)
GATE_DIFFERS = (
    *("base/switches.c", "hooks/bind.c", "hooks/driver.c", "hooks/find.c", "hooks/start.c"),
)
"""Sources that are compiled again, with ``GATE_FLAGS``, for the library named like the driver."""
LIBRARIES = ("-ldl", "-pthread")  # an older glibc needs these; in a newer one they are empty
TARGETS = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
"""The ``zig cc`` target, with the oldest glibc that the library runs with, by machine."""
OLDEST_HEADER = 12_060
"""CUDA_VERSION of the oldest header that has every type that the sources name."""


def library(cache_dir: Path | None = None) -> Path:
    """Return the library to preload: the one named by ``ENV_LIBRARY``, a wheel's, or a cached one.

    Compile the cached library if it is missing. Several processes may call this at once: one
    compiles under a lock, and the result appears by a rename. Raise ``Unavailable``, with a remedy.
    """
    if named := os.environ.get(ENV_LIBRARY):
        return _named(Path(named))
    shipped = SHIPPED / os.uname().machine / NAME
    if shipped.is_file():
        _check_name(shipped, "Install Kiwi into an environment whose path has none.")
        return shipped
    header, compiler = find_header(), compiled.find_compiler()
    parent = cache_dir if cache_dir is not None else compiled.default_cache_dir()
    target = parent / f"preload-{_fingerprint(header)}" / NAME
    _check_name(target, "Set XDG_CACHE_HOME to a directory whose path has none.")
    compiled.cached(
        "The in-process pager", target.parent, (NAME,),
        lambda work: build(work / NAME, compiler, header),
    )  # fmt: skip
    return target


def _named(library: Path) -> Path:
    if not library.is_absolute() or not library.is_file():
        raise Unavailable(
            f"{ENV_LIBRARY} names {library}, which is not the absolute path of a file.",
            f"Unset {ENV_LIBRARY}, or name {NAME} as another machine like this one built it.",
        )
    _check_name(library, "Copy it to a directory whose path has none.")
    return library


def _check_name(library: Path, remedy: str) -> None:
    """Refuse a path that ``LD_PRELOAD`` would split: it has no quoting, and every program would
    report that the parts cannot be loaded."""
    if re.search("[: ]", str(library)):
        raise Unavailable(
            f"The in-process pager cannot be loaded from {library}: a path in LD_PRELOAD can have "
            "no blank and no colon in it.",
            remedy,
        )


def cross(machine: str, output: Path) -> None:
    """Build the library for ``machine`` (a key of TARGETS) and the oldest glibc, with ziglang.

    The build of the wheel calls this. Raise ``Unavailable``.
    """
    compiler = [*compiled.zig(), "-target", TARGETS[machine]]
    output.parent.mkdir(parents=True, exist_ok=True)
    build(output, compiler, find_header())


def build(
    output: Path,
    compiler: Sequence[str] | None = None,
    header: Path | None = None,
    sanitize: str | None = None,
    tested: Path | None = None,
) -> None:
    """Compile the library into ``output``, and the gate (``GATE_NAME``) and its alias beside it.

    With ``sanitize`` (a value of ``-fsanitize=``), compile the library alone. ``tested`` is a
    directory with sources that only tests need in the library. Raise ``Unavailable``.
    """
    compiler = list(compiler or compiled.find_compiler())
    header = header or find_header()
    with tempfile.TemporaryDirectory(prefix="kiwi-preload-") as work:
        try:
            _Builder(compiler, header, Path(work), sanitize, tested).build(output)
        except (OSError, subprocess.SubprocessError) as error:
            remedy = "Another compiler can be named by CC; without the library Kiwi pages through "
            remedy += "the driver."
            raise compiled.failed("the in-process pager", compiler, error, remedy) from error


class _Builder:
    def __init__(
        self,
        compiler: list[str],
        header: Path,
        work: Path,
        sanitize: str | None,
        tested: Path | None,
    ) -> None:
        self._compiler, self._header, self._work, self._sanitize = compiler, header, work, sanitize
        self._more = ["-O0", "-g", f"-fsanitize={sanitize}"] if sanitize else ["-O2"]
        self._sources = sources()
        if tested is not None:
            self._more += ["-DKP_TESTED", "-iquote", str(tested)]
            self._sources += sorted(tested.glob("*.c"))

    def build(self, output: Path) -> None:
        known = _generate.read_header(self._compiler, self._header)
        _generate.write(self._work, _generate.read_calls(), known)
        # Sanitizers take longer over a thousand forwarders that all look the same than over
        # everything that somebody wrote.
        plain = ["-O0", "-fno-sanitize=all"] if self._sanitize else []
        forwarders = self._compile([self._work / "hooks/calls.c"], *plain)
        objects = dict(zip(self._sources, self._compile(self._sources), strict=True))
        self._link(output, NAME, [*PRELOAD_FLAGS, *forwarders, *objects.values()])
        if self._sanitize:
            return
        differs = [SOURCES / name for name in GATE_DIFFERS]
        objects |= dict(zip(differs, self._compile(differs, *GATE_FLAGS), strict=True))
        gate = output.with_name(GATE_NAME)
        self._link(gate, "libcuda.so.1", [*forwarders, *objects.values()])
        # Given no object at all, newer `zig cc` does not link but hands everything to clang, which
        # does not know the version in its target.
        nothing = self._work / "nothing.c"
        nothing.touch()
        alias: list[Path | str] = [*self._compile([nothing]), "-Wl,--no-as-needed", gate]
        self._link(output.with_name(ALIAS_NAME), "libcuda.so", alias)

    def _compile(self, files: Sequence[Path], *flags: str) -> list[Path]:
        from concurrent.futures import ThreadPoolExecutor

        directory = Path(tempfile.mkdtemp(dir=self._work))
        common = [*self._compiler, *FLAGS, *self._more, *flags, "-isystem"]
        common += [str(self._header.parent), "-iquote", str(SOURCES)]
        common += ["-iquote", str(self._work), "-c"]
        objects = [directory / f"{file.parent.name}-{file.stem}.o" for file in files]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            jobs = [
                threads.submit(compiled.run, [*common, str(file), "-o", str(made)])
                for file, made in zip(files, objects, strict=True)
            ]
        for job in jobs:
            job.result()
        return objects

    def _link(self, output: Path, soname: str, inputs: Sequence[Path | str]) -> None:
        strip = [] if self._sanitize else ["-Wl,--strip-debug"]
        command = [*self._compiler, *self._more, *strip, *LINK_FLAGS, f"-Wl,-soname,{soname}"]
        compiled.run([*command, "-o", str(output), *map(str, inputs), *LIBRARIES])


def sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.c"))


def find_header() -> Path:
    """Return the newest ``cuda.h`` on this machine: a newer header declares more calls.

    Raise ``Unavailable``.
    """
    found = {path: version for path in _headers() if (version := _generate.version(path))}
    if not found or max(found.values()) < OLDEST_HEADER:
        raise Unavailable(
            "The in-process pager is compiled against the CUDA driver's header, and there is no "
            "cuda.h of CUDA 12.6 or newer here.",
            "Install it, for example: pip install nvidia-cuda-runtime (or set CUDA_HOME).",
        )
    return max(found, key=lambda path: found[path])


def _headers() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(name):
            yield Path(root) / "include" / "cuda.h"
    yield Path("/usr/local/cuda/include/cuda.h")
    packages = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    }
    for directory in sorted({*packages, site.getusersitepackages(), *sys.path}):
        yield from sorted(Path(directory).glob("nvidia/*/include/cuda.h"))


def _fingerprint(header: Path) -> str:
    options = (*FLAGS, *LINK_FLAGS, *LIBRARIES, *GATE_FLAGS)
    files = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    return compiled.fingerprint(options, [HERE / "_generate.py", header, *files])
