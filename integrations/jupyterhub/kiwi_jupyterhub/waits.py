"""The places where a server can run, each with the wait of a newcomer there.

These functions block (for seconds at most): ``OptionsPage`` calls them in a thread.
"""

from __future__ import annotations

import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.request import urlopen

from kiwi_core import config
from kiwi_core.client import discover, gpu_placement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

WITHIN_S: Final = 3.0
"""Time for a daemon, a metrics server or Slurm to answer. A page that takes longer annoys users. A
place that does not answer in time is shown without a wait.
"""

ASKED_AT_ONCE: Final = 32
"""Metrics servers asked at the same time: a hundred nodes take four rounds of milliseconds."""

METRIC: Final = "kiwi_newcomer_wait_seconds"

_A_SECOND: Final = 1000
"""Weight of one second of wait: more than all sessions that a node has."""

WAIT_MAX_S: Final = 1_000_000
"""Eleven days stand for a wait whose end nobody knows; Slurm's weights have 32 bits."""

TAKES_JOBS: Final = frozenset({"idle", "mixed", "allocated"})
"""States of Slurm's nodes that take jobs, now or later."""


@dataclass(frozen=True)
class Place:
    """A node or a GPU. ``key`` is what the spawner gets, ``name`` what people read. ``wait_s`` is
    infinite if the end of a newcomer's wait is not known, and ``None`` if the place takes nobody.
    """

    key: str
    name: str
    wait_s: float | None
    sessions: int = 0
    """Number of sessions that share the place already, as far as it is known."""


def waits_of_this_machine(socket_dir: Path | None = None) -> list[Place]:
    """Return the GPUs of the hub's own machine: for spawners that start servers there."""
    gpus = gpu_placement.statuses(discover(socket_dir or config.socket_dir()), WITHIN_S)
    return [
        Place(
            gpu.uuid,
            f"GPU {gpu.index} ({gpu.name})",
            math.inf if gpu.newcomer_wait_s is None else gpu.newcomer_wait_s,
            gpu_placement.programs_of(gpu),
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
    ]


def slurm_weight(places: Sequence[Place]) -> int:
    """Return the weight of a node with these GPUs: the least wait in seconds, then the number of
    sessions. By the wait alone, all nodes without a wait would be equal, and every job of an
    interval would go to the first. Raises ``ValueError`` if no GPU answers.
    """
    wait_s = min(place.wait_s for place in places if place.wait_s is not None)
    sessions = min(sum(place.sessions for place in places), _A_SECOND - 1)
    return 1 + _A_SECOND * round(min(wait_s, WAIT_MAX_S)) + sessions


def waits_of_slurm(partition: str = "", command: Sequence[str] = ("sinfo",)) -> list[Place]:
    """Return Slurm's nodes (of one partition). ``kiwi_health_check`` writes the wait into a node's
    weight (``slurm_weight``). A node that takes no jobs is a place that takes nobody."""
    only = ("--partition", partition) if partition else ()
    lines = subprocess.run(
        [*command, "--noheader", "--Node", *only, "--format", "%N %w %T"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    ).stdout.splitlines()
    found = []
    for line in dict.fromkeys(lines):  # a node has a line for each of its partitions
        name, weight, state = line.split()
        takes = state.rstrip("*~#!%$@^-+") in TAKES_JOBS
        wait_s, sessions = divmod(max(0, int(weight) - 1), _A_SECOND)
        found.append(Place(name, name, _known(wait_s) if takes else None, sessions))
    return found


def _known(wait_s: int) -> float:
    return math.inf if wait_s >= WAIT_MAX_S else float(wait_s)


def waits_of_metrics(urls: Mapping[str, str]) -> Callable[[], list[Place]]:
    """Return a function that asks the daemons' metrics: ``{"node-1": "http://node-1:9402/metrics"}``.

    A node's wait is that of its best GPU. A node whose metrics do not answer takes nobody.
    """

    def waits() -> list[Place]:
        with ThreadPoolExecutor(min(len(urls), ASKED_AT_ONCE) or 1) as askers:
            return [
                Place(name, name, wait_s)
                for name, wait_s in zip(urls, askers.map(_least, urls.values()), strict=True)
            ]

    return waits


def _least(url: str) -> float | None:
    try:
        with urlopen(url, timeout=WITHIN_S) as answer:
            text = answer.read().decode()
        waits_s = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{METRIC}{{", f"{METRIC} "))
        ]
    except (OSError, ValueError):
        return None
    return min(waits_s, default=math.inf if METRIC in text else None)
