"""Compile the two libraries on first use; the result is cached by the content of the sources."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

try:
    from kiwi_core import compiled
except ImportError:  # published alone, the package has a copy of that module
    from kiwi_emulator import _compiled as compiled  # type: ignore[attr-defined, no-redef]

SOURCES = Path(__file__).parent / "src"
COMMON = ("state.c",)
NVML = ("nvml.c", "nvml_use.c")
CUDA = tuple(sorted(one.name for one in SOURCES.glob("*.c") if one.name not in (*COMMON, *NVML)))
FLAGS = (
    *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # -Bsymbolic: the driver calls its own functions, even if another library defines the names
    *("-shared", "-Wl,-z,nodelete", "-Wl,-z,defs", "-Wl,-Bsymbolic"),
)
_LIBRARIES = {"libcuda.so.1": CUDA, "libnvidia-ml.so.1": NVML}


@dataclass(frozen=True, slots=True)
class EmulatedLibraries:
    """Paths of the built libraries; ``directory`` holds both under their sonames."""

    directory: Path
    libcuda: Path
    libnvml: Path


def build(cache_dir: Path | None = None) -> EmulatedLibraries:
    """Return the libraries, compiling them unless the cache has them. Raise
    ``compiled.Unavailable``, with a remedy."""
    parent = cache_dir if cache_dir is not None else compiled.default_cache_dir()
    directory = parent / f"emulator-{compiled.fingerprint(FLAGS, sorted(SOURCES.iterdir()))}"
    compiled.cached("The emulated GPU driver", directory, tuple(_LIBRARIES), _make)
    return EmulatedLibraries(directory, *(directory / name for name in _LIBRARIES))


def _make(directory: Path) -> None:
    compiler = compiled.find_compiler()
    for name, sources in _LIBRARIES.items():
        command = [*compiler, *FLAGS, f"-Wl,-soname,{name}", "-o", str(directory / name)]
        try:
            compiled.run([*command, *(str(SOURCES / one) for one in (*COMMON, *sources))])
        except (OSError, subprocess.SubprocessError) as error:
            remedy = "Another compiler can be named by CC."
            raise compiled.failed("the emulated GPU driver", compiler, error, remedy) from error
