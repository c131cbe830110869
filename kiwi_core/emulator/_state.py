"""The shared state file seen from Python: making it, its settings, and the books."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import tempfile
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.emulator import _layout, _manners

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENV_STATE = "KIWI_EMULATOR_STATE"
"""Names the state file for the C libraries.  Required: there is no default path."""

ENV_RECORD = "KIWI_EMULATOR_RECORD"
"""Names a file to which the path of each state is added whose host can go down: tests look."""

CONTEXT_BYTES = 8 << 20
"""What one context costs by default; 300-600 MB on a real GPU, scaled to emulated ones."""

CHECKPOINTED = 2
SNAPSHOT_TRIES = 200
AUXV_MAX_BYTES = 1024  # of state.c; Linux has some 350
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_GPUS = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)\s*", re.IGNORECASE)


class StateError(RuntimeError):
    """The file is missing, or not a state file of this version."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    total_bytes: int
    uuid: str | None = None
    """``GPU-`` and a UUID; None: derived from the state file's path and the GPU's index."""
    name: str = "Kiwi Emulated GPU"


@dataclass(frozen=True, slots=True)
class ProcessBooks:
    """What one live process holds, by GPU index (GPUs of which it holds nothing are left out)."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/pid/stat: tells a reused pid apart."""
    state: int
    """The driver's number: RUNNING 0, LOCKED 1, CHECKPOINTED 2, FAILED 3, and 4, 5 under way."""
    device_bytes: dict[int, int]
    context_bytes: dict[int, int]
    parked_bytes: dict[int, int]
    """Device bytes that it had and will want back, while checkpointed."""
    kept_bytes: dict[int, int]
    """What a failed restore of it grabbed and keeps; NVML names no owner."""
    checkpoints: int
    restores: int

    def holds(self, gpu: int) -> int:
        return sum(h.get(gpu, 0) for h in (self.device_bytes, self.context_bytes, self.kept_bytes))

    def wants(self, gpu: int) -> bool:
        return any(
            gpu in held
            for held in (
                self.device_bytes,
                self.context_bytes,
                self.parked_bytes,
                self.kept_bytes,
            )
        )


@dataclass(frozen=True, slots=True)
class GpuBooks:
    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    processes: tuple[ProcessBooks, ...]
    """Those that hold some of it, or will want some back."""


@dataclass(frozen=True, slots=True)
class Books:
    gpus: tuple[GpuBooks, ...]
    processes: tuple[ProcessBooks, ...]
    """All live processes that have initialised CUDA."""

    def process(self, pid: int) -> ProcessBooks | None:
        return next((p for p in self.processes if p.pid == pid), None)


def parse_gpus(text: str) -> list[GpuSpec]:
    """``2x512MiB``, ``1×8GiB``, ``512MiB`` (one GPU).  Raises ValueError that shows the form."""
    found = _GPUS.fullmatch(text)
    units = {name.lower(): size for name, size in _UNITS.items()}
    count = int(found[1] or 1) if found else 0
    total = int(float(found[2]) * units[found[3].lower()]) if found else 0
    if not 1 <= count <= _layout.GPUS_MAX or total < 1 << 20:
        raise ValueError(
            f"{text!r} does not describe emulated GPUs: write NxSIZE, for example 2x512MiB "
            f"(at most {_layout.GPUS_MAX} GPUs, at least 1 MiB each)"
        )
    return [GpuSpec(total) for _ in range(count)]


def parse_machine(text: str) -> tuple[list[GpuSpec], str | None]:
    """``1x512MiB,driver=595``: the GPUs and the driver's name (None: not given).  Raises ValueError
    that shows the form, or lists the drivers."""
    sizes, *options = text.split(",")
    driver = None
    for option in options:
        key, _, value = option.partition("=")
        if key.strip() != "driver":
            raise ValueError(
                f"{option.strip()!r} says nothing about emulated GPUs: after the size there can be "
                "driver=NAME, for example 1x512MiB,driver=595"
            )
        driver = value.strip()
        _manners.profile(driver)
    return parse_gpus(sizes), driver


def create_state(path: Path, gpus: Sequence[GpuSpec], driver: str | None = None) -> None:
    """Makes the file (mode 0600, whole or not at all) and the directory of control sockets.

    ``driver`` names a profile (``DRIVERS``); None: that of the environment, or the default one.

    An existing file is replaced; processes that have the old one mapped go on with that.
    """
    path = Path(os.path.abspath(path))
    if not 1 <= len(gpus) <= _layout.GPUS_MAX:
        raise ValueError(f"{len(gpus)} emulated GPUs: there can be 1 to {_layout.GPUS_MAX}")
    state = _layout.State(
        magic=_layout.MAGIC,
        layout=_layout.LAYOUT,
        gpu_count=len(gpus),
        context_bytes=CONTEXT_BYTES,
        stream_bytes=_manners.STREAM_BYTES,
    )
    _put_driver(state, _manners.profile(driver))
    for index, spec in enumerate(gpus):
        gpu = state.gpus[index]
        identity = _uuid_of(path, index, spec)
        gpu.uuid[:] = identity.bytes
        gpu.name = spec.name.encode()[: _layout.NAME_MAX - 1]
        gpu.total_bytes = spec.total_bytes
    path.with_name(path.name + ".d").mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(state))
    os.replace(temporary, path)
    _record(path, state)


def _record(path: Path, state: _layout.State) -> None:
    record = os.environ.get(ENV_RECORD)
    if record and state.manners & _manners.MANNERS["kill_takes_host_down"]:
        with open(record, "a") as file:
            file.write(f"{os.path.abspath(path)}\n")


def _put_driver(state: _layout.State, profile: _manners.Profile) -> None:
    state.manners = profile.bits
    state.driver_version = profile.cuda_version
    state.driver_name = f"{profile.driver}-kiwi-emulated".encode()


def _uuid_of(path: Path, index: int, spec: GpuSpec) -> uuid.UUID:
    if spec.uuid is not None:
        return uuid.UUID(spec.uuid.removeprefix("GPU-"))
    seed = hashlib.sha256(f"{path}\0{index}".encode()).digest()[:16]
    return uuid.UUID(bytes=seed, version=4)


@contextmanager
def mapped(path: Path) -> Iterator[_layout.State]:
    """The file's contents, shared with everybody."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _size(path))
    except OSError as e:
        raise StateError(f"The emulator's state file cannot be opened: {e}") from e
    state = _layout.State.from_buffer(memory)  # keeps the mapping for as long as it lives
    if state.magic != _layout.MAGIC or state.layout != _layout.LAYOUT:
        raise StateError(f"{path} is not a state file of this version of the emulator")
    yield state


def _size(path: Path) -> int:
    expected = ctypes.sizeof(_layout.State)
    if path.stat().st_size < expected:
        raise StateError(f"{path} is not a state file of the emulator: it is too short")
    return expected


def set_copy_bandwidth(path: Path, bytes_per_s: int) -> None:
    """Copies between host and device, page-outs and page-ins take as long as at this speed.

    Live, for all processes and copies under way; 0: as fast as memory.
    """
    if bytes_per_s < 0:
        raise ValueError("a copy bandwidth cannot be negative; 0 means unlimited")
    with mapped(path) as state:
        state.copy_bytes_per_s = bytes_per_s


def set_context_bytes(path: Path, context_bytes: int) -> None:
    """What contexts made from now on cost."""
    with mapped(path) as state:
        state.context_bytes = context_bytes


def set_driver_version(path: Path, version: int) -> None:
    """As cuDriverGetVersion gives it (13040 is 13.4).  From 13040 on the driver shows the states
    CHECKPOINTING (4) and RESTORING (5)."""
    with mapped(path) as state:
        state.driver_version = version


def set_driver(path: Path, driver: str) -> None:
    """Give the machine another profile (``DRIVERS``), live.  Raises ValueError that lists them."""
    profile = _manners.profile(driver)
    with mapped(path) as state:
        _put_driver(state, profile)
        _record(path, state)


def set_manner(path: Path, manner: str, on: bool = True) -> None:
    """Switch one manner (``MANNERS``) on or off, live, whatever the profile says."""
    bit = _manners.MANNERS[manner]
    with mapped(path) as state:
        state.manners = state.manners | bit if on else state.manners & ~bit


def has_manner(path: Path, manner: str) -> bool:
    with mapped(path) as state:
        return bool(state.manners & _manners.MANNERS[manner])


def host_down(path: Path) -> int:
    """Return the pid of the process whose kill took the host down; 0: it is up.

    With ``kill_takes_host_down`` a process that was restored, lives and is killed does that: it
    must be suspended first, or end by itself (NVIDIA/cuda-checkpoint#53).
    """
    snapshot = _snapshot(path)
    if snapshot.host_down or not snapshot.manners & _manners.MANNERS["kill_takes_host_down"]:
        return int(snapshot.host_down)
    killed = (
        slot.pid
        for slot in snapshot.procs
        if slot.pid and slot.restores and slot.state != CHECKPOINTED and not _lives(slot)
    )
    return int(next(killed, 0))


def books(path: Path) -> Books:
    """A consistent snapshot of who holds what; the dead do not appear in it."""
    snapshot = _snapshot(path)
    slots = [p for p in snapshot.procs if p.pid and _lives(p)]
    processes = tuple(_process(p) for p in slots)
    gpus = []
    for index in range(snapshot.gpu_count):
        gpu = snapshot.gpus[index]
        here = tuple(p for p in processes if p.wants(index))
        used = sum(p.holds(index) for p in here)
        name = f"GPU-{uuid.UUID(bytes=bytes(gpu.uuid))}"
        gpus.append(GpuBooks(index, name, gpu.name.decode(), gpu.total_bytes, used, here))
    return Books(tuple(gpus), processes)


def _process(slot: _layout.Proc) -> ProcessBooks:
    def held(values: Sequence[int]) -> dict[int, int]:
        return {index: value for index, value in enumerate(values) if value}

    return ProcessBooks(
        pid=slot.pid,
        start_ticks=slot.start_ticks,
        state=slot.state,
        device_bytes=held(slot.device_bytes),
        context_bytes=held(slot.context_bytes),
        parked_bytes=held(slot.parked_bytes),
        kept_bytes=held(slot.kept_bytes),
        checkpoints=slot.checkpoints,
        restores=slot.restores,
    )


def _snapshot(path: Path) -> _layout.State:
    """A copy between two writes.  A writer killed in mid-write leaves the count odd until the
    next one comes; a copy taken then is as good as it gets."""
    with mapped(path) as state:
        for _ in range(SNAPSHOT_TRIES):
            before = state.write_seq
            copy = _layout.State.from_buffer_copy(state)
            if before % 2 == 0 and state.write_seq == before:
                return copy
            time.sleep(0.0005)
        return copy


def _lives(slot: _layout.Proc) -> bool:
    """Return whether its process lives and runs the program that it ran (``state.c``: alive)."""
    if _start_ticks(slot.pid) != slot.start_ticks:
        return False
    image = _image(slot.pid) if slot.image else 0
    return image in (0, slot.image)


def _image(pid: int) -> int:
    """Return the hash of ``state.c``; 0 where the process may not be looked at."""
    try:
        vector = Path(f"/proc/{pid}/auxv").read_bytes()[:AUXV_MAX_BYTES]
    except OSError:
        return 0
    found = 0xCBF29CE484222325
    for byte in vector:
        found = (found ^ byte) * 0x100000001B3 % (1 << 64)
    return found if vector else 0


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
