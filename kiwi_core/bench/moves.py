"""One backend's moves, made by the bench's daemon: page-out, page-in, and the switch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from kiwi_core.bench import plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import SECONDS, Limit, speed_row, time_row
from kiwi_core.errors import GpuError
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import BenchWorker

MOVE_S: Final = 45.0
"""Time limit of one order that moves memory; by the planned sizes it takes seconds."""

CELL_S: Final = MOVE_S - 5
"""Time limit of a wait for the GPU."""

_LOOK_BYTES: Final = 8 << 20
"""What a program holds to find out who would move it."""

_ROUNDS: Final = 3


@dataclass(frozen=True)
class Paged:
    """The results by which the switch is planned."""

    round_trip_s_per_byte: float
    context_bytes: int


def leave_out(bench: Bench, backend: Backend, reason: str) -> None:
    title = f"page-out, page-in and switch, {backend.name}"
    bench.leave_out(f"page_{backend.name}", title, reason)


# --- page-out and page-in -----------------------------------------------------------------------


def page(bench: Bench, backend: Backend, socket: str) -> Paged | None:
    """Measure a program that holds as much as the time allows. If the daemon would move it in
    another way, note that and return ``None``."""
    with bench.worker("session", backend.program_env(bench.env)) as program:
        program.ask("connect", socket_path=socket, name="bench")
        if reason := _why_not(bench, program, backend):
            leave_out(bench, backend, reason)
            return None
        first_bytes = plan.first_paged_bytes(bench.room)
        hold(bench, program, first_bytes)
        first = there_and_back(program)
        _drop(program)
        size = plan.paged_bytes(bench.room, _s_per_byte([first], first_bytes), bench.patience)
        bench.say(f"page-out and page-in, {backend.name}, {format_bytes(size)}")
        pinned_bytes = hold(bench, program, size)
        rounds = [there_and_back(program) for _ in range(_ROUNDS)]
        _drop(program)
    for way in ("out", "in"):
        _add_paged(bench, backend, way, size, pinned_bytes, rounds)
    return Paged(_s_per_byte(rounds, size), _size(first, "out", first_bytes) - first_bytes)


def _why_not(bench: Bench, program: BenchWorker, backend: Backend) -> str:
    """Return why the daemon would not move ``program`` with ``backend``; empty if it would."""
    hold(bench, program, _LOOK_BYTES)
    said = program.ask("moved_by", wanted=backend.moved_by.value, limit_s=5.0)
    _drop(program)
    if said == backend.moved_by.value:
        return ""
    return f"the daemon moves such a program by {said} here; kiwi doctor may say why"


def hold(bench: Bench, program: BenchWorker, size_bytes: int) -> int | None:
    """Let ``program``, which holds nothing, take ``size_bytes`` in a cell, and wait for pinned
    memory. Return how many bytes will go to pinned memory; ``None`` if the driver chooses."""
    limit_s = plan.pinning_s(size_bytes)
    args = {"size_bytes": size_bytes, "timeout_s": CELL_S, "pinning_s": limit_s}
    pinned: int | None = program.ask("first_cell", MOVE_S + limit_s, uuid=bench.gpu.uuid, **args)
    return pinned


def _drop(program: BenchWorker) -> None:
    program.ask("last_cell", MOVE_S, timeout_s=CELL_S)


def there_and_back(program: BenchWorker) -> dict[str, Any]:
    """Change every byte and move all out and in. Return ``bytes`` and ``seconds`` of ``out`` and
    ``in``. Raises ``GpuError`` if a byte is lost: then the speed does not matter."""
    program.ask("cell", MOVE_S, timeout_s=CELL_S, change=True)
    out = program.ask("move_out", MOVE_S, timeout_s=CELL_S)
    done = program.ask("cell", MOVE_S, timeout_s=CELL_S, change=False)
    _check_intact(done)
    back = [move for move in done["moves"] if move[0] == "in"]
    if not back:
        raise GpuError("not-moved", "The daemon did not have to bring the memory back.")
    return {"out": out, "in": {"bytes": back[-1][1], "seconds": back[-1][2]}}


def _check_intact(done: dict[str, Any]) -> None:
    if not done["intact"]:
        raise GpuError("corrupt", "Memory came back with other contents. Please report this.")


def _size(moved: dict[str, Any], way: str, held_bytes: int) -> int:
    """Return the bytes moved, with contexts if NVML can tell (in a PID namespace it cannot)."""
    return max(int(moved[way]["bytes"]), held_bytes)


def _s_per_byte(rounds: list[dict[str, Any]], held_bytes: int) -> float:
    """Return the time of a round trip by the bytes that go out in it."""
    took_s = sum(one["out"]["seconds"] + one["in"]["seconds"] for one in rounds)
    return float(took_s / sum(_size(one, "out", held_bytes) for one in rounds))


def pinned_note(size_bytes: int, pinned_bytes: int | None) -> str:
    """Return words to follow a size; empty if all of it is pinned."""
    if pinned_bytes is None or pinned_bytes >= size_bytes:
        return ""
    return f" (only {format_bytes(pinned_bytes)} of it through pinned memory)"


def _add_paged(
    bench: Bench, backend: Backend, way: str, held_bytes: int, pinned_bytes: int | None,
    rounds: list[dict[str, Any]],
) -> None:  # fmt: skip
    size = _size(rounds[0], way, held_bytes)
    more = pinned_note(held_bytes, pinned_bytes)
    title = f"page-{way}, {backend.name}, {format_bytes(size)}{more}"
    seconds = [one[way]["seconds"] for one in rounds]
    limit = bench.pinned_limit(way)
    row = speed_row(f"page_{way}_{backend.name}", backend.name, title, size, seconds, limit)
    bench.add(structs.replace(row, pinned_bytes=pinned_bytes))


# --- the switch ---------------------------------------------------------------------------------


def switch(bench: Bench, backend: Backend, socket: str, paged: Paged) -> None:
    """Measure switches between two programs that do not fit together."""
    planned = plan.switch(
        bench.room, paged.round_trip_s_per_byte, bench.patience, paged.context_bytes
    )
    if isinstance(planned, str):
        title = f"switch between two programs, {backend.name}"
        bench.leave_out(f"switch_{backend.name}", title, planned)
        return
    _add_switches(bench, backend, planned, _switches(bench, backend, socket, planned))


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
        hold(bench, a, planned.program_bytes)
        _crowd(bench, planned, rest, a)
        hold(bench, b, planned.program_bytes)
        changed = [one_switch((a, b)[number % 2]) for number in range(planned.runs)]
        quietly(lambda: rest.ask("drop"))
        quietly(lambda: _drop(a))
        quietly(lambda: _drop(b))
    return changed


def _crowd(bench: Bench, planned: plan.Switch, rest: BenchWorker, a: BenchWorker) -> None:
    """Take the GPU memory that A and B should not have, so that only one of them fits."""
    resident = a.ask("resident_bytes", limit_s=5.0)
    rest.ask("open", uuid=bench.gpu.uuid)
    wanted = planned.space_bytes(resident, bench.room.margin_bytes) - resident
    surplus = rest.ask("free_bytes") - wanted
    if surplus > 0:
        rest.ask("occupy", size_bytes=surplus)


def one_switch(program: BenchWorker) -> dict[str, Any]:
    """Run a cell while the other program idles and has the memory. Raises ``GpuError`` if nothing
    had to be moved for it."""
    done: dict[str, Any] = program.ask("cell", MOVE_S, timeout_s=CELL_S, change=True)
    if {way for way, _, _ in done["moves"]} != {"out", "in"}:
        raise GpuError("no-switch", "The daemon did not have to move one program for the other.")
    _check_intact(done)
    return done


def _add_switches(
    bench: Bench, backend: Backend, planned: plan.Switch, found: list[dict[str, Any]]
) -> None:
    # The driver's moves are no smaller than what a program holds; the library counts its own.
    least_bytes = planned.program_bytes if backend.from_driver else 0
    name, group = f"switch_{backend.name}", backend.name
    sizes: dict[str, int] = {}
    parts = []
    for way, title in (("out", "of the switch, A's way out"), ("in", "of the switch, B's way in")):
        moves = [move for one in found for move in one["moves"] if move[0] == way]
        sizes[way] = max(least_bytes, sum(size for _, size, _ in moves) // len(found))
        seconds = [one_s for _, _, one_s in moves]
        parts.append(
            time_row(f"{name}_{way}", group, title, SECONDS, seconds, size_bytes=sizes[way])
        )
    pinned = {way: bench.pinned_limit(way) for way in sizes}
    limit = None
    if all(pinned.values()):
        copies_s = sum(sizes[way] / 1e9 / of.value for way, of in pinned.items() if of)
        limit = Limit(copies_s, "the pinned copies out and in, one after the other")
    title = f"switch A→B, {backend.name}, {format_bytes(sizes['in'])} each"
    total = [one["seconds"] for one in found]
    bench.add(time_row(name, group, title, SECONDS, total, limit, sizes["in"]), *parts)
