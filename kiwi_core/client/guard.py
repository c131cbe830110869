"""``guard.py PID``: send SIGTERM to PID when standard input ends.

The process that started PID holds the other end of that pipe, and the kernel closes it however that
process ends. (Linux's parent-death signal follows the thread that started a process, not the
process.) Run by path, with the standard library only, because it runs as long as PID.
"""

import os
import signal
import sys

if __name__ == "__main__":
    sys.stdin.buffer.read()
    os.kill(int(sys.argv[1]), signal.SIGTERM)
