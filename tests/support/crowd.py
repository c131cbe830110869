"""Processes of one user that take all connections they can get, run as a program:

``python -I -S crowd.py SOCKET ROLE COUNT [JSON…]``

``COUNT`` processes send a hello with ``ROLE``, a few at a time, then each JSON line. The program
prints a JSON line with the number of welcomes and of each error, and keeps all connections until
its input ends. ``ROLE`` "many": one process with ``COUNT`` observers. ``ROLE`` "silent": the same
without a hello. It uses the standard library only.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

CHUNK = 1 << 16
ANSWER_S = 30.0
AT_ONCE = 16
"""Processes that wait for their answers at the same time. On a busy machine each waits for a
processor several times: a thousand of them, one after the other, took more than two minutes."""
NAME = "\N{SNOWMAN}" * 200  # the longest


def connect(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)  # blocking: waits if too many connect at once
    sock.settimeout(ANSWER_S)
    return sock


def hello(path, role, more):
    """Return the socket, and "welcome" or the code of the error."""
    sock = connect(path)
    lines = [{"type": "hello", "protocol": 1, "role": role, "client": "crowd", "name": NAME}]
    with suppress(OSError):  # refused: the error is there to be read
        sock.sendall(b"".join(json.dumps(x).encode() + b"\n" for x in lines) + more)
    try:
        line = sock.makefile("rb").readline()
    except OSError:
        return sock, "closed"
    if not line:
        return sock, "closed"
    said = json.loads(line)
    return sock, said.get("code") or said["type"]


def in_process(path, role, more, told):
    _kept, said = hello(path, role, more)
    os.write(told, said.encode() + b"\n")
    signal.pause()


def crowd(path, role, count, more):
    hear, told = os.pipe()
    heard = os.fdopen(hear)
    children, said = [], []
    for _ in range(count):
        if len(children) - len(said) == AT_ONCE:
            said.append(heard.readline().strip())
        pid = os.fork()
        if not pid:
            try:
                in_process(path, role, more, told)
            finally:
                os._exit(1)
        children.append(pid)
    said += [heard.readline().strip() for _ in range(count - len(said))]
    return children, said


def one(path, role, count, more):
    kept, said = [], []
    for _ in range(count):
        if role == "silent":
            kept.append(connect(path))
            said.append("connected")
        else:
            sock, word = hello(path, "observer", more)
            kept.append(sock)
            said.append(word)
    return kept, said


def main():
    path, role, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    more = b"".join(text.encode() + b"\n" for text in sys.argv[4:])
    if role == "half":  # like "many", but each leaves a line unfinished
        role, more = "many", b"x" * 65_000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    separate = role in ("session", "pager")
    kept, said = (crowd if separate else one)(path, role, count, more)
    try:
        print(json.dumps({word: said.count(word) for word in set(said)}), flush=True)
        sys.stdin.read()
    finally:  # also if nobody reads the line any more: a test that took too long is ended at once
        if separate:
            for child in kept:
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
