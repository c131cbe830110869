"""Generators of traces: mixes of notebooks and trainings with stated parameters.

Times between cells and lengths of cells are lognormal (median, sigma), as in measured notebook
traces: many short cells and a long tail. Published figures (NotebookOS): cells p50 ≤ 2 min and
p75 ≤ 5 min, between cells p50 5 min, a reserved GPU idle > 81 % of the time. The other mixes are
stress cases with figures of our own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from kiwi_core.errors import CallerError
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.units import GIB, MIB, NS_PER_S, seconds_to_ns


@dataclass(frozen=True)
class CellKind:
    """The behaviour of one kind of session. Pairs are evenly drawn ranges; shares are fractions."""

    cell_median_s: float
    cell_sigma: float | None
    """``None``: evenly from 0.2 to 1.8 times the median."""
    cell_max_s: float
    think_median_s: float
    think_sigma: float | None
    """``None``: exponential, with ``think_median_s`` as the mean."""
    gpu_share: tuple[float, float] = (1.0, 1.0)
    """The GPU's share of a cell's time; the rest is CPU time before it."""
    break_chance: float = 0.0
    """Probability of a break before a cell, in addition to the think time."""
    break_s: tuple[float, float] = (0.0, 0.0)
    footprint: tuple[float, float] = (0.2, 0.9)
    """The memory that the session holds in the end, as a share of the GPU."""
    warm_up: int = 1
    """Number of first cells that only import and look around: a context, one second each."""
    grows: bool = True
    """Whether it takes its memory bit by bit, not all of it in its first cell."""


CONTEXT_BYTES: Final = 500 * MIB
FIRST_LOAD: Final = 0.7
"""Share of the final footprint that the first real cell takes."""
GROWTH_CHANCE: Final = 0.15
"""Probability that a later cell takes half of what is missing to the final footprint."""

NOTEBOOK: Final = CellKind(
    cell_median_s=120.0, cell_sigma=1.36, cell_max_s=3600.0, gpu_share=(0.05, 0.65),
    think_median_s=300.0, think_sigma=1.0, break_chance=0.1, break_s=(1200.0, 5400.0),
)  # fmt: skip
"""The published medians and quartiles (sigma 1.36 puts p75 at 2.5 times the median). How much of
a cell is GPU work is not published; this range makes 8 of them about as much as a GPU can do."""

INTERACTIVE: Final = CellKind(
    cell_median_s=5.0, cell_sigma=1.2, cell_max_s=120.0, gpu_share=(0.6, 1.0),
    think_median_s=30.0, think_sigma=1.0, break_chance=0.03, break_s=(300.0, 1200.0),
)  # fmt: skip
"""A user who tries things out: a few seconds of GPU, half a minute of thought."""

TRAINING: Final = CellKind(
    cell_median_s=3600.0, cell_sigma=0.6, cell_max_s=4 * 3600.0,
    think_median_s=60.0, think_sigma=0.5, footprint=(0.4, 0.9),
)  # fmt: skip
"""Computes almost all the time."""

HEAVY: Final = CellKind(
    cell_median_s=20.0, cell_sigma=1.3, cell_max_s=1800.0,
    think_median_s=16.0, think_sigma=1.1,
)  # fmt: skip
"""Computes 60 % of the time if alone: mean cell 46 s, mean pause 29 s. Eight of them want almost
five GPUs."""


def quick(think_s: float, footprint: float, cell_s: float = 2.0) -> CellKind:
    """Return a user who thinks for seconds. Moving the memory may take longer than that."""
    return CellKind(
        cell_median_s=cell_s, cell_sigma=None, cell_max_s=cell_s * 2, think_median_s=think_s,
        think_sigma=None, footprint=(footprint, footprint), warm_up=0, grows=False,
    )  # fmt: skip


ENDLESS: Final = CellKind(
    cell_median_s=20 * 3600.0, cell_sigma=0.0, cell_max_s=20 * 3600.0,
    think_median_s=1.0, think_sigma=0.0, footprint=(0.75, 0.75), warm_up=0, grows=False,
)  # fmt: skip
"""One cell that outlasts everybody, so that no policy looks good by starving it."""

SMALL: Final = (0.15, 0.3)
"""Footprints so small that three to five sessions fit together."""


@dataclass(frozen=True)
class Mix:
    summary: str
    kinds: tuple[tuple[CellKind, int], ...]
    """Each kind of session, and how many there are of it."""

    @property
    def sessions(self) -> int:
        return sum(count for _, count in self.kinds)


def _small(kind: CellKind) -> CellKind:
    return replace(kind, footprint=SMALL)


MIXES: Final[dict[str, Mix]] = {
    "notebooks": Mix("8 notebooks with published cell times", ((NOTEBOOK, 8),)),
    "6+1": Mix("6 interactive sessions and 1 training", ((INTERACTIVE, 6), (TRAINING, 1))),
    "6+2": Mix("6 interactive sessions and 2 trainings", ((INTERACTIVE, 6), (TRAINING, 2))),
    "heavy": Mix("8 users who want the GPU 60 % of the time each", ((HEAVY, 8),)),
    "small": Mix(
        "6 interactive sessions and 1 training, small footprints",
        ((_small(INTERACTIVE), 6), (_small(TRAINING), 1)),
    ),
    "pair": Mix("2 users who think for 5 s and do not fit together", ((quick(5, 0.625), 2),)),
    "three": Mix("3 users who think for 20 s, none fit together", ((quick(20, 0.625), 3),)),
    "four": Mix("4 users who think for 5 s, two fit together", ((quick(5, 0.375), 4),)),
    "1+training": Mix(
        "1 user who thinks for 4 s, and 1 training that does not fit beside",
        ((quick(4, 0.5, 1.0), 1), (ENDLESS, 1)),
    ),
    "pair+training": Mix(
        "2 users who think for 5 s, and 1 training; no two fit together",
        ((quick(5, 0.625), 2), (ENDLESS, 1)),
    ),
}


def generate(
    mix: str,
    *,
    hours: float = 24.0,
    seed: int = 0,
    sessions: int | None = None,
    total_bytes: int = 80 * GIB,
) -> Trace:
    """Return a trace in which each session lasts for ``hours`` if it never waits. ``sessions``
    scales the mix (in the same proportion, each kind at least once). Raise
    ``CallerError("unknown-mix")`` or ``CallerError("too-few-sessions")``."""
    if mix not in MIXES:
        raise CallerError("unknown-mix", f"There is no mix {mix!r}.", f"Mixes: {', '.join(MIXES)}.")
    made: list[SessionTrace] = []
    for kind in _kinds(MIXES[mix], sessions):
        number = len(made) + 1
        rng = random.Random(f"{mix}/{seed}/{number}")
        cells = tuple(_cells(kind, rng, hours * 3600.0, total_bytes))
        starts_ns = int(rng.uniform(0, min(600.0, hours * 360.0)) * NS_PER_S)
        name = f"s{number}"
        made.append(SessionTrace(id=name, user=name, starts_ns=starts_ns, cells=cells))
    return Trace(name=mix, total_bytes=total_bytes, sessions=tuple(made))


def _kinds(mix: Mix, sessions: int | None) -> list[CellKind]:
    if sessions is None or sessions == mix.sessions:
        return [kind for kind, count in mix.kinds for _ in range(count)]
    if sessions < len(mix.kinds):
        raise CallerError(
            "too-few-sessions",
            f"This mix has {len(mix.kinds)} kinds of sessions; {sessions} are too few.",
            f"Give at least {len(mix.kinds)}.",
        )
    kinds: list[CellKind] = []
    for kind, count in mix.kinds[1:]:
        kinds += [kind] * max(1, round(sessions * count / mix.sessions))
    return [mix.kinds[0][0]] * (sessions - len(kinds)) + kinds


def _cells(kind: CellKind, rng: random.Random, length_s: float, total_bytes: int) -> list[Cell]:
    final_bytes = int(rng.uniform(*kind.footprint) * total_bytes)
    held_bytes = CONTEXT_BYTES
    cells: list[Cell] = []
    lived_s = 0.0
    while lived_s < length_s or len(cells) <= kind.warm_up:
        warming_up = len(cells) < kind.warm_up
        if kind.think_sigma is None:
            think_s = rng.expovariate(1 / kind.think_median_s)
        else:
            think_s = _lognormal(rng, kind.think_median_s, kind.think_sigma)
        if rng.random() < kind.break_chance:
            think_s += rng.uniform(*kind.break_s)
        if kind.cell_sigma is None:
            cell_s = kind.cell_median_s * rng.uniform(0.2, 1.8)
        else:
            cell_s = min(_lognormal(rng, kind.cell_median_s, kind.cell_sigma), kind.cell_max_s)
        if warming_up:
            cell_s = 1.0
        gpu_s = cell_s * rng.uniform(*kind.gpu_share)
        real_cells = len(cells) - kind.warm_up
        held_bytes = _grown(rng, held_bytes, final_bytes, real_cells) if kind.grows else final_bytes
        cells.append(
            Cell(
                think_ns=seconds_to_ns(think_s),
                cpu_ns=seconds_to_ns(cell_s - gpu_s),
                gpu_ns=seconds_to_ns(gpu_s),
                peak_bytes=held_bytes,
            )
        )
        lived_s += think_s + cell_s
    return cells


def _grown(rng: random.Random, held_bytes: int, final_bytes: int, real_cells: int) -> int:
    grows = rng.random() < GROWTH_CHANCE  # drawn every time, so that later draws stay the same
    if real_cells < 0:
        return held_bytes
    if real_cells == 0:
        return max(held_bytes, int(FIRST_LOAD * final_bytes))
    return held_bytes + max(0, final_bytes - held_bytes) // 2 if grows else held_bytes


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * rng.lognormvariate(0.0, sigma)
