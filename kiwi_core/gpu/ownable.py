"""Decide whether Kiwi's library may own the GPU memory of a program.

The library unmaps memory while it is out, at moments when nothing can use it. It knows that of
whatever passes its gate, so it must not own the memory of a program in which something else reads,
writes or watches GPU memory. ``facts`` reads what the kernel says about a process; ``why_not`` is
pure and judges that.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.gpu.processes import text_of
from kiwi_core.states import GateOnly

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kiwi_core.gpu.processes import ProcessRef

_TOOL: Final = re.compile(
    "CUDA_INJECTION(32|64)_PATH|NSYS_PROFILING_SESSION_ID"
    "|NV_(NSIGHT|SANITIZER|COMPUTE_PROFILER|TPS)_[A-Z0-9_]+"
)
"""Variables with which a profiler or checker puts itself into a CUDA program: compute-sanitizer,
Nsight Systems, Nsight Compute, and what is built on CUPTI."""

_DEVICES: Final = re.compile("/dev/(nvidia-fs|gdrdrv|infiniband/uverbs)")
"""Devices through which a disk, the CPU or a network reads and writes GPU memory: GPUDirect
Storage, GDRCopy, RDMA."""

_WRAPPERS: Final = re.compile(rb"\0(cuMemAlloc(_v2)?|cuGetProcAddress(_v2)?|cuInit)\0")
"""Names in a library that replaces functions of the driver, or looks them up to call them."""

_HOOKS: Final = re.compile(r"lib(vgpu|gemhook|nvshare|cuda-control|cuinterpose)[\w.-]*\.so")
"""Libraries that are known to do so: HAMi, KubeShare, nvshare, vCUDA, cuinterpose."""

_OURS: Final = "libkiwi_"

_COHERENT_NAMES: Final = re.compile(r"\b(GH\d{3}|GB\d{2,3})\b")
"""Grace Hopper and Grace Blackwell."""

_LIBRARIES_MAX: Final = 16
_LIBRARY_MAX_BYTES: Final = 8 << 20
"""A wrapper of the driver has some 100 KiB. What is larger is read as far as this."""

_GET_INFO: Final = 0xC040FF0B
_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("QQ11Ii")
"""``struct pidfd_info`` of Linux 6.15, and the request that fills it."""

CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""Signals that end a program whose memory is not as it was."""


class OwnershipObjection(NamedTuple):
    """Why a library must not own. ``detail`` names what was found, for the program's user."""

    why: GateOnly
    detail: str = ""


@dataclass(frozen=True)
class ProcessFacts:
    """What the kernel says about a process. ``environment`` is the one that it was started with.
    ``wrappers`` are the paths of preloaded libraries that wrap the driver."""

    environment: Mapping[str, str] = field(default_factory=dict)
    tracer_pid: int = 0
    files: frozenset[str] = frozenset()
    wrappers: tuple[str, ...] = ()


def why_not(facts: ProcessFacts | None, *, coherent: bool = False) -> OwnershipObjection | None:
    """Return why a process must not own its memory; ``None``: nothing speaks against it.
    ``facts`` is ``None`` if the process may not be looked at."""
    if coherent:
        return OwnershipObjection(GateOnly.COHERENT)
    if facts is None:
        return OwnershipObjection(GateOnly.UNREADABLE)
    if facts.tracer_pid:
        return OwnershipObjection(GateOnly.TOOL, f"process {facts.tracer_pid} traces it")
    tool = next((name for name in sorted(facts.environment) if _TOOL.fullmatch(name)), "")
    if tool and facts.environment[tool]:
        return OwnershipObjection(GateOnly.TOOL, f"{tool} is set")
    if devices := direct(facts.files):
        return OwnershipObjection(GateOnly.DIRECT, devices)
    if facts.wrappers:
        return OwnershipObjection(GateOnly.HOOKED, facts.wrappers[0])
    return None


def direct(files: Iterable[str]) -> str:
    """Return the device among ``files`` through which GPU memory is used past the gate; "": there
    is none."""
    return next((name for name in sorted(files) if _DEVICES.match(name)), "")


def is_coherent(gpu_name: str, numa_status: Iterable[str]) -> bool:
    """Return whether the CPU may use the GPU's memory by itself. ``numa_status`` are the driver's
    files of that name, which it has only on machines that could."""
    online = any("disabled" not in text.lower() for text in numa_status)
    return online or bool(_COHERENT_NAMES.search(gpu_name))


def wraps_driver(path: str, content: bytes) -> bool:
    """Return whether the preloaded library at ``path`` puts itself in front of the driver."""
    name = os.path.basename(path)
    if name.startswith(_OURS):
        return False
    return bool(_HOOKS.match(name) or _WRAPPERS.search(content))


# --- reading -------------------------------------------------------------------------------------


def facts(pid: int) -> ProcessFacts | None:
    """Read what is known about ``pid``; ``None`` if this process may not look, or it has ended."""
    try:
        words = text_of(f"/proc/{pid}/environ").split("\0")
        status = text_of(f"/proc/{pid}/status")
        files = open_files(pid)
    except OSError:
        return None
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    tracer = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    return ProcessFacts(
        environment, int(tracer[1]) if tracer else 0, files, _wrappers(pid, environment)
    )


def open_files(pid: int) -> frozenset[str]:
    """Return the files that the process has open. Raise ``OSError``."""
    directory, found = f"/proc/{pid}/fd", set()
    for fd in os.listdir(directory):
        with suppress(FileNotFoundError):  # just closed
            found.add(os.readlink(f"{directory}/{fd}"))
    return frozenset(found)


def coherent_machine(gpu_name: str) -> bool:
    texts, directory = [], "/proc/driver/nvidia/gpus"
    with suppress(OSError):
        for gpu in os.listdir(directory):
            with suppress(OSError):
                texts.append(text_of(f"{directory}/{gpu}/numa_status"))
    return is_coherent(gpu_name, texts)


def _wrappers(pid: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    paths = re.split(r"[: \n]+", environment.get("LD_PRELOAD", ""))
    with suppress(OSError):
        paths += re.split(r"[: \n]+", text_of(f"/proc/{pid}/root/etc/ld.so.preload"))
    named = [path for path in paths if path][:_LIBRARIES_MAX]
    return tuple(path for path in named if wraps_driver(path, _content(pid, path)))


def _content(pid: int, path: str) -> bytes:
    """Return the beginning of a library of the process; nothing if it has a plain name, is no file
    or is not for everybody: the daemon reads nothing for a user that the user may not read."""
    if not path.startswith("/"):
        return b""
    try:
        file = os.open(f"/proc/{pid}/root{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or not about.st_mode & stat.S_IROTH:
            return b""
        return os.read(file, _LIBRARY_MAX_BYTES)
    except OSError:
        return b""
    finally:
        os.close(file)


def command_line(pid: int) -> str:
    """Return the command of a process, without what differs at each start of a kernel; "": it may
    not be read."""
    with suppress(OSError):
        words = text_of(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        return re.sub(r"\S*kernel-[\w-]+\.json\S*", "", words)
    return ""


def ended_by(ref: ProcessRef, pidfd: int) -> int:
    """Return the signal that ended the process of ``pidfd``; 0: none, or nobody knows. A process
    that its parent has not collected shows it in ``/proc``; later only a descriptor that was opened
    before does, since Linux 6.15."""
    with suppress(OSError, ValueError, IndexError):
        fields = text_of(f"/proc/{ref.pid}/stat").rpartition(")")[2].split()
        if fields[0] in ("Z", "X") and int(fields[19]) == ref.start_ticks:
            return int(fields[49]) & 0x7F
    with suppress(OSError):
        asked = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        ioctl(pidfd, _GET_INFO, asked)
        mask, *_, status = _INFO.unpack(asked)
        return status & 0x7F if mask & _INFO_EXIT else 0
    return 0
