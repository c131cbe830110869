"""One mover as the daemon sees it: its process, its socket, and the call in progress."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import msgspec

from kiwi_core import interpreter
from kiwi_core.movers.messages import HEAD_BYTES, Call, CallAnswer, body_bytes, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_decoder = msgspec.msgpack.Decoder(CallAnswer)


class Mover(asyncio.Protocol):
    """One mover. ``ended`` is called once, when the process has ended or closed its socket."""

    def __init__(self, ended: Callable[[Mover], None]) -> None:
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[CallAnswer] | None = None
        self.reaping = False
        """Whether the pool waits for its end."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def exited(self) -> bool:
        """Return whether its process is gone, and with it all its driver resources."""
        return self._process is None or self._process.poll() is not None

    async def start(self, environment: Mapping[str, str] | None) -> CallAnswer:
        """Start the process and return its first answer: why ``cuInit`` failed, if it did. Raise
        ``OSError`` if it cannot be started."""
        ours, its = socket.socketpair()
        with its:
            try:
                self._process = _process(its, environment)
            except OSError:
                ours.close()
                raise
        answer = self._expect()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        return await answer

    def ask(self, call: Call) -> asyncio.Future[CallAnswer]:
        """Send ``call`` and return a future of its answer, which is an ``OSError`` if the mover
        ends meanwhile. Raise ``OSError`` if it has ended.
        """
        answer = self._expect()
        assert self._transport is not None
        self._transport.write(frame(call))
        return answer

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    def _expect(self) -> asyncio.Future[CallAnswer]:
        if self._transport is not None and self._transport.is_closing():
            raise BrokenPipeError(f"mover {self.pid} has ended")
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    # --- the socket (called by the loop) --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        size = body_bytes(bytes(self._buffer[:HEAD_BYTES])) + HEAD_BYTES
        if len(self._buffer) < max(size, HEAD_BYTES + 1):
            return
        answer = _decoder.decode(bytes(self._buffer[HEAD_BYTES:size]))
        self._buffer.clear()  # the mover sends nothing without a request
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or BrokenPipeError(f"mover {self.pid} has ended"))
            self._answer.exception()  # marks it as retrieved, since no caller may wait for it
        self._ended(self)


def _process(its: socket.socket, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """Start the process outside Kiwi's control of programs, and out of reach of the terminal's
    signals.
    """
    env = {**os.environ, **(environment or {}), "KIWI_DISABLE": "1"}
    for name in ("KIWI_RUN_SESSION", "LD_PRELOAD"):
        env.pop(name, None)
    return subprocess.Popen(
        interpreter.module("kiwi_core.movers", str(os.getpid())),
        stdin=its.fileno(), stdout=subprocess.DEVNULL, env=env, cwd=interpreter.DIRECTORY,
        start_new_session=True,
    )  # fmt: skip


def value_of(answer: CallAnswer) -> Any:
    """Return what the call returned, or raise ``GpuError``, whatever it raised."""
    if answer.failure is None:
        return answer.value
    raise answer.failure.error()
