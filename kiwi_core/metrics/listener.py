"""``kiwi daemon --metrics``: serves ``/metrics`` over HTTP, for machines without Jupyter.

It runs in threads beside the supervisor's loop; the daemons only answer a question now and then.
Connections may take a few threads and descriptors for a few seconds and no more: the supervisor
needs them to restart a daemon that has crashed.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kiwi_core.errors import CallerError
from kiwi_core.metrics.collector import KiwiCollector
from kiwi_core.metrics.reading import ask_daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.metrics.reading import GpuPlace, GpuReading

FRESH_S: Final = 0.5
"""Scrapes within this time share one answer: many scrapers cost a daemon no more than one."""

CONNECTIONS_MAX: Final = 16
"""Most connections at the same time; each takes a thread and a descriptor. A scrape takes
milliseconds, and a machine has a few scrapers."""

CONNECTION_S: Final = 5.0
"""A connection is closed after this time in any case: a request takes one packet, the answer at
most three seconds (``reading``)."""

SILENT_S: Final = 0.5
"""A connection that has sent nothing for this long makes way when all places are taken."""

BACKLOG: Final = 128
"""Connections that wait in the kernel, where they cost this process nothing."""


class _Places:
    """The open connections: at most ``CONNECTIONS_MAX``, and none for longer than
    ``CONNECTION_S``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}
        self._asked: set[socket.socket] = set()
        """The connections that have sent the first line of a request."""
        self.turned_away = 0

    def take(self, sock: socket.socket) -> bool:
        now_s = time.monotonic()
        with self._lock:
            if len(self._since_s) >= CONNECTIONS_MAX:
                self._end_oldest_silent(now_s)  # its place is free in a moment: for the next one
                self.turned_away += 1
                return False
            self._since_s[sock] = now_s
            return True

    def asked(self, sock: socket.socket) -> None:
        with self._lock:
            self._asked.add(sock)

    def give_back(self, sock: socket.socket) -> None:
        with self._lock:
            self._since_s.pop(sock, None)
            self._asked.discard(sock)

    def end_late(self) -> None:
        """End connections that are too old. The server calls this several times a second."""
        now_s = time.monotonic()
        with self._lock:
            for sock, since_s in self._since_s.items():
                if now_s - since_s > CONNECTION_S:
                    _end(sock)

    def _end_oldest_silent(self, now_s: float) -> None:
        silent = ((s, since) for s, since in self._since_s.items() if s not in self._asked)
        for sock, since_s in silent:
            if now_s - since_s > SILENT_S:
                _end(sock)
                return


def _end(sock: socket.socket) -> None:
    """Shut ``sock`` down; the thread that reads it sees the end, and closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, *args: Any) -> None:
        self.places = _Places()
        super().__init__(*args)

    def verify_request(self, request: Any, _address: Any) -> bool:
        return self.places.take(request)

    def shutdown_request(self, request: Any) -> None:
        self.places.give_back(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.places.end_late()

    def handle_error(self, *_: Any) -> None:
        """Log nothing: a connection that was ended in the middle is normal."""

    def server_bind(self) -> None:
        # HTTPServer's own method looks up the name of its address, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "kiwi", self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_S
    server: _Server

    def parse_request(self) -> bool:
        self.server.places.asked(self.connection)
        return super().parse_request()

    def log_message(self, *_: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""


class MetricsListener:
    """Serves the metrics of ``places`` from ``start`` until ``close``."""

    def __init__(
        self,
        host: str,
        port: int,
        places: Sequence[GpuPlace],
        ask: Callable[[Sequence[GpuPlace]], list[GpuReading]] = ask_daemons,
    ) -> None:
        """Open the port. Raise ``CallerError("no-metrics-port")`` if that is impossible."""
        self._shared = _Shared(partial(ask, places))
        registry = CollectorRegistry()
        registry.register(KiwiCollector(self._shared.read))
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = kind((host, port), _Handler)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        self._server.set_app(make_wsgi_app(registry))
        self._host = host

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/metrics"

    @property
    def for_others(self) -> bool:
        """Return whether other machines may reach the listener."""
        address = self._server.server_address[0]
        return not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving. Only for a listener that was started."""
        self._server.shutdown()
        self._server.server_close()


class _Shared:
    def __init__(self, ask: Callable[[], list[GpuReading]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._readings: list[GpuReading] = []
        self._read_at_s: float | None = None

    def read(self) -> list[GpuReading]:
        with self._lock:
            if self._read_at_s is None or time.monotonic() - self._read_at_s > FRESH_S:
                self._readings = self._ask()
                self._read_at_s = time.monotonic()
            return self._readings


def _cannot_listen(host: str, port: int, error: OSError) -> CallerError:
    remedies = {
        errno.EADDRINUSE: "Another program (another Kiwi?) listens there: name another port.",
        errno.EACCES: "Name a port from 1024 on.",
        errno.EADDRNOTAVAIL: "Name an address of this machine.",
    }
    return CallerError(
        "no-metrics-port",
        f"Cannot serve metrics at {host}:{port}: {error.strerror or error}.",
        remedies.get(error.errno or 0, "Name another address with --metrics HOST:PORT."),
    )
