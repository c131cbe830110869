"""Convert a daemon's status to the form of the REST interface: absolute times, notebook paths,
rights. Pure.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from kiwi_jupyter.server_ext.model import Gpu, Problem, Session, Waiter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.errors import KiwiError
    from kiwi_core.wire.messages import GpuStatus, QueueEntry, SessionStatus
    from kiwi_jupyter.server_ext.model import History


def gpu_of(
    status: GpuStatus,
    received_at: float,
    *,
    paths: Mapping[str, str],
    history: list[History],
    may_set: bool,
    problem: Problem | None = None,
) -> Gpu:
    """Return the GPU of ``status``, received at ``received_at`` (Unix seconds). ``paths`` are
    notebooks by kernel id. ``problem``: why its daemon does not answer any more.
    """
    fields = asdict(status)
    fields["may_set"] = may_set and status.may_set
    fields["sessions"] = [_session(one, received_at, paths) for one in status.sessions]
    fields["queue"] = [_waiter(one, received_at) for one in status.queue]
    return Gpu(**fields, history=history, reachable=problem is None, problem=problem)


def _session(status: SessionStatus, received_at: float, paths: Mapping[str, str]) -> Session:
    fields = asdict(status)
    path = path_of(status.kernel_id, status.mine, paths)
    fields["name"] = name_of(path, status.name)
    return Session(
        **fields,
        path=path,
        turn_ends_at=_after(received_at, status.time_left_s),
        keeps_until=_after(received_at, status.keeps_s),
    )


def name_of(path: str | None, said: str) -> str:
    """Return the current name of the notebook. ``said`` is what the daemon calls it, perhaps with
    folders before it; it may not know yet that the notebook was renamed."""
    if path is None or f"/{path}".endswith(f"/{said}"):
        return said
    return PurePosixPath(path).name or said


def path_of(kernel_id: str, mine: bool, paths: Mapping[str, str]) -> str | None:
    """Return the path for the reader's own sessions only: a kernel id is no secret and gives no
    rights.
    """
    return paths.get(kernel_id) if mine and kernel_id else None


def _waiter(entry: QueueEntry, received_at: float) -> Waiter:
    return Waiter(
        **asdict(entry),
        waiting_since=received_at - entry.waited_s,
        expected_at=_after(received_at, entry.expected_wait_s),
        expected_low_at=_after(received_at, entry.expected_low_s),
        expected_high_at=_after(received_at, entry.expected_high_s),
    )


def _after(received_at: float, seconds: float | None) -> float | None:
    return None if seconds is None else received_at + seconds


def problem_of(error: KiwiError) -> Problem:
    return Problem(code=error.code, message=error.message, remedy=error.remedy)
