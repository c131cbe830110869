"""A switch: two programs that do not fit together, through a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiwi_core.bench import plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.movers import CELL_S, MOVE_S, check_intact, until_pinned
from kiwi_core.bench.results import SECONDS, Limit, time_row
from kiwi_core.errors import GpuError
from kiwi_core.states import MovedBy
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.movers import Daemon
    from kiwi_core.bench.paging import Paged
    from kiwi_core.bench.process import Worker


def measure(bench: Bench, backend: Backend, daemon: Daemon, paged: Paged) -> None:
    planned = plan.switch(
        bench.room, paged.round_trip_s_per_byte, bench.patience, paged.context_bytes
    )
    if isinstance(planned, str):
        title = f"switch between two programs, {backend.name}"
        bench.leave_out(f"switch_{backend.name}", title, planned)
        return
    changed = _switches(bench, backend, daemon.socket(backend.daemon_args), planned)
    _switch_rows(bench, backend, planned.program_bytes, changed)


def _switches(
    bench: Bench, backend: Backend, socket: str, planned: plan.Switch
) -> list[dict[str, Any]]:
    """Switch between two programs that change all their memory in each turn."""
    with (
        bench.worker("bus") as rest,
        bench.worker("session", backend.program_env(bench.env)) as a,
        bench.worker("session", backend.program_env(bench.env)) as b,
    ):
        for name, program in (("A", a), ("B", b)):
            program.ask("connect", socket_path=socket, name=f"bench {name}")
        _crowd(bench, planned, rest, a)
        b.ask("first_cell", MOVE_S, **_cell(bench, planned))
        until_pinned(b, planned.program_bytes)
        changed = [one_switch((a, b)[number % 2]) for number in range(planned.runs)]
        quietly(lambda: rest.ask("drop"))
        for program in (a, b):
            quietly(lambda one=program: one.ask("last_cell", MOVE_S, timeout_s=CELL_S))  # type: ignore[misc]
    return changed


def _cell(bench: Bench, planned: plan.Switch) -> dict[str, Any]:
    return {"uuid": bench.gpu.uuid, "size_bytes": planned.program_bytes, "timeout_s": CELL_S}


def _crowd(bench: Bench, planned: plan.Switch, rest: Worker, a: Worker) -> None:
    """Take the GPU memory that A and B should not have, so that only one of them fits."""
    a.ask("first_cell", MOVE_S, **_cell(bench, planned))
    until_pinned(a, planned.program_bytes)
    resident = a.ask("resident_bytes", limit_s=5.0)
    rest.ask("open", uuid=bench.gpu.uuid)
    wanted = planned.space_bytes(resident, bench.room.margin_bytes) - resident
    surplus = rest.ask("free_bytes") - wanted
    if surplus > 0:
        rest.ask("occupy", size_bytes=surplus)


def one_switch(program: Worker) -> dict[str, Any]:
    """Run a cell while the other program idles and has the memory. Raises ``GpuError`` if nothing
    had to be moved for it."""
    done: dict[str, Any] = program.ask("cell", MOVE_S, timeout_s=CELL_S, change=True)
    ways = {way for way, _, _ in done["moves"]}
    if ways != {"out", "in"}:
        raise GpuError("no-switch", "The daemon did not have to move one program for the other.")
    check_intact(done["intact"])
    return done


def _moves(found: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return bytes and seconds of each move, by way."""
    moved: dict[str, list[tuple[int, float]]] = {"out": [], "in": []}
    for one in found:
        for way, size, seconds in one["moves"]:
            moved[way].append((size, seconds))
    return moved


def _switch_rows(
    bench: Bench, backend: Backend, held_bytes: int, found: list[dict[str, Any]]
) -> None:
    moved = _moves(found)
    least_bytes = (
        0 if backend.moved_by is MovedBy.INPROCESS else held_bytes
    )  # the library counts them
    sizes = {
        way: max(least_bytes, sum(size for size, _ in moves) // len(found))
        for way, moves in moved.items()
    }
    name, group = f"switch_{backend.name}", backend.name
    speeds = {way: bench.value(f"pinned_{way}") for way in moved}
    limit = None
    if speeds["out"] and speeds["in"]:
        copies_s = sum(sizes[way] / 1e9 / (speeds[way] or 1.0) for way in moved)
        limit = Limit(copies_s, "the pinned copies out and in, one after the other")
    title = f"switch A→B, {backend.name}, {format_bytes(sizes['in'])} each"
    total = [one["seconds"] for one in found]
    bench.add(time_row(name, group, title, SECONDS, total, limit, sizes["in"]))
    for way, moves in moved.items():
        title = "of the switch, A's way out" if way == "out" else "of the switch, B's way in"
        seconds = [one for _, one in moves]
        bench.add(time_row(f"{name}_{way}", group, title, SECONDS, seconds, size_bytes=sizes[way]))
