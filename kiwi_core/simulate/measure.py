"""The measures of a simulation.

Wait: the time from the request until the cell first runs. Slowdown: the time from the request to
the end, over the GPU time that the cell needs alone (at least a second, so that tiny cells do not
dominate). Useful share: work done over the time in which any session wanted the GPU. Lost: the
total time less the GPU time that all cells need. Fairness:
Jain's index of the GPU time of each user per second of wanting; with several GPUs their mean.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kiwi_core.units import NS_PER_S, ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CLASSES: Final[tuple[tuple[str, float, float], ...]] = (
    ("under 2 s", 0.0, 2.0),
    ("2 to 10 s", 2.0, 10.0),
    ("10 to 30 s", 10.0, 30.0),
    ("30 to 120 s", 30.0, 120.0),
    ("over 120 s", 120.0, float("inf")),
)
"""Cells by the GPU time that they need alone: name, from, to (seconds)."""

SHORT_S: Final = 30.0
"""Shorter cells are those that users wait for in front of the screen."""

SLOWDOWN_FLOOR_NS: Final = NS_PER_S


@dataclass
class Measures:
    """The results that one simulation fills in; ``add`` pools several."""

    users: list[str]
    """The user of each session."""
    gpus: array[int] = field(default_factory=lambda: array("i"))
    """The number of each session's GPU once several GPUs are pooled; empty for a single one."""
    session: array[int] = field(default_factory=lambda: array("i"))
    gpu_ns: array[int] = field(default_factory=lambda: array("q"))
    wait_ns: array[int] = field(default_factory=lambda: array("q"))
    response_ns: array[int] = field(default_factory=lambda: array("q"))
    """These four have an entry for each cell, in the order in which the cells ended."""
    place_wait_ns: array[int] = field(default_factory=lambda: array("q"))
    """In a cluster: the wait of each session that found no free place when it came."""
    makespan_ns: int = 0
    """When the last cell ended; the sum over several GPUs."""
    wanted_ns: int = 0
    """Time in which any session waited or ran."""
    given_ns: float = 0.0
    busy_ns: int = 0
    suspensions: int = 0
    """How often a cell was stopped in its middle."""
    swaps: int = 0
    swapped_bytes: int = 0
    swapping_ns: int = 0
    out_of_memory: int = 0
    killed: int = 0
    killed_work_ns: float = 0.0
    """GPU time that the killed cells would still have needed."""
    operations: Counter[str] = field(default_factory=Counter)
    events: int = 0

    @property
    def cells(self) -> int:
        return len(self.session)

    def cell(
        self, session: int, gpu_ns: int, asked_ns: int, granted_ns: int, ended_ns: int
    ) -> None:
        self.session.append(session)
        self.gpu_ns.append(gpu_ns)
        self.wait_ns.append(granted_ns - asked_ns)
        self.response_ns.append(ended_ns - asked_ns)
        self.makespan_ns = ended_ns

    def moved(self, moved_bytes: int, took_ns: int) -> None:
        self.swaps += 1
        self.swapped_bytes += moved_bytes
        self.swapping_ns += took_ns

    def add(self, other: Measures) -> None:
        """Add the measures of other GPUs. Their users are other persons, whatever their names."""
        shift = len(self.users)
        first = max(self.gpus, default=-1) + 1
        self.gpus.extend(first + gpu for gpu in other.gpus or [0] * len(other.users))
        self.users.extend(other.users)
        self.session.extend(array("i", (session + shift for session in other.session)))
        self.gpu_ns.extend(other.gpu_ns)
        self.wait_ns.extend(other.wait_ns)
        self.response_ns.extend(other.response_ns)
        self.place_wait_ns.extend(other.place_wait_ns)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.operations.update(other.operations)


_SUMS: Final = (
    "makespan_ns", "wanted_ns", "given_ns", "busy_ns", "suspensions", "swaps", "swapped_bytes",
    "swapping_ns", "out_of_memory", "killed", "killed_work_ns", "events",
)  # fmt: skip


# --- summaries ----------------------------------------------------------------------------------


class Quantiles(Struct, frozen=True, kw_only=True):
    """The distribution of ``n`` values, in seconds; slowdowns are factors."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class ClassSummary(Struct, frozen=True, kw_only=True):
    cells: str
    """The name of the class, by the GPU time that its cells need alone."""
    wait_s: Quantiles
    slowdown: Quantiles


class UserSummary(Struct, frozen=True, kw_only=True):
    user: str
    cells: int
    gpu_s: float
    wait_p50_s: float
    wait_p95_s: float
    share_while_wanting: float
    """The user's share of one GPU while waiting or running; fairness compares these."""


class Summary(Struct, frozen=True, kw_only=True):
    cells: int
    total_s: float
    """Time until all work was done; the sum over several GPUs."""
    lost_s: float
    """The total time less the GPU time that the cells need: idle while anybody thinks or waits, and
    while memory moves."""
    useful_share: float
    """Work done over the time in which any session wanted the GPU."""
    wanted_share: float
    """The share of the total time in which any session wanted the GPU."""
    swaps: int
    swapped_bytes: int
    suspensions: int
    jain: float
    short: ClassSummary
    """Cells of less than 30 s of GPU."""
    all: ClassSummary
    classes: tuple[ClassSummary, ...]
    place_wait_s: Quantiles
    """In a cluster: the waits of sessions that found no free place when they came."""
    users: tuple[UserSummary, ...]
    out_of_memory: int
    killed: int
    refused: int
    hung: int
    events: int


USERS_MAX: Final = 64


def summarise(measures: Measures) -> Summary:
    """Return a summary with the figures of at most ``USERS_MAX`` users (fairness counts all)."""
    in_class = [_within(measures, low_s, high_s) for _, low_s, high_s in CLASSES]
    users = _users(measures)
    operations = measures.operations
    return Summary(
        cells=measures.cells,
        total_s=ns_to_seconds(measures.makespan_ns),
        lost_s=ns_to_seconds(measures.makespan_ns - sum(measures.gpu_ns)),
        useful_share=_share(measures.given_ns, measures.wanted_ns),
        wanted_share=_share(measures.wanted_ns, measures.makespan_ns),
        swaps=measures.swaps,
        swapped_bytes=measures.swapped_bytes,
        suspensions=measures.suspensions,
        jain=_mean_jain(users),
        short=_class(measures, f"under {SHORT_S:.0f} s", _within(measures, 0.0, SHORT_S)),
        all=_class(measures, "all", range(measures.cells)),
        classes=tuple(
            _class(measures, name, cells)
            for (name, _, _), cells in zip(CLASSES, in_class, strict=True)
        ),
        place_wait_s=spread(map(ns_to_seconds, measures.place_wait_ns)),
        users=tuple(user for _, user in users[:USERS_MAX]),
        out_of_memory=measures.out_of_memory,
        killed=measures.killed,
        refused=operations["refused"] + operations["no room"],
        hung=operations["hangs"],
        events=measures.events,
    )


def _within(measures: Measures, low_s: float, high_s: float) -> list[int]:
    low_ns, high_ns = low_s * NS_PER_S, high_s * NS_PER_S
    return [cell for cell, gpu_ns in enumerate(measures.gpu_ns) if low_ns <= gpu_ns < high_ns]


def _class(measures: Measures, name: str, cells: Sequence[int]) -> ClassSummary:
    return ClassSummary(
        cells=name,
        wait_s=spread([ns_to_seconds(measures.wait_ns[cell]) for cell in cells]),
        slowdown=spread([_slowdown(measures, cell) for cell in cells]),
    )


def _slowdown(measures: Measures, cell: int) -> float:
    alone_ns = max(measures.gpu_ns[cell], SLOWDOWN_FLOOR_NS)
    return max(1.0, measures.response_ns[cell] / alone_ns)


def spread(values: Iterable[float]) -> Quantiles:
    """Return the distribution, with percentiles by the nearest rank; all 0 without a value."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(n=0, mean=0.0, p50=0.0, p95=0.0, p99=0.0, max=0.0)
    return Quantiles(
        n=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=_rank(ordered, 0.50),
        p95=_rank(ordered, 0.95),
        p99=_rank(ordered, 0.99),
        max=ordered[-1],
    )


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _users(measures: Measures) -> list[tuple[int, UserSummary]]:
    """Return the users with the number of their GPU, in the order of the traces. Several sessions
    of one user on one GPU count as one user."""
    gpus = measures.gpus or array("i", [0] * len(measures.users))
    several = len(set(gpus)) > 1
    cells: dict[tuple[int, str], list[int]] = {
        key: [] for key in zip(gpus, measures.users, strict=True)
    }
    for cell, session in enumerate(measures.session):
        cells[gpus[session], measures.users[session]].append(cell)
    return [
        (gpu, _user(measures, f"{user} on GPU {gpu}" if several else user, mine))
        for (gpu, user), mine in cells.items()
        if mine
    ]


def _mean_jain(users: list[tuple[int, UserSummary]]) -> float:
    """Return the mean of the GPUs' indices: that one GPU is busier than another is not unfair."""
    by_gpu: dict[int, list[float]] = {}
    for gpu, user in users:
        by_gpu.setdefault(gpu, []).append(user.share_while_wanting)
    return sum(map(jain, by_gpu.values())) / max(1, len(by_gpu))


def _user(measures: Measures, user: str, cells: list[int]) -> UserSummary:
    gpu_ns = sum(measures.gpu_ns[cell] for cell in cells)
    waits = spread([ns_to_seconds(measures.wait_ns[cell]) for cell in cells])
    return UserSummary(
        user=user,
        cells=len(cells),
        gpu_s=ns_to_seconds(gpu_ns),
        wait_p50_s=waits.p50,
        wait_p95_s=waits.p95,
        share_while_wanting=_share(gpu_ns, sum(measures.response_ns[cell] for cell in cells)),
    )


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index. 1: all shares are equal; 1/n: one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
