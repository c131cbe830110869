"""A hostile program: ``python -I -S flooder.py SOCKET KIND PROCESSES CONNECTIONS``.

Each process opens its connections, sends messages of one kind as fast as the daemon takes them, for
ever, and discards the answers. The program prints a line when every process has begun. It uses the
standard library only, so that any user can run it. ``KIND`` is a key of ``KINDS``, or a role and a
message: ``session {"type":"ping"}``.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from itertools import count

CHUNK_LINES = 128
ERROR_PAUSE_S = 0.001


def line(kind, **fields):
    return json.dumps({"type": kind, **fields}, separators=(",", ":")).encode() + b"\n"


def hello(role):
    return line("hello", protocol=1, role=role, client="flood", name="flood.ipynb")


def same(kind, **fields):
    """Return an endless stream of the same message."""
    chunk = line(kind, **fields) * CHUNK_LINES
    return lambda: iter(lambda: chunk, None)


def bursts(end):
    """Return an endless stream of bursts that are requested and ended at once."""

    def chunks():
        numbers = count(time.monotonic_ns() // 1000)
        while True:
            burst = [next(numbers) for _ in range(CHUNK_LINES // 2)]
            yield b"".join(line("acquire", burst=n) + line(end, burst=n) for n in burst)

    return chunks


def in_turn(*kinds):
    """Return an endless stream of these messages, each after the one before."""
    chunk = b"".join(map(line, kinds)) * (CHUNK_LINES // len(kinds))
    return lambda: iter(lambda: chunk, None)


def once_then_nothing(data):
    def chunks():
        yield data
        while True:
            yield b""

    return chunks


def rooms():
    numbers = count(1)
    while True:
        yield b"".join(
            line("want-room", request=next(numbers), bytes=1 << 20) for _ in range(CHUNK_LINES)
        )


def states():
    for number in count():
        yield b"".join(
            line("pager-state", state="resident", resident_bytes=(number + n) % 4096 * 4096,
                 arena_bytes=(number + n) * 4096) for n in range(CHUNK_LINES)
        )  # fmt: skip


# name: (role, or None for no hello at all; messages after the hello)
KINDS = {
    "hello": ("observer", None),
    "acquire, end-burst": ("session", bursts("end-burst")),
    "acquire, withdraw": ("session", bursts("withdraw")),
    "release": ("session", same("release")),
    "release of nobody": ("observer", same("release", session="k0000000000")),
    "suspend, resume": ("session", in_turn("suspend", "resume")),
    "bring-back": ("session", same("bring-back")),
    "goodbye": ("session", once_then_nothing(line("goodbye"))),
    "get-status": ("observer", same("get-status")),
    "get-status, watch": ("observer", same("get-status", watch=True)),
    "set": ("observer", same("set", tq_s=10.0)),
    "get-story": ("observer", same("get-story", session="k0000000000")),
    "get-history": ("observer", same("get-history")),
    "get-metrics": ("observer", same("get-metrics")),
    "get-usage": ("observer", same("get-usage", by="notebook")),
    "ping": ("observer", same("ping")),
    "pager-state": ("pager", states),
    "pager-done": (
        "pager",
        same("pager-done", op=1, outcome="moved", bytes=1 << 40, elapsed_ns=10**15),
    ),
    "want-lease": ("pager", same("want-lease")),
    "want-room": ("pager", rooms),
    "(malformed)": (None, once_then_nothing(b"}{\n" * CHUNK_LINES)),
    "(half a line)": (None, once_then_nothing(b"x" * 65_000)),
    "(connect without a word)": (None, once_then_nothing(b"")),
    "(connect and close)": (None, None),
}  # fmt: skip


def role_and_chunks(kind):
    if kind in KINDS:
        return KINDS[kind]
    role, _, message = kind.partition(" ")
    chunk = f"{message}\n".encode() * CHUNK_LINES
    return role, lambda: iter(lambda: chunk, None)


class Connection:
    """A connection that is made again whenever the daemon ends it."""

    def __init__(self, path, role, chunks, selector):
        self.path, self.role, self.chunks, self.selector = path, role, chunks, selector
        self.open()

    def open(self):
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(self.path)
        except OSError:  # the daemon's queue of new connections is full
            self.sock.close()
            time.sleep(ERROR_PAUSE_S)
            return
        self.sock.setblocking(False)
        self.rest = hello(self.role) if self.role else b""
        self.source = self.chunks() if self.chunks is not None else None
        self.done = False
        self.selector.register(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def close(self):
        self.selector.unregister(self.sock)
        self.sock.close()

    def again(self):
        self.close()
        self.open()

    def ready(self, events):
        try:
            if events & selectors.EVENT_READ and not self.sock.recv(1 << 18):
                self.again()
                return
            if events & selectors.EVENT_WRITE:
                self.say()
        except BlockingIOError:
            pass
        except OSError:
            self.again()

    def say(self):
        if not self.rest and self.source is not None:
            self.rest = next(self.source)
        if self.rest:
            self.rest = self.rest[self.sock.send(self.rest) :]
        elif self.source is None:  # this connection only opens and closes
            self.again()
        else:
            self.selector.modify(self.sock, selectors.EVENT_READ, self)


def flood(path, kind, connections):
    role, chunks = role_and_chunks(kind)
    selector = selectors.DefaultSelector()
    crowd = [Connection(path, role, chunks, selector) for _ in range(connections)]
    yield
    while True:
        for key, events in selector.select(0.1):
            key.data.ready(events)
        for one in crowd:
            if one.sock.fileno() < 0:
                one.open()


def connect_only(path, kind):
    """Open as many connections as this process may have, without a message; or close each at
    once."""
    kept = []
    begun = False
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            time.sleep(ERROR_PAUSE_S)
        if kind == "(connect and close)":
            sock.close()
        else:
            kept.append(sock)
            if len(kept) > 4000:
                kept.pop(0).close()
        if not begun:
            begun = True
            yield


def run(path, kind, connections, told):
    raise_descriptors()
    if kind.startswith("(connect"):
        going = connect_only(path, kind)
    else:
        going = flood(path, kind, connections)
    next(going)
    os.write(told, b".")
    next(going)


def raise_descriptors():
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


def main():
    path, kind, processes, connections = sys.argv[1:]
    hear, told = os.pipe()
    children = []
    for _ in range(int(processes)):
        pid = os.fork()
        if not pid:
            try:
                run(path, kind, int(connections), told)
            finally:
                os._exit(1)
        children.append(pid)

    def leave(*_):
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    for _ in children:
        os.read(hear, 1)
    print("begun", flush=True)
    sys.stdin.read()  # until the parent is gone
    leave()


if __name__ == "__main__":
    main()
