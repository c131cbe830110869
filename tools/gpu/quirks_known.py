"""Behaviour of NVIDIA's driver in other people's runs, for the probes of ``quirks.py``.

Collected in November 2026 from public sources. G is VivianSobers/gpunap (RTX 4090, drivers 580.178
and 595.84, proprietary module), N#n is NVIDIA/cuda-checkpoint issue n. Nobody else has reported
behaviour that is not here; Kiwi's own run is ``quirks_h200.json``. The table is only for
comparison; nothing depends on it.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """Known answers to a probe, in the probe's own words, any of which others have seen."""

    answers: tuple[str, ...]
    source: str


_ILLEGAL = "401 ILLEGAL_STATE"
_OK = "0 SUCCESS"
_BOTH = "G, 580 and 595"
_595 = "G, 595"

_STATES = {
    **dict.fromkeys(
        (
            "state.running.checkpoint", "state.running.restore", "state.running.unlock",
            "state.locked.lock", "state.checkpointed.lock", "state.checkpointed.checkpoint",
            "state.checkpointed.unlock",
        ),
        Known((_ILLEGAL,), _BOTH),
    ),
    **dict.fromkeys(
        (
            "state.running.lock", "state.locked.checkpoint", "state.checkpointed.restore",
            "state.restored.unlock",
        ),
        Known((_OK,), _BOTH),
    ),
    "state.round_trip": Known(("intact",), _BOTH),
    "stranger.missing.state": Known(("304 OPERATING_SYSTEM",), _BOTH),
    "stranger.missing.lock": Known(("304 OPERATING_SYSTEM",), _BOTH),
    "stranger.no_cuda.state": Known(("3 NOT_INITIALIZED",), _BOTH),
    "stranger.no_cuda.lock": Known(("3 NOT_INITIALIZED",), _BOTH),
    "stranger.zombie.state": Known(("3 NOT_INITIALIZED",), _BOTH),
    "stranger.zombie.lock": Known(("3 NOT_INITIALIZED",), _BOTH),
    "lock.time_out": Known(("600 NOT_READY",), _595),
    "lock.time_out.state_after": Known((f"{_OK}, state RUNNING",), _595),
    "lock.no_limit": Known((f"waits for the kernel, then {_OK}",), _595),
    "lock.job_afterwards": Known(("intact",), _595),
    "lock.while_in_sync": Known(
        (f"lock {_OK}; the sync returns before the unlock with {_OK}",), _595
    ),
}  # fmt: skip

_CALLS = {
    **dict.fromkeys(
        ("locked.cuCtxSynchronize", "locked.cuStreamSynchronize"),
        Known((f"returns {_OK} at once",), _595),
    ),
    **dict.fromkeys(
        ("checkpointed.cuCtxSynchronize", "checkpointed.cuStreamSynchronize"),
        Known(("SIGSEGV",), _BOTH),
    ),
    **dict.fromkeys(
        (
            "checkpointed.cuMemcpyDtoH", "checkpointed.cuMemcpyHtoD", "checkpointed.cuMemAlloc",
            "checkpointed.cuLaunchKernel", "checkpointed.cuEventCreate",
            "checkpointed.cuEventRecord", "checkpointed.launch_then_ctx_sync",
            "checkpointed.copy_then_stream_sync",
        ),
        Known((f"waits, then {_OK}",), _BOTH),
    ),
    "checkpointed.read_pinned": Known((f"returns {_OK} at once",), "cuda-checkpoint's README"),
}  # fmt: skip

_MOVES = {
    **dict.fromkeys(
        ("query.during_checkpoint", "query.during_restore"),
        Known(("waits until the move ends",), _BOTH),
    ),
    **dict.fromkeys(
        ("query.during_checkpoint.nvml", "query.during_restore.nvml"),
        Known(("answers meanwhile",), _BOTH),
    ),
    "nvml.row_while_checkpointed": Known(("no row",), _595),
    "memory.given_back": Known(("NVML's figure +5 MiB",), _BOTH),
    "memory.pinned_while_out": Known(("none",), _595),
    "killed_caller.checkpoint": Known(("completes: CHECKPOINTED",), _BOTH),
    "killed_caller.restore": Known(("completes: LOCKED",), _BOTH),
    "killed_caller.unlock_by_another": Known((_OK,), _BOTH),
    "killed_caller.job_afterwards": Known(("intact",), _BOTH),
    "killed_target.checkpoint": Known(("304 OPERATING_SYSTEM",), _BOTH),
    "killed_target.memory": Known(("all given back",), _BOTH),
}

_ENDS = {
    "exit.while_checkpointed": Known(("exit 0 at once", "exit 0 after the unlock"), _595),
    "signal.SIGTERM": Known(("SIGTERM",), _595),
    "signal.SIGKILL": Known(("SIGKILL",), _595),
    "signal.SIGINT.in_a_call": Known(("its handler runs after the resume",), _595),
    **dict.fromkeys(("stopped.state", "stopped.lock", "stopped.restore"), Known(("hangs",), _BOTH)),
    **dict.fromkeys(
        ("stopped.state.after_SIGCONT", "stopped.lock.after_SIGCONT"), Known((_OK,), _BOTH)
    ),
    "stopped.restore.after_SIGCONT": Known((_OK,), _BOTH),
    "stopped.jobs_afterwards": Known(("intact",), _BOTH),
    "failed_restore.restore": Known(("2 OUT_OF_MEMORY",), "G, 580 and 595; N#44, 580.95"),
    "failed_restore.grabs": Known(("all of what was free",), _BOTH),
    "failed_restore.nvml_row": Known(("no row",), _BOTH),
    "failed_restore.state": Known(("CHECKPOINTED",), _BOTH),
    "failed_restore.keeps": Known(("GPU memory",), _BOTH),
    "failed_restore.again_with_room": Known(("304 OPERATING_SYSTEM",), "G; N#44"),
    "failed_restore.unlock": Known((_ILLEGAL,), _BOTH),
    "failed_restore.checkpoint": Known((_ILLEGAL,), _BOTH),
}

KNOWN: dict[str, Known] = {**_STATES, **_CALLS, **_MOVES, **_ENDS}

OTHER_THAN_THE_EMULATOR: dict[str, str] = {
    "query.during_restore.same_caller": (
        "The H200 answered at once. The emulator makes the query wait, which is less kind. The "
        "probe of that run may have asked before the restore had begun."
    ),
}
"""Rows in which Kiwi's own run differs from the emulator, each with the reason why it may."""

KINDER_ELSEWHERE: dict[str, str] = {
    "memory.given_back": "G saw 5 MiB, Kiwi 6 MiB: a restore needs as much.",
}
"""Rows in which the emulator follows Kiwi's own run, because others saw a driver that does less
harm."""
