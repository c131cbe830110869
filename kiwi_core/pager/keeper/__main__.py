"""``python -m kiwi_core.pager.keeper OPTIONS``: started by a daemon, beside one program."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path

import msgspec

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.keeper.mover import Mover
from kiwi_core.pager.keeper.record import Place
from kiwi_core.pager.keeper.server import SILENCE_S, Server


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``library`` is the file of the preloaded library, for its hash; "": everything is copied."""

    pid: int
    start_ticks: int
    gpu_uuid: str
    directory: str
    library: str = ""
    silence_s: float = SILENCE_S


def main() -> int:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    if os.fork():
        return 0  # whoever ends a daemon with all its children does not end its keepers
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    place = Place(Path(options.directory), ProcessRef(options.pid, options.start_ticks))
    lock = os.open(place.file("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # there is one
    pidfd = processes.open_pidfd(place.ref)
    if pidfd is None:
        place.leave()
        return 0
    mover = Mover(options.gpu_uuid, place, options.library)
    server = Server(place, mover, silence_s=options.silence_s)
    signal.signal(signal.SIGTERM, lambda *_: server.told_to_end())
    server.serve(place.listen(), pidfd)
    return 0


if __name__ == "__main__":
    sys.exit(main())
