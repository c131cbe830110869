"""Programs that must not be moved: the driver's checkpoint kills, damages or does not know them.

``why_unmovable`` says so beforehand, from ``/proc`` and from the reports of libraries; it makes no
driver call and does not ask NVML. Exported memory (CUDA IPC) leaves no trace in ``/proc``: only a
program with Kiwi's library says that it has any. ``Unmovable`` and ``RestoreFailures`` say so
afterwards, from the error that the driver answered to a checkpoint or a restore.

Sources: public reports on drivers 580, 595 and 610, and NVIDIA/cuda-checkpoint#42 and #47.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from kiwi_core.gpu import processes
from kiwi_core.gpu.results import NOT_SUPPORTED, OUT_OF_MEMORY
from kiwi_core.nvidia_module import NCCL_DIES_SINCE
from kiwi_core.states import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kiwi_core.errors import GpuError
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Lost

_T = TypeVar("_T")

_UVM: Final = "/dev/nvidia-uvm"
_UVM_MAPPINGS: Final = 1
"""Mappings of this device in a process with a context; a process without a context has none. Each
managed allocation adds one."""

_OUR_LIBRARY: Final = "/libkiwi_"
"""Part of the path of Kiwi's library, preloaded or loaded as a gate. A process that maps this path
has loaded the library."""

_LIBRARY_THREAD: Final = "kiwi-pager"
"""The thread of Kiwi's library that talks to the daemon (``agent.c``)."""

_REPORTED_SHARED: Final = "ipc"
"""The library's word for memory that a program has exported, or imported from another one."""

_REPORTED_MANAGED: Final = "managed"
"""The library's word for managed memory."""

_NCCL_THREADS: Final = "pt_nccl_"
"""PyTorch's threads that watch an NCCL communicator: ``pt_nccl_watchdg``, ``pt_nccl_heartbt``."""

STICKY: Final = frozenset({700, 702, *range(709, 721)})
"""Errors after which a context answers every call with the same one, until its process ends."""

_FINAL: Final = STICKY | {NOT_SUPPORTED, OUT_OF_MEMORY}
"""Errors of a checkpoint that a retry would repeat, or that make a retry do more harm: on driver
595 a checkpoint that was not supported leaves a dead context. OUT_OF_MEMORY is the answer on MIG,
and of a full GPU: the driver then never moves the process (``check_not_full`` avoids that)."""


_TRIES: Final = 3
"""Restores that fail with the same error, despite room, before the memory counts as lost. Driver
580 always answers INVALID_VALUE where memory was shared; other errors have been seen to pass."""


class WhyUnmovable(NamedTuple):
    """Why a process must not be moved. ``reason`` says how soon that may change."""

    sentence: str
    remedy: str
    reason: Reason = Reason.UNSUPPORTED

    def __str__(self) -> str:
        return f"{self.sentence} {self.remedy}"


MIG: Final = WhyUnmovable(
    "MIG is on, and the driver cannot move programs on MIG slices.",
    "Switch it off (nvidia-smi -mig 0), or leave this GPU out of Kiwi (kiwi daemon --gpu).",
)


def why_unmovable(
    ref: ProcessRef,
    driver_version: str,
    *,
    mig: bool = False,
    reported: Collection[str] = (),
    root: Path = Path("/"),
) -> WhyUnmovable | None:
    """Return why the driver must not move ``ref``; ``None``: nothing is known against it.

    ``driver_version`` is NVML's ("595.71.05"). ``mig``: that mode is on. ``reported`` are the
    kinds of memory of the process that its library cannot own. ``root`` is the directory that
    holds ``/proc``; tests pass another.
    """
    if mig:
        return MIG
    if _REPORTED_SHARED in reported:
        return _shares(ref.pid)
    if _REPORTED_MANAGED in reported or _uvm_mappings(ref.pid, root) > _UVM_MAPPINGS:
        return _managed(ref.pid)
    if _major(driver_version) >= NCCL_DIES_SINCE and _has_nccl(ref.pid, root):
        return _nccl(ref.pid, driver_version)
    return None


def has_no_context(ref: ProcessRef, *, root: Path = Path("/")) -> bool:
    """Return whether ``ref`` has Kiwi's library and has never made a context: the library starts
    its thread with the first one. Such a process (a launcher that only counts the GPUs) has nothing
    to move, and its first context comes through the gate."""
    if any(_text(comm).startswith(_LIBRARY_THREAD) for comm in _threads(ref.pid, root)):
        return False
    return any(_OUR_LIBRARY in name for name in _mapped(ref.pid, root))


def has_uvm(ref: ProcessRef, *, root: Path = Path("/")) -> bool:
    """Return whether ``ref`` has mapped the driver's unified memory, as each process with a context
    has on a real GPU."""
    return _uvm_mappings(ref.pid, root) > 0


def unreached(ref: ProcessRef, *, root: Path = Path("/")) -> WhyUnmovable | None:
    """Return why the driver must not move ``ref``, if it has a library that is not connected: the
    gate is open, and a synchronise call would crash the process during the move."""
    if not any(_OUR_LIBRARY in name for name in _mapped(ref.pid, root)):
        return None
    return WhyUnmovable(
        f"Process {ref.pid} has Kiwi's library, which is not connected to the daemon, so that "
        "nobody can shut its gate.",
        "It connects by itself as a rule. If this lasts, restart the program.",
        Reason.LOCK_TIMEOUT,
    )


def _major(driver_version: str) -> int:
    """Return the major version; 0 if it is unknown."""
    first = driver_version.split(".")[0]
    return int(first) if first.isdigit() else 0


def _shares(pid: int) -> WhyUnmovable:
    return WhyUnmovable(
        f"Process {pid} shares GPU memory with another program (CUDA IPC). The driver cannot move "
        "that, and the try can kill both.",
        "It stays in the GPU until it ends. Pass tensors by host memory to make it movable.",
    )


def _managed(pid: int) -> WhyUnmovable:
    return WhyUnmovable(
        f"Process {pid} uses managed memory, which the driver cannot move. The try would damage it "
        "on some drivers.",
        "It stays in the GPU until it ends. Ordinary device memory (cudaMalloc) can be moved.",
    )


def _nccl(pid: int, driver_version: str) -> WhyUnmovable:
    return WhyUnmovable(
        f"Process {pid} uses NCCL, and driver {driver_version} ends such a program when its memory "
        "is moved.",
        "Start a training for one GPU without a process group, call destroy_process_group() when "
        "it is no longer needed, or use driver 580.",
    )


def _uvm_mappings(pid: int, root: Path) -> int:
    return _mapped(pid, root).count(_UVM)


def _mapped(pid: int, root: Path) -> list[str]:
    """Return the name behind each mapping that has one."""
    try:
        lines = (root / f"proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []  # ended, or not readable for us: the driver decides
    # "7f12…-7f34… rw-s 00000000 00:06 812    /dev/nvidia-uvm"
    return [name for line in lines for name in line.split(maxsplit=5)[5:]]


def _has_nccl(pid: int, root: Path) -> bool:
    return any(_text(comm).startswith(_NCCL_THREADS) for comm in _threads(pid, root))


def _threads(pid: int, root: Path) -> list[Path]:
    try:
        return [task / "comm" for task in (root / f"proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class OfPrograms(Generic[_T]):
    """Facts about programs, by process. They end with the process or its next ``exec``."""

    def __init__(self) -> None:
        self._known: dict[ProcessRef, tuple[str, _T]] = {}

    def get(self, ref: ProcessRef) -> _T | None:
        image, what = self._known.get(ref, ("", None))
        return what if what is not None and image == processes.image_of(ref) else None

    def put(self, ref: ProcessRef, what: _T) -> _T:
        self._known = {one: known for one, known in self._known.items() if processes.alive(one)}
        self._known[ref] = (processes.image_of(ref), what)
        return what

    def drop(self, ref: ProcessRef) -> None:
        self._known.pop(ref, None)


class Unmovable:
    """Processes that the driver has refused to move in a way that can have damaged them. ``known``
    returns what is known before any attempt."""

    def __init__(
        self, known: Callable[[ProcessRef], WhyUnmovable | None] = lambda _ref: None
    ) -> None:
        self._known = known
        self._failed = OfPrograms[WhyUnmovable]()

    def why(self, ref: ProcessRef) -> WhyUnmovable | None:
        """Return why ``ref`` must not be moved; ``None`` if a move may be tried."""
        return self._failed.get(ref) or self._known(ref)

    def refused(self, ref: ProcessRef, error: GpuError) -> WhyUnmovable | None:
        """Record that the driver answered ``error`` to a checkpoint of ``ref``. Return why it must
        not be moved; ``None`` if the next checkpoint may succeed."""
        if error.driver_code not in _FINAL:
            return None
        return self._failed.put(ref, _failed(ref.pid, error))


class RestoreFailures:
    """Restores that failed in the same way although there was room, and those that failed for
    good."""

    def __init__(self) -> None:
        self._counts = OfPrograms[Counter[int]]()
        self._lost = OfPrograms["Lost"]()

    def is_final(self, ref: ProcessRef, error: GpuError) -> bool:
        """Record that the restore of ``ref`` failed with ``error``. Return whether it has failed so
        often in this way that it never succeeds."""
        if error.driver_code is None:
            return False  # the driver's answer is unknown
        counts = self._counts.get(ref)
        if counts is None:
            counts = self._counts.put(ref, Counter())
        counts[error.driver_code] += 1
        return counts[error.driver_code] >= _TRIES

    def lost(self, ref: ProcessRef, outcome: Lost) -> Lost:
        """Record that ``ref`` can never come back, and return ``outcome``."""
        return self._lost.put(ref, outcome)

    def lost_before(self, ref: ProcessRef) -> Lost | None:
        """Return how ``ref`` was lost, if it was. The process holds the room that another try
        would wait for."""
        return self._lost.get(ref)

    def forget(self, ref: ProcessRef) -> None:
        """Forget the failures of ``ref``, which is back."""
        self._counts.drop(ref)


def _failed(pid: int, error: GpuError) -> WhyUnmovable:
    if error.driver_code in STICKY:
        return WhyUnmovable(
            f"The GPU code of process {pid} has failed before, and its memory cannot be moved any "
            f"more ({error.message})",
            "Restart it: none of its GPU calls works any longer.",
        )
    return WhyUnmovable(
        f"The driver has refused to move process {pid}, and the try may have damaged it; Kiwi does "
        f"not try again ({error.message})",
        "If its GPU code fails now, restart it. It stays in the GPU until it ends.",
    )
