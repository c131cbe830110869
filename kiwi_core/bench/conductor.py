"""Conduct a bench: choose the GPU and how much to use, run the parts, and make the report."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kiwi_core import __version__, config
from kiwi_core.bench import machine, plan
from kiwi_core.bench.process import BenchWorker
from kiwi_core.bench.results import Left, Limit, Report
from kiwi_core.bench.work.stage import LOG
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.gpu import choice
from kiwi_core.gpu.nvml import GpuInfo
from kiwi_core.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.machine import Numa, PcieLink
    from kiwi_core.bench.plan import FreeMemory, TimeLimits
    from kiwi_core.bench.results import Row

ENV_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_OURS: Final = (
    config.ENV_SOCKET_DIR, config.ENV_STATE_DIR, config.ENV_DISABLE, config.ENV_GPU,
    "KIWI_RUN_SESSION", "KIWI_DAEMON_ARGS",
)  # fmt: skip
"""The user's settings for Kiwi, which the bench's own daemon and programs do not get."""

_NAMELESS_MAX_BYTES: Final = 2 * GIB
"""Most memory that the driver itself keeps. If more is used, a program uses the GPU that NVML does
not name, for instance from another PID namespace.
"""

_ENDING_S: Final = 5.0
"""Time reserved for ending processes."""


class BenchOptions(NamedTuple):
    """What the user asked for. ``emulate``: sizes of emulated GPUs; ``copy_bytes_per_s``: speed of
    their bus (0: as fast as memory); ``beside_others``: measure even if others use the GPU."""

    gpu: str | None = None
    emulate: str | None = None
    copy_bytes_per_s: int = 0
    beside_others: bool = False


@dataclass
class Bench:
    """One run: the place of its processes, what it may use, and its results so far. ``say`` shows
    the user the title of what begins."""

    say: Callable[[str], None]
    options: BenchOptions
    directory: Path
    stage: BenchWorker
    env: dict[str, str]
    gpu: GpuInfo
    room: FreeMemory
    others: int
    patience: TimeLimits
    began_s: float
    numa: Numa | None = None
    link: PcieLink | None = None
    rows: list[Row] = field(default_factory=list)
    left_out: list[Left] = field(default_factory=list)

    @property
    def emulated(self) -> bool:
        return self.options.emulate is not None

    @property
    def left_s(self) -> float:
        return self.began_s + self.patience.total_s - _ENDING_S - time.monotonic()

    def worker(self, role: str, env: Mapping[str, str] | None = None) -> BenchWorker:
        """Start a process that sees only this GPU. The caller closes it."""
        return BenchWorker(role, self.env | dict(env or {}), self.directory / LOG)

    @contextmanager
    def step(self, name: str, title: str, needs_s: float = 1.0) -> Iterator[None]:
        """Measure one row, or several that belong together. An error ends only this step."""
        try:
            if self.left_s < needs_s:
                raise KiwiError("no-time", "The bench's time was over.")
            self.say(title)
            yield
        except KiwiError as error:
            self.left_out.append(Left(name, title, str(error), failed=True))
        except Exception as error:  # noqa: BLE001 - what else was measured must not be lost
            words = f"unexpected: {type(error).__name__}: {error}; please report it"
            self.left_out.append(Left(name, title, words, failed=True))

    def leave_out(self, name: str, title: str, reason: str) -> None:
        """Record what is not measured, for a good reason."""
        self.left_out.append(Left(name, title, reason))

    def add(self, *rows: Row) -> None:
        self.rows.extend(rows)

    def pinned_limit(self, way: str) -> Limit | None:
        """Return the speed of the pinned copy; ``None`` if it was not measured."""
        for row in self.rows:
            if row.name == f"pinned_{way}":
                return Limit(row.spread.median, f"of the pinned copy {way}")
        return None


def run(
    options: BenchOptions,
    backends: Sequence[Backend],
    say: Callable[[str], None],
    begins: Callable[[Bench], None],
) -> Report:
    """Run the whole bench. ``begins`` is called when it knows what it uses, before it measures.
    Raises ``KiwiError`` if nothing can be measured. Every process that was started ends, also after
    an error."""
    from kiwi_core.bench import distance, limits, remedies

    with ExitStack() as stack:
        say("libraries")
        why_not = {backend.name: backend.why_not() for backend in backends}
        bench = _set_up(options, say, stack)
        bench.patience = bench.patience.shared(sum(not reason for reason in why_not.values()))
        begins(bench)
        limits.measure(bench)
        distance.measure(bench, backends, why_not)
        for_this = [] if bench.emulated else remedies.of(bench, backends)
        return Report(
            kiwi=__version__,
            took_s=round(time.monotonic() - bench.began_s, 1),
            emulated=bench.emulated,
            others=bench.others,
            machine=_machine(bench),
            uses={
                "gpu_bytes": bench.room.gpu_bytes,
                "gpu_switch_bytes": bench.room.switch_bytes,
                "host_bytes": bench.room.host_bytes,
            },
            rows=tuple(bench.rows),
            left_out=tuple(bench.left_out),
            remedies=tuple(for_this),
        )


# --- setting up ---------------------------------------------------------------------------------


def _set_up(options: BenchOptions, say: Callable[[str], None], stack: ExitStack) -> Bench:
    began_s = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name not in _OURS}
    stage = stack.enter_context(BenchWorker("stage", env))
    directory = Path(stage.ask("directory"))
    if options.emulate is not None:
        say("emulated driver")
        # The first use compiles it; a compiler that must first compile itself takes minutes.
        args = {"sizes": options.emulate, "copy_bytes_per_s": options.copy_bytes_per_s}
        env |= stage.ask("emulate", 400.0, **args)
        began_s = time.monotonic()
    with BenchWorker("look", env, directory / LOG) as looker:
        say("looking at the GPUs")
        gpu = _chosen(_gpus(looker), options.gpu)
        used = looker.ask("memory", uuid=gpu.uuid)
    others = _others(used, gpu, options)
    room = plan.FreeMemory(used["total_bytes"], used["free_bytes"], used["host_available_bytes"])
    plan.check(room)
    env |= {ENV_VISIBLE: gpu.uuid, config.ENV_SOCKET_DIR: str(directory)}
    return Bench(
        say, options, directory, stage, env, gpu, room, others,
        plan.EMULATED if options.emulate is not None else plan.TimeLimits(), began_s,
    )  # fmt: skip


def _gpus(looker: BenchWorker) -> list[GpuInfo]:
    remedy = "Without a GPU: kiwi bench --emulate 1x512MiB (its speeds mean nothing)."
    try:
        found = [GpuInfo(**fields) for fields in looker.ask("gpus")]
    except KiwiError as error:
        raise CallerError("no-gpu", error.message, remedy) from error
    if not found:
        raise CallerError("no-gpu", "There is no NVIDIA GPU on this machine.", remedy)
    return found


def _chosen(gpus: Sequence[GpuInfo], word: str | None) -> GpuInfo:
    return gpus[0] if word is None else choice.one(gpus, word)


def _others(used: dict[str, Any], gpu: GpuInfo, options: BenchOptions) -> int:
    """Return how many others use the GPU. Raises ``CallerError`` if there may be none."""
    count: int = used["users"]
    if not count and used["used_bytes"] > _NAMELESS_MAX_BYTES:
        count = 1
    if count and not options.beside_others:
        programs = "1 program uses" if count == 1 else f"{count} programs use"
        raise CallerError(
            "gpu-in-use",
            f"{programs} GPU {gpu.index} now ({format_bytes(used['used_bytes'])} of it): the bench "
            "would get in their way, and its numbers would not be the machine's.",
            "Wait until they have ended (kiwi status, nvidia-smi), choose another GPU with --gpu, "
            "or measure all the same with --beside-others.",
        )
    return count


def _machine(bench: Bench) -> dict[str, Any]:
    gpu = bench.gpu
    found = {
        "gpu": gpu.name,
        "gpu_bytes": gpu.total_bytes,
        "driver": gpu.driver_version,
        "persistence_mode": gpu.persistence,
        **machine.describe(),
    }
    if bench.numa is not None:
        found["gpu_numa_node"] = bench.numa.gpu_node
        found["own_numa_nodes"] = list(bench.numa.own_nodes)
    if bench.link is not None:
        found["pcie"] = asdict(bench.link)
    return found


def quietly(call: Callable[[], object]) -> None:
    """Free something and ignore errors, which are reported elsewhere."""
    with suppress(KiwiError):
        call()
