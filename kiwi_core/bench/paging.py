"""Page-out and page-in of a program that holds as much as the time allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from kiwi_core.bench import plan
from kiwi_core.bench.movers import mover_of
from kiwi_core.bench.results import Limit, speed_row
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.movers import Daemon, Mover
    from kiwi_core.bench.results import Row

_ROUNDS: Final = 3


@dataclass(frozen=True)
class Paged:
    """The results by which the switch is planned."""

    round_trip_s_per_byte: float
    context_bytes: int


@dataclass(frozen=True)
class Held:
    """What a program holds; ``pinned_bytes`` as ``Row`` has it."""

    size_bytes: int
    pinned_bytes: int | None


def words_on_pinned(size_bytes: int, pinned_bytes: int | None) -> str:
    """Return words to follow a size; empty if all of it is pinned."""
    if pinned_bytes is None or pinned_bytes >= size_bytes:
        return ""
    return f" (only {format_bytes(pinned_bytes)} of it through pinned memory)"


def all_of(backend: Backend) -> str:
    return f"page-out, page-in and switch, {backend.name}"


def measure(bench: Bench, backend: Backend, daemon: Daemon) -> list[Paged]:
    """Measure paging with ``backend``. If that cannot be done here, note it and return []."""
    if backend.from_driver:
        with bench.worker("pager") as looker:
            if why_not := looker.ask("why_no_checkpoint"):
                bench.leave_out(f"page_{backend.name}", all_of(backend), why_not)
                return []
    with mover_of(bench, backend, daemon) as mover:
        if reason := mover.why_not(backend.moved_by):
            bench.leave_out(f"page_{backend.name}", all_of(backend), reason)
            return []
        first = _probe(bench, mover)
        size = plan.paged_bytes(bench.room, first.round_trip_s_per_byte, bench.patience)
        bench.listener.step(f"page-out and page-in, {backend.name}, {format_bytes(size)}")
        held = Held(size, mover.hold(size))
        rounds = [mover.there_and_back() for _ in range(_ROUNDS)]
        mover.drop()
    _paged_rows(bench, backend, held, rounds)
    took_s = sum(one["out"]["seconds"] + one["in"]["seconds"] for one in rounds)
    in_all = sum(_size(one, "out", size) for one in rounds)
    return [Paged(took_s / in_all, first.context_bytes)]


def _probe(bench: Bench, mover: Mover) -> Paged:
    """Move a little once, to see how much can be moved in the time."""
    size = plan.first_paged_bytes(bench.room)
    mover.hold(size)
    moved = mover.there_and_back()
    mover.drop()
    took_s = moved["out"]["seconds"] + moved["in"]["seconds"]
    in_all = _size(moved, "out", size)
    return Paged(took_s / in_all, in_all - size)


def _size(moved: dict[str, Any], way: str, held_bytes: int) -> int:
    """Return the bytes moved, with contexts if NVML can tell (in a PID namespace it cannot)."""
    return max(int(moved[way]["bytes"]), held_bytes)


def _paged_rows(bench: Bench, backend: Backend, held: Held, rounds: list[dict[str, Any]]) -> None:
    for way in ("out", "in"):
        seconds = [one[way]["seconds"] for one in rounds]
        in_all = _size(rounds[0], way, held.size_bytes)
        bench.add(_row(bench, backend, f"page_{way}", f"page-{way}", way, held, in_all, seconds))


def _row(
    bench: Bench, backend: Backend, name: str, words: str, way: str, held: Held, size: int,
    seconds: Sequence[float],
) -> Row:  # fmt: skip
    pinned = bench.value(f"pinned_{way}")
    limit = Limit(pinned, f"of the pinned copy {way}") if pinned else None
    more = words_on_pinned(held.size_bytes, held.pinned_bytes)
    title = f"{words}, {backend.name}, {format_bytes(size)}{more}"
    row = speed_row(f"{name}_{backend.name}", backend.name, title, size, seconds, limit)
    return structs.replace(row, pinned_bytes=held.pinned_bytes)
