"""Kiwi's distance from the limits: the lease, and each backend's page-out, page-in and switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.bench import paging, switching
from kiwi_core.bench.movers import Daemon
from kiwi_core.bench.results import MICROSECONDS, Limit, time_row
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Granted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiwi_core.bench.backends import Backend
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.paging import Paged

_STARTS_S: Final = 12.0
"""Time to start a daemon, or a pager and programs; on big machines the driver takes seconds for
each."""

ANSWER: Final = encode(Granted(burst=1000, quantum_s=30.0)).decode()
"""The answer of a bare round trip, as long as that of a lease."""


def measure(bench: Bench, backends: Sequence[Backend], why_not: Mapping[str, str]) -> None:
    """Measure Kiwi. ``why_not`` says by backend name why it is missing; empty if it is there."""
    daemon = Daemon(bench)
    _lease(bench, daemon)
    for backend in backends:
        if reason := why_not[backend.name]:
            bench.leave_out(f"page_{backend.name}", paging.all_of(backend), reason)
            continue
        paged: list[Paged] = []
        needs_s = bench.patience.paging_s + _STARTS_S
        with bench.step(f"page_{backend.name}", f"page-out and page-in, {backend.name}", needs_s):
            paged += paging.measure(bench, backend, daemon)
        needs_s = bench.patience.switch_s + _STARTS_S
        title = f"switch between two programs, {backend.name}"
        for found in paged:
            with bench.step(f"switch_{backend.name}", title, needs_s):
                switching.measure(bench, backend, daemon, found)
    daemon.end()


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
