"""Kiwi's distance from the limits: the lease, and each backend's page-out, page-in and switch."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.bench import plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import MICROSECONDS, SECONDS, Limit, speed_row, time_row
from kiwi_core.errors import GpuError, KiwiError
from kiwi_core.units import format_bytes
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Granted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import Worker
    from kiwi_core.bench.results import Row

_ROUNDS: Final = 3
_SWITCHES: Final = 4
_MOVE_S: Final = 45.0
"""For one order that moves memory: sizes are such that it takes seconds."""

_STARTS_S: Final = 12.0
"""Starting a daemon, or a pager and programs; on big machines the driver takes seconds for each."""

ANSWER: Final = encode(Granted(burst=1000, quantum_s=30.0)).decode()
"""A bare round trip carries lines as long as those of a lease."""


def measure(bench: Bench, backends: Sequence[Backend]) -> None:
    _lease(bench)
    for backend in backends:
        why_not = backend.why_not() or _why_not_here(bench, backend)
        if why_not:
            title = f"page-out, page-in and switch, {backend.name}"
            bench.leave_out(f"page_{backend.name}", title, why_not)
            continue
        paged: list[Paged] = []
        title = f"page-out and page-in, {backend.name}"
        with bench.step(f"page_{backend.name}", title, needs_s=bench.patience.paging_s + _STARTS_S):
            paged.append(_paging(bench, backend))
        if paged:
            title = f"switch between two programs, {backend.name}"
            with bench.step(
                f"switch_{backend.name}", title, needs_s=bench.patience.switch_s + _STARTS_S
            ):
                _switch(bench, backend, paged[0])


def _why_not_here(bench: Bench, backend: Backend) -> str:
    if not backend.from_driver:
        return ""
    with bench.worker("pager") as looker:
        try:
            return str(looker.ask("why_no_checkpoint"))
        except KiwiError as error:
            return str(error)


# --- lease --------------------------------------------------------------------------------------


def _daemon(bench: Bench, args: Sequence[str] = ()) -> str:
    """Starts one for the GPU that is measured, in the private directory; its socket."""
    which = ["--emulate", bench.wishes.emulate] if bench.emulated else ["--gpu", bench.gpu.uuid]
    return str(
        bench.stage.ask(
            "daemon", 70.0, arguments=[*which, *args], env=bench.env, gpu_uuid=bench.gpu.uuid
        )
    )


def _lease(bench: Bench) -> None:
    with bench.step("lease", "lease", needs_s=15.0):
        socket = _daemon(bench)
        echo_path = str(bench.directory / "echo")
        with bench.worker("echo") as echo, bench.worker("session") as session:
            echo.ask("serve", path=echo_path, answer=ANSWER)
            session.ask("connect", socket_path=socket, name="bench")
            found = session.ask("lease", echo_path=echo_path, rounds=bench.patience.rounds)
        bare = time_row(
            "round_trip", "lease", "a bare round trip over a socket", MICROSECONDS, found["bare"]
        )
        limit = Limit(bare.spread.median, "the bare round trip")
        title = "lease: from the request to the grant, nobody in the way"
        bench.add(bare, time_row("lease", "lease", title, MICROSECONDS, found["grant"], limit))
    quietly(lambda: bench.stage.ask("end_daemon"))


# --- page-out, page-in --------------------------------------------------------------------------


@dataclass(frozen=True)
class Paged:
    """What the switch can be planned with."""

    round_trip_s_per_byte: float
    context_bytes: int


def _paging(bench: Bench, backend: Backend) -> Paged:
    with bench.worker("pager") as pager:
        pager.ask("start", pager=backend.pager, uuid=bench.gpu.uuid)
        first = _probe(bench, backend, pager)
        size = plan.paged_bytes(bench.room, first.round_trip_s_per_byte, bench.patience)
        with _program(bench, backend, pager, size) as program:
            bench.listener.step(f"page-out and page-in, {backend.name}, {format_bytes(size)}")
            rounds = [_there_and_back(pager, program) for _ in range(_ROUNDS)]
            again = _there_and_back(pager, program, change=False)
    _paged_rows(bench, backend, size, rounds, again)
    took_s = sum(one["out"]["seconds"] + one["in"]["seconds"] for one in rounds)
    return Paged(took_s / sum(one["out"]["bytes"] for one in rounds), first.context_bytes)


@contextmanager
def _program(bench: Bench, backend: Backend, pager: Worker, size: int) -> Iterator[Worker]:
    """Holds ``size`` bytes. If anything goes wrong the pager ends first, which brings back what it
    has moved out: a program that is out cannot end by itself."""
    with bench.worker("bus", backend.program_env) as program:
        try:
            program.ask("open", uuid=bench.gpu.uuid)
            program.ask("hold", size_bytes=size)
            yield program
        except BaseException:
            pager.close()
            raise


def _probe(bench: Bench, backend: Backend, pager: Worker) -> Paged:
    """Once with little, to see how much can be moved in the time."""
    size = plan.first_paged_bytes(bench.room)
    with _program(bench, backend, pager, size) as program:
        moved = _there_and_back(pager, program)
    took_s = moved["out"]["seconds"] + moved["in"]["seconds"]
    in_all = moved["out"]["bytes"]
    return Paged(took_s / in_all, max(0, in_all - size))


def _there_and_back(pager: Worker, program: Worker, change: bool = True) -> dict[str, Any]:
    """Raises if a byte is lost: then the speed does not matter."""
    if change:
        program.ask("change")
    args = {"pid": program.pid, "timeout_s": _MOVE_S}
    moved = {
        "out": pager.ask("page_out", _MOVE_S + 5, **args),
        "in": pager.ask("page_in", _MOVE_S + 5, **args),
    }
    if not program.ask("intact"):
        raise GpuError("corrupt", "Memory came back with other contents. Please report this.")
    return moved


def _paged_rows(
    bench: Bench, backend: Backend, size: int, rounds: list[dict[str, Any]], again: dict[str, Any]
) -> None:
    for way in ("out", "in"):
        seconds = [one[way]["seconds"] for one in rounds]
        in_all = rounds[0][way]["bytes"] or size
        bench.add(_paged_row(bench, backend, f"page_{way}", f"page-{way}", way, in_all, seconds))
    words = "page-out of what has not changed"
    in_all = again["out"]["bytes"] or size
    seconds = [again["out"]["seconds"]]
    bench.add(_paged_row(bench, backend, "page_out_again", words, "out", in_all, seconds))


def _paged_row(
    bench: Bench, backend: Backend, name: str, words: str, way: str, size: int,
    seconds: Sequence[float],
) -> Row:  # fmt: skip
    pinned = bench.value(f"pinned_{way}")
    limit = Limit(pinned, f"of the pinned copy {way}") if pinned else None
    title = f"{words}, {backend.name}, {format_bytes(size)}"
    return speed_row(f"{name}_{backend.name}", backend.name, title, size, seconds, limit)


# --- switch -------------------------------------------------------------------------------------


def _switch(bench: Bench, backend: Backend, paged: Paged) -> None:
    planned = plan.switch(
        bench.room, paged.round_trip_s_per_byte, bench.patience, paged.context_bytes
    )
    if isinstance(planned, str):
        title = f"switch between two programs, {backend.name}"
        bench.leave_out(f"switch_{backend.name}", title, planned)
        return
    try:
        socket = _daemon(bench, backend.daemon_args)
        with (
            bench.worker("bus") as rest,
            bench.worker("session", backend.program_env) as a,
            bench.worker("session", backend.program_env) as b,
        ):
            for name, program in (("A", a), ("B", b)):
                program.ask("connect", socket_path=socket, name=f"bench {name}")
            _crowd(bench, planned, rest, a)
            b.ask("first_cell", _MOVE_S, **_cell(bench, planned))
            found = [_one_switch((a, b)[number % 2]) for number in range(_SWITCHES)]
            quietly(lambda: rest.ask("drop"))
            for program in (a, b):
                quietly(lambda one=program: one.ask("last_cell", _MOVE_S, timeout_s=30.0))  # type: ignore[misc]
        _switch_rows(bench, backend, found)
    finally:
        quietly(lambda: bench.stage.ask("end_daemon"))


def _cell(bench: Bench, planned: plan.Switch) -> dict[str, Any]:
    return {"uuid": bench.gpu.uuid, "size_bytes": planned.program_bytes, "timeout_s": 30.0}


def _crowd(bench: Bench, planned: plan.Switch, rest: Worker, a: Worker) -> None:
    """Takes the GPU memory that A and B shall not have, so that only one of them fits."""
    a.ask("first_cell", _MOVE_S, **_cell(bench, planned))
    resident = a.ask("resident_bytes", limit_s=5.0)
    rest.ask("open", uuid=bench.gpu.uuid)
    wanted = planned.space_bytes(resident, bench.room.margin_bytes) - resident
    surplus = rest.ask("free_bytes") - wanted
    if surplus > 0:
        rest.ask("occupy", size_bytes=surplus)


def _one_switch(program: Worker) -> dict[str, Any]:
    """The other one idles, and has the memory. Raises if nothing had to be moved for it."""
    done: dict[str, Any] = program.ask("cell", _MOVE_S, timeout_s=_MOVE_S - 5, change=True)
    ways = {way for way, _, _ in done["moves"]}
    if ways != {"out", "in"}:
        raise GpuError("no-switch", "The daemon did not have to move one program for the other.")
    if not done["intact"]:
        raise GpuError("corrupt", "Memory came back with other contents. Please report this.")
    return done


def _switch_rows(bench: Bench, backend: Backend, found: list[dict[str, Any]]) -> None:
    moved: dict[str, list[tuple[int, float]]] = {"out": [], "in": []}
    for one in found:
        for way, size, seconds in one["moves"]:
            moved[way].append((size, seconds))
    sizes = {way: sum(size for size, _ in moves) // len(found) for way, moves in moved.items()}
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
