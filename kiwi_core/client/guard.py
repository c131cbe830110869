"""``guard.py PID``: sends SIGTERM to PID when standard input ends.

The other end of that pipe is with whoever started PID, and the kernel closes it however that one
ends. (Linux's parent-death signal means the thread that started a process, not the process.) Run by
path, with the standard library only: it is there as long as PID.
"""

import os
import signal
import sys

if __name__ == "__main__":
    sys.stdin.buffer.read()
    os.kill(int(sys.argv[1]), signal.SIGTERM)
