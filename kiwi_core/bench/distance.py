"""Kiwi's distance from the limits: the lease, and each backend's page-out, page-in and switch."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kiwi_core.bench import plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import MICROSECONDS, SECONDS, Limit, speed_row, time_row
from kiwi_core.errors import GpuError
from kiwi_core.units import format_bytes
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Granted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import Worker
    from kiwi_core.bench.results import Row
    from kiwi_core.states import MovedBy

_ROUNDS: Final = 3
_MOVE_S: Final = 45.0
"""For one order that moves memory: sizes are such that it takes seconds."""

_CELL_S: Final = _MOVE_S - 5
"""For the GPU to be had."""

_LOOK_BYTES: Final = 8 << 20
"""Held by a program to see who would move it."""

_STARTS_S: Final = 12.0
"""Starting a daemon, or a pager and programs; on big machines the driver takes seconds for each."""

ANSWER: Final = encode(Granted(burst=1000, quantum_s=30.0)).decode()
"""A bare round trip carries lines as long as those of a lease."""


def measure(bench: Bench, backends: Sequence[Backend], why_not: Mapping[str, str]) -> None:
    """``why_not``: by the name of a backend, why it is not to be had; empty where it is."""
    daemon = Daemon(bench)
    _lease(bench, daemon)
    for backend in backends:
        if reason := why_not[backend.name]:
            bench.leave_out(f"page_{backend.name}", _all_of(backend), reason)
            continue
        paged: list[Paged] = []
        needs_s = bench.patience.paging_s + _STARTS_S
        with bench.step(f"page_{backend.name}", f"page-out and page-in, {backend.name}", needs_s):
            paged += _paging(bench, backend, daemon)
        needs_s = bench.patience.switch_s + _STARTS_S
        title = f"switch between two programs, {backend.name}"
        for found in paged:
            with bench.step(f"switch_{backend.name}", title, needs_s):
                _switch(bench, backend, daemon, found)
    daemon.end()


def _all_of(backend: Backend) -> str:
    return f"page-out, page-in and switch, {backend.name}"


class Daemon:
    """The bench's own, for the GPU that is measured, in the private directory."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._args: tuple[str, ...] | None = None
        self._socket = ""

    def socket(self, args: tuple[str, ...] = ()) -> str:
        """Of one that was started with ``args``, now or before."""
        if self._args != args:
            self.end()
            bench = self._bench
            emulate = bench.wishes.emulate
            which = ["--gpu", bench.gpu.uuid] if emulate is None else ["--emulate", emulate]
            started = {"arguments": [*which, *args], "env": bench.env, "gpu_uuid": bench.gpu.uuid}
            self._socket = bench.stage.ask("daemon", 70.0, **started)
            self._args = args
        return self._socket

    def end(self) -> None:
        if self._args is not None:
            self._args = None
            quietly(lambda: self._bench.stage.ask("end_daemon"))


# --- lease --------------------------------------------------------------------------------------


def _lease(bench: Bench, daemon: Daemon) -> None:
    with bench.step("lease", "lease", needs_s=_STARTS_S):
        socket = daemon.socket()
        echo_path = str(bench.directory / "echo")
        with bench.worker("echo") as echo, bench.worker("session") as session:
            echo.ask("serve", path=echo_path, answer=ANSWER)
            session.ask("connect", socket_path=socket, name="bench")
            found = session.ask("lease", echo_path=echo_path, rounds=bench.patience.rounds)
        title = "a bare round trip over a socket"
        bare = time_row("round_trip", "lease", title, MICROSECONDS, found["bare"])
        limit = Limit(bare.spread.median, "the bare round trip")
        title = "lease: from the request to the grant, nobody in the way"
        bench.add(bare, time_row("lease", "lease", title, MICROSECONDS, found["grant"], limit))


# --- page-out, page-in --------------------------------------------------------------------------


@dataclass(frozen=True)
class Paged:
    """What the switch can be planned with."""

    round_trip_s_per_byte: float
    context_bytes: int


def _paging(bench: Bench, backend: Backend, daemon: Daemon) -> list[Paged]:
    """Empty where it cannot be done here, which is noted."""
    if backend.from_driver:
        with bench.worker("pager") as looker:
            if why_not := looker.ask("why_no_checkpoint"):
                bench.leave_out(f"page_{backend.name}", _all_of(backend), why_not)
                return []
    with _mover(bench, backend, daemon) as mover:
        if reason := mover.why_not(backend.moved_by):
            bench.leave_out(f"page_{backend.name}", _all_of(backend), reason)
            return []
        first = _probe(bench, mover)
        size = plan.paged_bytes(bench.room, first.round_trip_s_per_byte, bench.patience)
        mover.hold(size)
        bench.listener.step(f"page-out and page-in, {backend.name}, {format_bytes(size)}")
        rounds = [mover.there_and_back() for _ in range(_ROUNDS)]
        again = mover.there_and_back(change=False)
        mover.drop()
    _paged_rows(bench, backend, size, rounds, again)
    took_s = sum(one["out"]["seconds"] + one["in"]["seconds"] for one in rounds)
    in_all = sum(_size(one, "out", size) for one in rounds)
    return [Paged(took_s / in_all, first.context_bytes)]


@contextmanager
def _mover(bench: Bench, backend: Backend, daemon: Daemon) -> Iterator[Mover]:
    if backend.pager:
        with bench.worker("pager") as pager:
            pager.ask("start", pager=backend.pager, uuid=bench.gpu.uuid)
            with _program(bench, backend, pager) as program:
                yield ByPager(pager, program)
        return
    socket = daemon.socket(backend.daemon_args)
    with bench.worker("session", backend.program_env(bench.env)) as program:
        program.ask("connect", socket_path=socket, name="bench")
        yield ByDaemon(program, bench.gpu.uuid)


class Mover(Protocol):
    """One program, and how its memory is moved out and in."""

    def why_not(self, moved_by: MovedBy | None) -> str:
        """Why it would not be moved in this way; empty where it is."""
        ...

    def hold(self, size_bytes: int) -> None:
        """It holds nothing before."""
        ...

    def drop(self) -> None: ...

    def there_and_back(self, change: bool = True) -> dict[str, Any]:
        """``bytes`` and ``seconds`` of the ways ``out`` and ``in``, after every byte was changed
        or none. Raises if a byte is lost: then the speed does not matter."""
        ...


class ByPager:
    """The pager is called directly."""

    def __init__(self, pager: Worker, program: Worker) -> None:
        self._pager = pager
        self._program = program

    def why_not(self, moved_by: MovedBy | None) -> str:  # noqa: ARG002 - the pager is the way
        return ""

    def hold(self, size_bytes: int) -> None:
        self._program.ask("hold", size_bytes=size_bytes)

    def drop(self) -> None:
        self._program.ask("drop")

    def there_and_back(self, change: bool = True) -> dict[str, Any]:
        if change:
            self._program.ask("change")
        args = {"pid": self._program.pid, "timeout_s": _MOVE_S}
        moved = {
            "out": self._pager.ask("page_out", _MOVE_S + 5, **args),
            "in": self._pager.ask("page_in", _MOVE_S + 5, **args),
        }
        _check(self._program.ask("intact"))
        return moved


class ByDaemon:
    """A daemon is asked to move it out (``release``), and has to bring it back for a cell."""

    def __init__(self, program: Worker, gpu_uuid: str) -> None:
        self._program = program
        self._gpu_uuid = gpu_uuid

    def why_not(self, moved_by: MovedBy | None) -> str:
        if moved_by is None:
            return ""
        self.hold(_LOOK_BYTES)
        said = self._program.ask("moved_by", wanted=moved_by.value, limit_s=5.0)
        self.drop()
        if said == moved_by.value:
            return ""
        return f"the daemon moves such a program by {said} here; kiwi doctor may say why"

    def hold(self, size_bytes: int) -> None:
        args = {"uuid": self._gpu_uuid, "size_bytes": size_bytes, "timeout_s": _CELL_S}
        self._program.ask("first_cell", _MOVE_S, **args)

    def drop(self) -> None:
        self._program.ask("last_cell", _MOVE_S, timeout_s=_CELL_S)

    def there_and_back(self, change: bool = True) -> dict[str, Any]:
        if change:
            self._program.ask("cell", _MOVE_S, timeout_s=_CELL_S, change=True)
        out = self._program.ask("move_out", _MOVE_S, timeout_s=_CELL_S)
        done = self._program.ask("cell", _MOVE_S, timeout_s=_CELL_S, change=False)
        _check(done["intact"])
        moves = [move for move in done["moves"] if move[0] == "in"]
        if not moves:
            raise GpuError("not-moved", "The daemon did not have to bring the memory back.")
        return {"out": out, "in": {"bytes": moves[-1][1], "seconds": moves[-1][2]}}


def _check(intact: bool) -> None:
    if not intact:
        raise GpuError("corrupt", "Memory came back with other contents. Please report this.")


@contextmanager
def _program(bench: Bench, backend: Backend, pager: Worker) -> Iterator[Worker]:
    """One that uses the GPU. If anything goes wrong the pager ends first, which brings back what
    it has moved out: a program that is out cannot end by itself."""
    with bench.worker("bus", backend.program_env(bench.env)) as program:
        try:
            program.ask("open", uuid=bench.gpu.uuid)
            yield program
        except BaseException:
            pager.close()
            raise


def _probe(bench: Bench, mover: Mover) -> Paged:
    """Once with little, to see how much can be moved in the time."""
    size = plan.first_paged_bytes(bench.room)
    mover.hold(size)
    moved = mover.there_and_back()
    mover.drop()
    took_s = moved["out"]["seconds"] + moved["in"]["seconds"]
    in_all = _size(moved, "out", size)
    return Paged(took_s / in_all, in_all - size)


def _size(moved: dict[str, Any], way: str, held_bytes: int) -> int:
    """With contexts, where NVML can tell (not in a container with process ids of its own)."""
    return max(int(moved[way]["bytes"]), held_bytes)


def _paged_rows(
    bench: Bench, backend: Backend, size: int, rounds: list[dict[str, Any]], again: dict[str, Any]
) -> None:
    for way in ("out", "in"):
        seconds = [one[way]["seconds"] for one in rounds]
        in_all = _size(rounds[0], way, size)
        bench.add(_paged_row(bench, backend, f"page_{way}", f"page-{way}", way, in_all, seconds))
    words = "page-out of what has not changed"
    in_all = _size(again, "out", size)
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


def _switch(bench: Bench, backend: Backend, daemon: Daemon, paged: Paged) -> None:
    planned = plan.switch(
        bench.room, paged.round_trip_s_per_byte, bench.patience, paged.context_bytes
    )
    if isinstance(planned, str):
        title = f"switch between two programs, {backend.name}"
        bench.leave_out(f"switch_{backend.name}", title, planned)
        return
    socket = daemon.socket(backend.daemon_args)
    with (
        bench.worker("bus") as rest,
        bench.worker("session", backend.program_env(bench.env)) as a,
        bench.worker("session", backend.program_env(bench.env)) as b,
    ):
        for name, program in (("A", a), ("B", b)):
            program.ask("connect", socket_path=socket, name=f"bench {name}")
        _crowd(bench, planned, rest, a)
        b.ask("first_cell", _MOVE_S, **_cell(bench, planned))
        found = [_one_switch((a, b)[number % 2]) for number in range(planned.runs)]
        quietly(lambda: rest.ask("drop"))
        for program in (a, b):
            quietly(lambda one=program: one.ask("last_cell", _MOVE_S, timeout_s=_CELL_S))  # type: ignore[misc]
    _switch_rows(bench, backend, planned.program_bytes, found)


def _cell(bench: Bench, planned: plan.Switch) -> dict[str, Any]:
    return {"uuid": bench.gpu.uuid, "size_bytes": planned.program_bytes, "timeout_s": _CELL_S}


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
    done: dict[str, Any] = program.ask("cell", _MOVE_S, timeout_s=_CELL_S, change=True)
    ways = {way for way, _, _ in done["moves"]}
    if ways != {"out", "in"}:
        raise GpuError("no-switch", "The daemon did not have to move one program for the other.")
    _check(done["intact"])
    return done


def _switch_rows(
    bench: Bench, backend: Backend, held_bytes: int, found: list[dict[str, Any]]
) -> None:
    moved: dict[str, list[tuple[int, float]]] = {"out": [], "in": []}
    for one in found:
        for way, size, seconds in one["moves"]:
            moved[way].append((size, seconds))
    sizes = {
        way: max(held_bytes, sum(size for size, _ in moves) // len(found))
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
