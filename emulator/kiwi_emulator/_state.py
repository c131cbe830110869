"""The shared state file in Python: its creation, its settings, and the books."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import socket
import struct
import tempfile
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_emulator import _layout, _quirks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENV_STATE = "KIWI_EMULATOR_STATE"
"""Variable with the state file's path for the C libraries. Required: there is no default path."""

ENV_RECORD = "KIWI_EMULATOR_RECORD"
"""Variable with a file that lists the states whose host can go down, for tests to check."""

CONTEXT_BYTES = 8 << 20
"""Default cost of a context; 300-600 MB on a real GPU, scaled to emulated ones."""

SHARED_FILE, SHARED_DIRECTORY = 0o666, 0o777
"""Modes for all users. The directory has no sticky bit, because a process may have to remove a
socket of another user: one that a killed process with the same pid has left."""

CHECKPOINTED = 2
SNAPSHOT_TRIES = 200
AUXV_MAX_BYTES = 1024  # as in state.c; Linux has some 350
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_GPUS = re.compile(r"\s*(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)\s*", re.IGNORECASE)


class StateError(RuntimeError):
    """The file is missing, or is not a state file of this version."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    total_bytes: int
    uuid: str | None = None
    """UUID with the prefix ``GPU-``; None: derived from the machine, the state file's path and the
    index."""
    name: str = "Kiwi Emulated GPU"


@dataclass(frozen=True, slots=True)
class ProcessBooks:
    """Memory of one live process, by GPU index (GPUs of which it holds nothing are left out)."""

    pid: int
    """As this process knows it; 0: it is in another PID namespace that is not visible here."""
    start_ticks: int
    """Field 22 of /proc/pid/stat, which tells a reused pid apart."""
    state: int
    """The driver's number: RUNNING 0, LOCKED 1, CHECKPOINTED 2, FAILED 3, and 4, 5 under way."""
    device_bytes: dict[int, int]
    context_bytes: dict[int, int]
    parked_bytes: dict[int, int]
    """Device bytes that a checkpointed process had and will need again."""
    kept_bytes: dict[int, int]
    """Bytes that a failed restore of the process took and keeps; NVML names no owner."""
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
    """Processes that hold memory of the GPU, or will need some again."""


@dataclass(frozen=True, slots=True)
class Books:
    gpus: tuple[GpuBooks, ...]
    processes: tuple[ProcessBooks, ...]
    """All live processes that have initialised CUDA."""

    def process(self, pid: int) -> ProcessBooks | None:
        return next((p for p in self.processes if p.pid == pid), None)


def parse_gpus(text: str) -> list[GpuSpec]:
    """Parse ``2x512MiB``, ``1×8GiB``, ``512MiB`` (one GPU). Raise ``ValueError`` with the form."""
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
    """Parse ``1x512MiB,driver=595`` into the GPUs and the driver's name (None: not given). Raise
    ``ValueError`` with the form, or with a list of the drivers."""
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
        _quirks.profile(driver)
    return parse_gpus(sizes), driver


def create_state(
    path: Path, gpus: Sequence[GpuSpec], driver: str | None = None, *, shared: bool = False
) -> None:
    """Create the file (atomically) and the directory of control sockets, for this user alone, or
    for all users of the machine (``shared``).

    ``driver`` names a profile (``DRIVERS``); None: that of the environment, or the default one.

    An existing file is replaced; processes that have mapped the old file keep using it.
    """
    path = Path(os.path.abspath(path))
    if not 1 <= len(gpus) <= _layout.GPUS_MAX:
        raise ValueError(f"{len(gpus)} emulated GPUs: there can be 1 to {_layout.GPUS_MAX}")
    state = _layout.DriverState(
        magic=_layout.MAGIC,
        layout=_layout.LAYOUT,
        gpu_count=len(gpus),
        context_bytes=CONTEXT_BYTES,
        stream_bytes=_quirks.STREAM_BYTES,
    )
    _put_driver(state, _quirks.profile(driver))
    for index, spec in enumerate(gpus):
        gpu = state.gpus[index]
        identity = _uuid_of(path, index, spec)
        gpu.uuid[:] = identity.bytes
        gpu.name = spec.name.encode()[: _layout.NAME_MAX - 1]
        gpu.total_bytes = spec.total_bytes
    make_socket_dir(path, shared=shared)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(state))
        os.fchmod(file.fileno(), SHARED_FILE if shared else 0o600)
    os.replace(temporary, path)
    _record(path, state)


def make_socket_dir(path: Path, *, shared: bool) -> None:
    """Create the directory of control sockets beside the state file ``path``, if it is missing."""
    directory = _control(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if shared:
        directory.chmod(SHARED_DIRECTORY)


def _record(path: Path, state: _layout.DriverState) -> None:
    record = os.environ.get(ENV_RECORD)
    if record and state.quirks & _quirks.QUIRKS["kill_takes_host_down"]:
        with open(record, "a") as file:
            file.write(f"{os.path.abspath(path)}\n")


def _put_driver(state: _layout.DriverState, profile: _quirks.Profile) -> None:
    state.quirks = profile.bits
    state.driver_version = profile.cuda_version
    state.driver_name = f"{profile.driver}-kiwi-emulated".encode()


def _uuid_of(path: Path, index: int, spec: GpuSpec) -> uuid.UUID:
    if spec.uuid is not None:
        return uuid.UUID(spec.uuid.removeprefix("GPU-"))
    seed = hashlib.sha256(f"{_machine()}\0{path}\0{index}".encode()).digest()[:16]
    return uuid.UUID(bytes=seed, version=4)


def _machine() -> str:
    """Return what tells this machine from others: copies of a disk share the id, and containers of
    one machine have names of their own."""
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = ""
    return f"{machine_id}\0{os.uname().nodename}"


@contextmanager
def mapped(path: Path) -> Iterator[_layout.DriverState]:
    """Yield the contents of the file, shared with all processes."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _size(path))
    except OSError as e:
        raise StateError(f"The emulator's state file cannot be opened: {e}") from e
    state = _layout.DriverState.from_buffer(memory)  # keeps the mapping alive
    if state.magic != _layout.MAGIC or state.layout != _layout.LAYOUT:
        raise StateError(f"{path} is not a state file of this version of the emulator")
    yield state


def _size(path: Path) -> int:
    expected = ctypes.sizeof(_layout.DriverState)
    if path.stat().st_size < expected:
        raise StateError(f"{path} is not a state file of the emulator: it is too short")
    return expected


def set_copy_bandwidth(path: Path, bytes_per_s: int) -> None:
    """Set the speed of copies between host and device, page-outs and page-ins.

    This applies at once to all processes and copies under way; 0: as fast as memory.
    """
    if bytes_per_s < 0:
        raise ValueError("a copy bandwidth cannot be negative; 0 means unlimited")
    with mapped(path) as state:
        state.copy_bytes_per_s = bytes_per_s


def set_context_bytes(path: Path, context_bytes: int) -> None:
    """Set the cost of contexts that are made from now on."""
    with mapped(path) as state:
        state.context_bytes = context_bytes


def set_driver_version(path: Path, version: int) -> None:
    """Set the answer of cuDriverGetVersion (13040 is 13.4). From 13040 on the driver shows the
    states CHECKPOINTING (4) and RESTORING (5)."""
    with mapped(path) as state:
        state.driver_version = version


def set_driver(path: Path, driver: str) -> None:
    """Give the machine another profile (``DRIVERS``) at once. Raise ``ValueError`` with a list."""
    profile = _quirks.profile(driver)
    with mapped(path) as state:
        _put_driver(state, profile)
        _record(path, state)


def set_quirk(path: Path, quirk: str, on: bool = True) -> None:
    """Switch one quirk (``QUIRKS``) on or off at once, whatever the profile says."""
    bit = _quirks.QUIRKS[quirk]
    with mapped(path) as state:
        state.quirks = state.quirks | bit if on else state.quirks & ~bit


def lose_gpu(path: Path, index: int, lost: bool = True) -> None:
    """Let a GPU fall off the bus, or come back, as NVML reports it. CUDA goes on."""
    with mapped(path) as state:
        state.gpus[index].lost = int(lost)


def has_quirk(path: Path, quirk: str) -> bool:
    with mapped(path) as state:
        return bool(state.quirks & _quirks.QUIRKS[quirk])


def host_down(path: Path) -> int:
    """Return the pid of the process whose kill took the host down; 0: the host is up.

    With ``kill_takes_host_down``, killing a live process that was restored takes the host down: the
    process must be suspended first, or end by itself (NVIDIA/cuda-checkpoint#53).
    """
    snapshot = _snapshot(path)
    if snapshot.host_down or not snapshot.quirks & _quirks.QUIRKS["kill_takes_host_down"]:
        return int(snapshot.host_down)
    killed = (
        slot.pid
        for slot in snapshot.procs
        if slot.pid
        and slot.restores
        and slot.state != CHECKPOINTED
        and not _lives(slot, _pid_here(path, slot))
    )
    return int(next(killed, 0))


def books(path: Path) -> Books:
    """Return a consistent snapshot of the memory that each live process holds."""
    snapshot = _snapshot(path)
    slots = [(p, _pid_here(path, p)) for p in snapshot.procs if p.pid]
    processes = tuple(_process(p, pid) for p, pid in slots if _lives(p, pid))
    gpus = []
    for index in range(snapshot.gpu_count):
        gpu = snapshot.gpus[index]
        here = tuple(p for p in processes if p.wants(index))
        used = sum(p.holds(index) for p in here)
        name = f"GPU-{uuid.UUID(bytes=bytes(gpu.uuid))}"
        gpus.append(GpuBooks(index, name, gpu.name.decode(), gpu.total_bytes, used, here))
    return Books(tuple(gpus), processes)


def _process(slot: _layout.Proc, pid: int) -> ProcessBooks:
    def held(values: Sequence[int]) -> dict[int, int]:
        return {index: value for index, value in enumerate(values) if value}

    return ProcessBooks(
        pid=pid,
        start_ticks=slot.start_ticks,
        state=slot.state,
        device_bytes=held(slot.device_bytes),
        context_bytes=held(slot.context_bytes),
        parked_bytes=held(slot.parked_bytes),
        kept_bytes=held(slot.kept_bytes),
        checkpoints=slot.checkpoints,
        restores=slot.restores,
    )


def _snapshot(path: Path) -> _layout.DriverState:
    """Return a copy taken between two writes. A writer that is killed while writing leaves the
    count odd until the next write; the copy may then be inconsistent."""
    with mapped(path) as state:
        for _ in range(SNAPSHOT_TRIES):
            before = state.write_seq
            copy = _layout.DriverState.from_buffer_copy(state)
            if before % 2 == 0 and state.write_seq == before:
                return copy
            time.sleep(0.0005)
        return copy


def _pid_here(path: Path, slot: _layout.Proc) -> int:
    """Return the pid by which this process knows the slot's; 0: it is not visible here, -1: it has
    ended (``state.c``: ke_pid_here)."""
    if slot.pid_ns == Path("/proc/self/ns/pid").stat().st_ino:
        return int(slot.pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
        directory = os.open(_control(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            asking.connect(f"/proc/self/fd/{directory}/{slot.pid_ns}-{slot.pid}")
        except OSError as error:
            return -1 if error.errno in (errno.ENOENT, errno.ECONNREFUSED) else 0
        finally:
            os.close(directory)
        who = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", who)
        return int(pid)


def _control(path: Path) -> Path:
    """Return the directory of the control sockets of ``path``'s programs."""
    return path.with_name(path.name + ".d")


def _lives(slot: _layout.Proc, pid: int) -> bool:
    """Return whether the slot's process lives and runs the same program (``state.c``: alive)."""
    if pid <= 0:
        return pid == 0
    if _start_ticks(pid) != slot.start_ticks:
        return False
    image = _image(pid) if slot.image else 0
    return image in (0, slot.image)


def _image(pid: int) -> int:
    """Return the same hash as ``state.c``; 0 if the process may not be inspected."""
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
