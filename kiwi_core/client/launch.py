"""Start a program that outlives its starter. Run by path, as a script; imports nothing of Kiwi.

``launch.py PROGRAM ARG …`` runs the program in its own session and stays until standard input ends.
The program then belongs to init and to no other process tree, so stopping or killing the starter
does not reach it. If the program ends earlier, so does this script, with its status.
"""

from __future__ import annotations

import os
import select
import sys

_LOOK_EVERY_MS = 50


def main(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            os.execv(command[0], command)
        except OSError as error:
            os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    starter = select.poll()
    starter.register(0, select.POLLIN)
    while not starter.poll(_LOOK_EVERY_MS):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return abs(os.waitstatus_to_exitcode(status))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
