"""``python -m kiwi_core.movers PARENT``: a mover. Only a daemon starts it.

Its standard input is one end of a socket pair. It ends with the daemon: the system kills it, even
in the middle of a call, and an idle mover sees the end of its input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import BinaryIO, Final

import msgspec

from kiwi_core.errors import GpuError
from kiwi_core.movers.calls import CALLS
from kiwi_core.movers.messages import HEAD_BYTES, Call, CallAnswer, Failure, body_bytes, frame

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    die_with(int(sys.argv[1]))
    with socket.socket(fileno=0) as daemon, daemon.makefile("rb") as calls:
        _say(daemon, _began())
        while (call := _next(calls)) is not None:
            _say(daemon, _done(call))
    return 0


def die_with(parent: int) -> None:
    """Have the system kill this process when ``parent`` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the signal was set
        sys.exit(0)


def _began() -> CallAnswer:
    """Initialise the driver before the first call, since ``cuInit`` takes seconds on big machines.
    If it fails, each call tries again and reports why."""
    return _done(Call("init", []))


def _next(calls: BinaryIO) -> Call | None:
    """Return the next call; ``None`` if the daemon has ended."""
    try:
        head = calls.read(HEAD_BYTES)
        size = body_bytes(head)
        body = calls.read(size)
    except OSError:
        return None
    whole = len(head) == HEAD_BYTES and len(body) == size
    return msgspec.msgpack.decode(body, type=Call) if whole else None


def _say(daemon: socket.socket, answer: CallAnswer) -> None:
    try:
        daemon.sendall(frame(answer))
    except OSError:
        sys.exit(0)


def _done(call: Call) -> CallAnswer:
    try:
        return CallAnswer(CALLS[call.name](*call.args))
    except GpuError as error:
        return CallAnswer(failure=Failure.of(error))
    except Exception as error:  # noqa: BLE001 - no error of a call ends the daemon
        words = f"The call {call.name} failed: {type(error).__name__}: {error}."
        return CallAnswer(failure=Failure("fault", words, "Report it: this is a fault of Kiwi's."))


if __name__ == "__main__":
    sys.exit(main())
