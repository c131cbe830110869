"""A process that talks like the library of a program without GPU memory, and asks for room.

It prints the messages of the daemon. Arguments: the daemon's socket; the bytes that it asks for; a
file (it answers no order before that exists); and "parent" for a process that asks for nothing and
starts another one that does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from talker import Talker


def main(path: str, wants: str, may_answer: str, *parent: str) -> None:
    with Talker(Path(path), timeout_s=120) as talker:
        talker.hello(role="pager")
        talker.say("pager-state", state="resident")
        if parent:
            subprocess.Popen([sys.executable, __file__, path, wants, may_answer])
        else:
            talker.say("want-room", request=1, bytes=int(wants))
        talker.say("ping")  # its answer shows that the daemon has heard all of this
        while (message := talker.hear()) is not None:
            print(message, flush=True)
            if message["type"] == "pager-do":
                refuse(talker, message["op"], Path(may_answer))


def refuse(talker: Talker, op: int, may_answer: Path) -> None:
    while not may_answer.exists():
        time.sleep(0.01)
    why = {"outcome": "refused", "reason": "driver", "detail": "It has nothing to move."}
    talker.say("pager-done", op=op, **why)


if __name__ == "__main__":
    main(*sys.argv[1:])
