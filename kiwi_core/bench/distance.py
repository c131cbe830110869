"""Kiwi's distance from the limits: the lease, and each backend's page-out, page-in and switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.bench import moves
from kiwi_core.bench.conductor import quietly
from kiwi_core.bench.results import MICROSECONDS, Limit, time_row
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Granted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench

_STARTS_S: Final = 12.0
"""Time to start a daemon and programs; on big machines the driver takes seconds for each."""

ANSWER: Final = encode(Granted(burst=1000, quantum_s=30.0)).decode()
"""The answer of a bare round trip, as long as that of a lease."""


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
            emulate = bench.options.emulate
            which = ["--gpu", bench.gpu.uuid] if emulate is None else ["--emulate", emulate]
            started = {"arguments": [*which, *args], "env": bench.env, "gpu_uuid": bench.gpu.uuid}
            self._socket = bench.stage.ask("daemon", 70.0, **started)
            self._args = args
        return self._socket

    def end(self) -> None:
        if self._args is not None:
            self._args = None
            quietly(lambda: self._bench.stage.ask("end_daemon"))


def measure(bench: Bench, backends: Sequence[Backend], why_not: Mapping[str, str]) -> None:
    """Measure Kiwi. ``why_not`` says by backend name why it is missing; empty if it is there."""
    daemon = Daemon(bench)
    _lease(bench, daemon)
    for backend in backends:
        name = backend.name
        if reason := why_not[name] or _why_no_checkpoint(bench, backend):
            moves.leave_out(bench, backend, reason)
            continue
        paged: moves.Paged | None = None
        needs_s = bench.patience.paging_s + _STARTS_S
        with bench.step(f"page_{name}", f"page-out and page-in, {name}", needs_s):
            paged = moves.page(bench, backend, daemon.socket(backend.daemon_args))
        if paged is None:
            continue
        needs_s = bench.patience.switch_s + _STARTS_S
        with bench.step(f"switch_{name}", f"switch between two programs, {name}", needs_s):
            moves.switch(bench, backend, daemon.socket(backend.daemon_args), paged)
    daemon.end()


def _why_no_checkpoint(bench: Bench, backend: Backend) -> str:
    if not backend.from_driver:
        return ""
    with bench.worker("look") as looker:
        return str(looker.ask("why_no_checkpoint"))


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
