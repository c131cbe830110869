"""What a daemon must not inherit from the program that starts it."""

from __future__ import annotations

import os
import signal
import sys


def shed() -> None:
    """Open standard streams that are closed, unblock the signals that end the daemon, and have its
    children reported. Without the streams a socket would take the number of standard output, and
    get what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # for the daemons of the GPUs
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the whole life
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
