"""What a machine has proven: that Kiwi's library moves memory there without losing a byte.

A proof holds for a model of GPU, a version of the driver, and the sources of Kiwi's library. It
lies in the user's cache: it outlasts daemons and restarts, and whoever could forge it there could
replace the library, too. An emulated GPU proves the library, and nothing about any driver.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core import __version__, compiled
from kiwi_core.preload.ready import sources_digest
from kiwi_emulator import ENV_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kiwi_core.gpu.nvml import GpuInfo

EMULATED: Final = ("Kiwi Emulated GPU", "emulated")
"""Model and driver of every emulated GPU, whatever it is called."""

_MAX_BYTES: Final = 64 << 10


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """``failed`` says what went wrong, for people; "": nothing. ``checks`` are the names of what
    went well. Speeds are in bytes per second, through pinned memory; 0: not measured."""

    gpu: str
    driver: str
    kiwi: str = __version__
    failed: str = ""
    checks: tuple[str, ...] = ()
    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0
    unix_s: float = msgspec.field(default_factory=time.time)

    @property
    def passed(self) -> bool:
        return not self.failed


def kind_of(gpu: GpuInfo) -> tuple[str, str]:
    """Return model and driver of a GPU that this process sees."""
    return EMULATED if ENV_STATE in os.environ else (gpu.name, gpu.driver_version)


def load(gpu: str, driver: str) -> Proof | None:
    """Return the proof for this model, driver and library; ``None``: there is none, or it cannot
    be read."""
    path = _path(gpu, driver)
    with suppress(OSError, msgspec.MsgspecError):
        compiled.check_owner(path.parent)
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=Proof)
    return None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other process of this user proves anything: several GPUs of one model have one
    proof, and would disturb each other. Raise ``OSError``."""
    directory = compiled.default_cache_dir() / "proofs"
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(directory / "lock", "w", opener=_for_this_user) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def save(proof: Proof) -> None:
    """Store a proof for ``load``. Raise ``OSError``."""
    path = _path(proof.gpu, proof.driver)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    compiled.check_owner(path.parent)
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        beside.touch(mode=0o644)  # whatever the umask, nobody else may write a proof
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(proof), indent=1) + b"\n")
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _path(gpu: str, driver: str) -> Path:
    digest = hashlib.sha256(f"{gpu}\n{driver}\n{__version__}\n{sources_digest()}".encode())
    return compiled.default_cache_dir() / "proofs" / f"{digest.hexdigest()[:20]}.json"
