"""Many sessions, each a process with a plain socket: the load of bench_daemon_load.py.

    python -S benchmarks/sessions.py SOCKET SESSIONS CYCLES_PER_S SECONDS HOLD_MS

The program uses the standard library only, so that a thousand processes are light. It prints a JSON
line when all sessions have joined, and another one with the results at the end.
"""

import json
import mmap
import os
import random
import socket
import struct
import sys
import time

CYCLES_MAX = 256
SLOT = struct.Struct(f"<III{CYCLES_MAX}d")
"""Record of a session: cycles done, cycles begun, failed or not, and the time of each grant (s)."""


class Session:
    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._path = path
        self._buffer = b""

    def say(self, text: bytes) -> None:
        self._sock.sendall(text + b"\n")

    def hear(self, what: bytes) -> None:
        """Read until a message of this type has come."""
        wanted = b'{"type":"%s"' % what
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                data = self._sock.recv(65536)
                if not data:
                    raise ConnectionError("the daemon is gone")
                self._buffer += data
                continue
            self._buffer = rest
            if line.startswith(b'{"type":"error"'):
                raise ConnectionError(line.decode())
            if line.startswith(wanted):
                return

    def join(self, number: int) -> None:
        self._sock.connect(self._path)
        self.say(
            b'{"type":"hello","protocol":1,"role":"session","client":"bench","name":"load %d"}'
            % number
        )
        self.hear(b"welcome")


def live(number: int, path: str, go: int, shared: mmap.mmap, plan: dict[str, float]) -> None:
    session = Session(path)
    session.join(number)
    shared[number * SLOT.size + 8] = 1  # joined
    os.read(go, 1)  # returns when the parent closes its end
    random.seed(number)
    period_s = plan["sessions"] / plan["rate"]
    began_s = time.monotonic()
    due_s = began_s + random.random() * period_s
    took: list[float] = []
    begun = 0
    while due_s < began_s + plan["seconds"] and begun < CYCLES_MAX:
        time.sleep(max(0.0, due_s - time.monotonic()))
        begun += 1
        asked_s = time.perf_counter()
        session.say(b'{"type":"acquire","burst":%d}' % begun)
        session.hear(b"granted")
        took.append(time.perf_counter() - asked_s)
        if plan["hold_ms"]:
            time.sleep(plan["hold_ms"] / 1e3)
        session.say(b'{"type":"end-burst","burst":%d}' % begun)
        due_s = max(due_s + period_s, time.monotonic())
    padded = took + [0.0] * (CYCLES_MAX - len(took))
    shared[number * SLOT.size : (number + 1) * SLOT.size] = SLOT.pack(len(took), begun, 1, *padded)
    session.say(b'{"type":"ping"}')
    session.hear(b"pong")


def main() -> int:
    path, *numbers = sys.argv[1:]
    names = ("sessions", "rate", "seconds", "hold_ms")
    plan = dict(zip(names, map(float, numbers), strict=True))
    count = int(plan["sessions"])
    shared = mmap.mmap(-1, SLOT.size * count)
    go_read, go_write = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            os.close(go_write)
            try:
                live(number, path, go_read, shared, plan)
            except BaseException as error:  # noqa: BLE001 - a child must not come back from here
                os.write(2, f"session {number}: {error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends_s = time.monotonic() + 120
    while time.monotonic() < ends_s:
        joined = sum(shared[n * SLOT.size + 8] for n in range(count))
        if joined == count:
            break
        time.sleep(0.1)
    print(json.dumps({"joined": joined}), flush=True)
    sys.stdin.readline()  # waits for the line to go
    os.close(go_write)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    slots = [SLOT.unpack_from(shared, n * SLOT.size) for n in range(count)]
    took = [value for slot in slots for value in slot[3 : 3 + slot[0]]]
    print(json.dumps({"failed": failed, "grants_s": took}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
