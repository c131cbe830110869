"""Probes of the target's own calls while it is LOCKED and while it is CHECKPOINTED."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from callers import named
from targets import AFTER_S, CHECKPOINTED, LOCKED, QUIET_S, Target, hold, let_go, targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from callers import Caller
    from quirks_book import Book

NVML = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo")
HARMLESS = (
    "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemAlloc", "cuMemFree", "cuMemGetInfo", "cuMemsetD32",
    "cuLaunchKernel", "cuEventCreate", "cuEventRecord", "cuEventDestroy", "cuStreamCreate",
    "cuStreamDestroy", "cuModuleLoadData", "cuMemAllocHost", "cuDeviceGetAttribute",
    "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "read_pinned", "launch_then_ctx_sync",
    *NVML,
)  # fmt: skip
DEADLY = (
    "copy_then_stream_sync", "cuStreamQuery", "cuEventQuery", "cuEventSynchronize",
    "cuStreamSynchronize", "cuCtxSynchronize",
)  # fmt: skip
"""Calls that kill a CHECKPOINTED process, or may: they come last."""

SIDE_BY_SIDE, EMULATED_SIDE_BY_SIDE = 12, 6
"""Number of targets at a time: ``cuInit`` takes seconds, and a context 0.5 GB of an H100's 80."""


@dataclass
class Probe:
    """A call of a target, and its results so far."""

    call: str
    target: Target
    why_not: str = ""
    during: dict[str, Any] | None = None
    after: dict[str, Any] | None = None

    @property
    def waits(self) -> bool:
        return not (self.why_not or self.during or self.target.died)

    def __str__(self) -> str:
        if self.why_not:
            return f"not tried: {self.why_not}"
        if self.during:
            return f"returns {_code(self.during)} at once"
        if self.after:
            return f"waits, then {_code(self.after)}"
        return self.target.died or "waits for ever"


def _code(said: dict[str, Any]) -> str:
    return named(said["code"]) if said["code"] >= 0 else str(said.get("why"))


def nvml_calls(book: Book, caller: Caller) -> None:
    _in_batches(book, caller, NVML)


def harmless_calls(book: Book, caller: Caller) -> None:
    _in_batches(book, caller, HARMLESS)


def deadly_calls(book: Book, caller: Caller) -> None:
    _in_batches(book, caller, DEADLY)


def _in_batches(book: Book, caller: Caller, calls: Sequence[str]) -> None:
    count = EMULATED_SIDE_BY_SIDE if caller.stage.emulated else SIDE_BY_SIDE
    for first in range(0, len(calls), count):
        batch = calls[first : first + count]
        with targets(caller, len(batch)) as found:
            for state in (LOCKED, CHECKPOINTED):
                _replace_the_dead(caller, found)
                _round(book, caller, dict(zip(batch, found, strict=True)), state)


def _replace_the_dead(caller: Caller, found: list[Target]) -> None:
    """Replace targets that have died, or that wait for ever."""
    fresh = []
    for i, one in enumerate(found):
        if one.died or one.do("read_pinned", 1.0) != "ok":
            one.retire(caller)
            found[i] = Target(caller.stage)
            fresh.append(found[i])
    for one in fresh:
        one.ready()


def _round(book: Book, caller: Caller, batch: dict[str, Target], state: str) -> None:
    """Make one call of each target at the same time, while the targets are held."""
    why = hold(caller, list(batch.values()), state)
    probes = [
        Probe(call, one, why_not) for (call, one), why_not in zip(batch.items(), why, strict=True)
    ]
    for probe in probes:
        if not probe.why_not:
            probe.target.say(probe.call)
    ends_s = time.monotonic() + QUIET_S
    for probe in filter(lambda p: p.waits, probes):
        probe.during = probe.target.line(max(0.05, ends_s - time.monotonic()))
    let_go(caller, [probe.target for probe in probes])
    ends_s = time.monotonic() + AFTER_S
    for probe in filter(lambda p: p.waits, probes):
        probe.after = probe.target.line(max(0.05, ends_s - time.monotonic()))
    for probe in probes:
        answered = probe.during or probe.after
        intact = {"intact": probe.target.well()} if answered else {}
        book.note(f"{state.lower()}.{probe.call}", str(probe), **intact)
