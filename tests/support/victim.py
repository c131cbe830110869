"""A well-behaved session as a program: ``python -I -S victim.py SOCKET BURSTS PAUSE_S``.

It joins, then asks for the GPU, holds it for a moment and gives it back, ``BURSTS`` times. It
prints one JSON line: the time to join, and the time of each grant, in seconds. It tries again when
the daemon refuses it, as Kiwi's own client does. It uses the standard library only, so that any
user can run it.
"""

import json
import socket
import sys
import time

HELLO = {"type": "hello", "protocol": 1, "role": "session", "client": "victim", "name": "v.ipynb"}
GIVES_UP_S = 60.0
RETRY_S = 0.05


class Line:
    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)  # blocking: waits if too many connect at once
        self.sock.settimeout(GIVES_UP_S)
        self.rest = b""

    def say(self, **fields):
        self.sock.sendall(json.dumps(fields).encode() + b"\n")

    def hear(self, kind):
        """Return the next message of this type. Raise ``OSError`` if the daemon refuses or has
        closed."""
        while True:
            while b"\n" not in self.rest:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise OSError("closed")
                self.rest += data
            one, _, self.rest = self.rest.partition(b"\n")
            message = json.loads(one)
            if message["type"] == "error":
                raise OSError(message["code"])
            if message["type"] == kind:
                return message


def join(path):
    ends_s = time.monotonic() + GIVES_UP_S
    while True:
        try:
            line = Line(path)
            line.say(**HELLO)
            line.hear("welcome")
            return line
        except OSError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(RETRY_S)


def main():
    path, bursts, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    began_s = time.monotonic()
    line = join(path)
    joined_s = time.monotonic() - began_s
    grants_s = []
    for burst in range(1, bursts + 1):
        began_s = time.monotonic()
        line.say(type="acquire", burst=burst)
        line.hear("granted")
        grants_s.append(time.monotonic() - began_s)
        line.say(type="end-burst", burst=burst)
        time.sleep(pause_s)
    print(json.dumps({"joined_s": joined_s, "grants_s": grants_s}), flush=True)


if __name__ == "__main__":
    main()
