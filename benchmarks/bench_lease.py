"""Request to grant without contention, against a bare round trip over the same kind of socket.

The daemon is a real one on an emulated GPU, with the client that kernels use: the time of
``acquire``. The yardstick: the same process sends a line of the same length over a Unix stream
socket to another process, which only uses blocking ``recv`` and ``send``, and reads its answer.
Both are measured in turns, back to back and after a pause (as after a person's cell).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, in_turns, machine, report, samples_table, target

from kiwi_core.client import Client
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Acquire, Granted
from tests.support.daemon import running_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 3.0
SAME_TRANSPORT_LIMIT = 3.5
"""Limit of a grant in round trips to a server that only echoes, on the loop that the daemon has."""

ASKED = encode(Acquire(burst=1000))
ANSWERED = encode(Granted(burst=1000, quantum_s=30.0))


def serve_blocking(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(4096):
        connection.sendall(ANSWERED)


def serve_asyncio(server: socket.socket) -> None:
    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport

        def data_received(self, _data: bytes) -> None:
            self.transport.write(ANSWERED)

        def connection_lost(self, _exc: Exception | None) -> None:
            asyncio.get_running_loop().stop()

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(Echo, sock=server)

    loop = asyncio.new_event_loop()
    loop.create_task(serve())  # noqa: RUF006 - the loop lives as long as it
    loop.run_forever()


@contextmanager
def echo(serve: Callable[[socket.socket], None]) -> Iterator[Callable[[], None]]:
    """Run a process that answers, and yield a blocking round trip to it."""
    with tempfile.TemporaryDirectory(prefix="kw-") as directory:
        path = str(Path(directory) / "echo")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(1)
        child = os.fork()
        if not child:
            try:
                serve(server)
            finally:
                os._exit(0)
        server.close()
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)

        def round_trip() -> None:
            client.sendall(ASKED)
            client.recv(4096)

        try:
            yield round_trip
        finally:
            client.close()
            os.waitpid(child, 0)


class Lease:
    """Cycles of ``acquire`` (measured) and ``end_burst`` (before the next one is measured)."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def acquire(self) -> None:
        self._client.acquire()

    def end(self) -> None:
        self._client.end_burst()


def measure(
    lease: Lease, bare: Callable[[], None], loop: Callable[[], None], rounds: int, pause_s: float
) -> dict[str, Samples]:
    """Measure ``acquire``. ``end`` follows at once and is not measured, as when a short cell ends;
    then comes the pause."""
    samples: dict[str, Samples] = {}
    acquired = Samples()

    def cycle() -> None:
        began_ns = time.perf_counter_ns()
        lease.acquire()
        acquired.add(time.perf_counter_ns() - began_ns)
        lease.end()

    subjects = {"bare round trip": bare, "cycle": cycle, "asyncio round trip": loop}
    samples = in_turns(subjects, rounds, warm_up=50, pause_s=pause_s)
    acquired.values_ns = acquired.values_ns[-rounds:]
    return {
        "bare round trip": samples["bare round trip"],
        "bare asyncio server": samples["asyncio round trip"],
        "request to grant": acquired,
        "request to grant, and end": samples["cycle"],
    }


def main() -> int:
    args = arguments(__doc__)
    rounds = 100 if args.quick else 2000
    where = machine("emulated")
    results: dict[str, Any] = {"machine": where}
    targets = []
    # The echoing processes are forked first, while this process has no threads.
    with ExitStack() as stack:
        bare = stack.enter_context(echo(serve_blocking))
        loop = stack.enter_context(echo(serve_asyncio))
        daemon = stack.enter_context(running_daemon())
        path = daemon.sockets()[0]
        client = stack.enter_context(Client(path, name="bench", cuda_library=lambda: ""))
        client.connect()
        for title, pause_s, count in (
            ("back to back", 0.0, rounds),
            ("after 10 ms of rest", 0.01, rounds // 4),
        ):
            samples = measure(Lease(client), bare, loop, count, pause_s)
            ratio = samples["request to grant"].median_ns / samples["bare round trip"].median_ns
            print(title)
            samples_table(samples)
            results[title] = {k: s.summary() for k, s in samples.items()} | {"ratio": ratio}
            targets.append(target(f"request to grant / bare, {title}", ratio, LIMIT))
            same = samples["request to grant"].median_ns / samples["bare asyncio server"].median_ns
            what = f"request to grant / bare asyncio server, {title}"
            targets.append(target(what, same, SAME_TRANSPORT_LIMIT))
    results["targets"] = targets
    report("lease", results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
