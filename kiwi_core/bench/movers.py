"""Move one program's memory out and in: directly by a pager, or through a daemon."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from kiwi_core.bench import plan
from kiwi_core.bench.conductor import quietly
from kiwi_core.errors import GpuError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.process import Worker
    from kiwi_core.states import MovedBy

MOVE_S: Final = 45.0
"""Time limit of one order that moves memory; by the planned sizes it takes seconds."""

CELL_S: Final = MOVE_S - 5
"""Time limit of a wait for the GPU."""

_LOOK_BYTES: Final = 8 << 20
"""What a program holds to find out who would move it."""


class Daemon:
    """The bench's own daemon in its private directory, for the GPU that is measured."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._args: tuple[str, ...] | None = None
        self._socket = ""

    def socket(self, args: tuple[str, ...] = ()) -> str:
        """Return the socket of a daemon with ``args``; start it if it does not run."""
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


@contextmanager
def mover_of(bench: Bench, backend: Backend, daemon: Daemon) -> Iterator[Mover]:
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


@contextmanager
def _program(bench: Bench, backend: Backend, pager: Worker) -> Iterator[Worker]:
    """Start a program that uses the GPU. After an error the pager ends first and brings back what
    it has moved out: a program that is out cannot end by itself."""
    with bench.worker("bus", backend.program_env(bench.env)) as program:
        try:
            program.ask("open", uuid=bench.gpu.uuid)
            yield program
        except BaseException:
            pager.close()
            raise


class Mover(Protocol):
    """One program, and the way to move its memory out and in."""

    def why_not(self, moved_by: MovedBy | None) -> str:
        """Return why the program would not be moved in this way; empty if it is."""
        ...

    def hold(self, size_bytes: int) -> int | None:
        """Take ``size_bytes`` (the program holds nothing before) and wait for pinned memory. Return
        how many of them will go to pinned memory; ``None`` if the driver chooses."""
        ...

    def drop(self) -> None: ...

    def there_and_back(self) -> dict[str, Any]:
        """Change every byte and move all out and in. Return ``bytes`` and ``seconds`` of ``out``
        and ``in``. Raises ``GpuError`` if a byte is lost: then the speed does not matter."""
        ...


class ByPager:
    """Calls the pager directly."""

    def __init__(self, pager: Worker, program: Worker) -> None:
        self._pager = pager
        self._program = program

    def why_not(self, moved_by: MovedBy | None) -> str:  # noqa: ARG002 - the pager is the way
        return ""

    def hold(self, size_bytes: int) -> int | None:
        self._program.ask("hold", size_bytes=size_bytes)
        return until_pinned(self._program, size_bytes)

    def drop(self) -> None:
        self._program.ask("drop")

    def there_and_back(self) -> dict[str, Any]:
        self._program.ask("change")
        args = {"pid": self._program.pid, "timeout_s": MOVE_S}
        moved = {
            "out": self._pager.ask("page_out", MOVE_S + 5, **args),
            "in": self._pager.ask("page_in", MOVE_S + 5, **args),
        }
        check_intact(self._program.ask("intact"))
        return moved


class ByDaemon:
    """Asks a daemon to move it out (``release``); for a cell the daemon must bring it back."""

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

    def hold(self, size_bytes: int) -> int | None:
        args = {"uuid": self._gpu_uuid, "size_bytes": size_bytes, "timeout_s": CELL_S}
        self._program.ask("first_cell", MOVE_S, **args)
        return until_pinned(self._program, size_bytes)

    def drop(self) -> None:
        self._program.ask("last_cell", MOVE_S, timeout_s=CELL_S)

    def there_and_back(self) -> dict[str, Any]:
        self._program.ask("cell", MOVE_S, timeout_s=CELL_S, change=True)
        out = self._program.ask("move_out", MOVE_S, timeout_s=CELL_S)
        done = self._program.ask("cell", MOVE_S, timeout_s=CELL_S, change=False)
        check_intact(done["intact"])
        moves = [move for move in done["moves"] if move[0] == "in"]
        if not moves:
            raise GpuError("not-moved", "The daemon did not have to bring the memory back.")
        return {"out": out, "in": {"bytes": moves[-1][1], "seconds": moves[-1][2]}}


def until_pinned(program: Worker, size_bytes: int) -> int | None:
    """Wait, within limits, until the library in ``program`` has pinned memory for what is held."""
    limit_s = plan.pinning_s(size_bytes)
    pinned_bytes: int | None = program.ask("until_pinned", limit_s + 10, limit_s=limit_s)
    return pinned_bytes


def check_intact(intact: bool) -> None:
    if not intact:
        raise GpuError("corrupt", "Memory came back with other contents. Please report this.")
