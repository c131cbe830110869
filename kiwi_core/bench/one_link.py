"""The daemon's end of one library's connection, without a daemon: only orders, in their order."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError, KiwiError
from kiwi_core.units import seconds_to_ns
from kiwi_core.wire.framing import FrameReader, decode_client, encode
from kiwi_core.wire.messages import PROTOCOL, Hello, Ping, Pong, Welcome
from kiwi_core.wire.pager import (
    Gate,
    PagerDo,
    PagerDone,
    PagerLimits,
    PagerState,
    Room,
    WantLease,
    WantRoom,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, DaemonMessage
    from kiwi_core.wire.pager import PagerAction

CONNECTS_WITHIN_S: Final = 10.0


class OneLink:
    """Serves the first library that connects to ``path``, and lets it own. A context manager."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._done: dict[int, PagerDone] = {}
        self._op = 0
        self._over = False
        self.state: PagerState | None = None
        """The library's last report; ``None``: it has not connected."""
        threading.Thread(target=self._serve, name="one link", daemon=True).start()

    def __enter__(self) -> OneLink:
        return self

    def __exit__(self, *_exc: object) -> None:
        for one in (self._listener, self._socket):
            if one is not None:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def order(self, action: PagerAction, within_s: float, answer_s: float = 30.0) -> PagerDone:
        """Give an order and return its outcome."""
        self._op += 1
        number = self._op
        self._send(PagerDo(op=number, action=action, within_ns=seconds_to_ns(within_s)))
        self.wait_for(lambda: number in self._done, f"to {action.value}", answer_s)
        return self._done.pop(number)

    def allow(self, arena_bytes: int) -> None:
        """Let it keep so much system RAM in reserve."""
        self._send(PagerLimits(arena_bytes=arena_bytes))

    def wait_for(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait until ``condition`` holds, which something that the library says may change."""
        ends_s = time.monotonic() + within_s
        with self._changed:
            while not condition():
                left_s = ends_s - time.monotonic()
                if self._over or left_s <= 0:
                    why = "ended its connection" if self._over else f"took over {within_s:.0f} s"
                    raise GpuError("unclear", f"Kiwi's library {why}, asked {what}.")
                self._changed.wait(left_s)

    def _serve(self) -> None:
        try:
            self._socket, _ = self._listener.accept()
            reader = FrameReader()
            while data := self._socket.recv(1 << 16):
                for line in reader.feed(data):
                    self._take(decode_client(line))
        except (OSError, KiwiError):
            pass
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _take(self, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            about = {"daemon": "kiwi prove", "gpu_uuid": "", "gpu_index": 0, "gpu_name": ""}
            self._send(Welcome(protocol=PROTOCOL, own=True, **about))  # type: ignore[arg-type]
        elif isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, WantLease):
            self._send(Gate(open=True))
        elif isinstance(message, WantRoom):
            self._send(Room(request=message.request, granted=False))
        with self._changed:
            if isinstance(message, PagerState):
                self.state = message
            elif isinstance(message, PagerDone):
                self._done[message.op] = message
            self._changed.notify_all()

    def _send(self, message: DaemonMessage) -> None:
        if self._socket is None:
            raise GpuError("unclear", "Kiwi's library has not connected.")
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise GpuError("unclear", "Kiwi's library has ended its connection.") from error
