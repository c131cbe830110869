"""Moves the memory of a kernel out before Jupyter kills it.

With one kind of driver a machine hangs some 30 seconds after a program was killed whose memory had
been moved out and back. A program whose memory is out at that moment does no harm.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from kiwi_core import config, nvidia_module
from kiwi_core.client import Client, discover
from kiwi_core.errors import KiwiError, PeerError
from kiwi_core.states import SessionState
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.wire.messages import SessionStatus

WITHIN_S: Final = 30.0
"""Enough for 65 GB at 2.2 GB/s, the speed of an H200 with driver 580.159. Meanwhile a user waits
for the kernel's end.
"""

AGAIN_S: Final = 5.0
"""Limit at the next signal: memory that could not be moved out before will hardly move now."""

ASK_EACH_S: Final = 0.1
"""Interval of requests: Jupyter has interrupted the kernel, but its cell may take a while to
end.
"""

SEEN_WITHIN_S: Final = 1.0
"""Memory that a program has just taken appears in the status within this time."""

log = logging.getLogger("kiwi.leaving")


def needed() -> bool:
    module = nvidia_module.module_of()
    return module is not None and module.kills_hang


def move_out(pid: int, socket_dir: Path | None, within_s: float) -> bool:
    """Move the GPU memory of process ``pid`` out. Return true when it is out, false after
    ``within_s`` seconds. Return true, too, for a process that no daemon knows.
    """
    until_s = time.monotonic() + within_s
    out = True
    for path in discover(socket_dir or config.socket_dir()):
        client = Client(path, role=Role.OBSERVER, client="leaving", reconnect=False)
        try:
            with client:
                client.connect()
                if not _out(client, pid, until_s):
                    log.warning("kernel %d is killed with its memory in the GPU", pid)
                    out = False
        except KiwiError as error:  # the kernel may belong to another daemon
            log.warning("%s cannot be asked to move kernel %d out: %s", path.name, pid, error)
            out = False
    return out


def _out(client: Client, pid: int, until_s: float) -> bool:
    empty_since_s = math.inf
    while (now_s := time.monotonic()) < until_s:
        mine = [one for one in client.status().sessions if one.pid == pid]
        held = [one for one in mine if one.state is not SessionState.PAGED_OUT]
        if not held:
            return True
        empty_since_s = min(empty_since_s, now_s) if not any(map(_has_some, held)) else math.inf
        if now_s - empty_since_s > SEEN_WITHIN_S:
            return True
        for one in held:
            try:
                client.release(one.id)
            except PeerError as error:
                log.debug("%s: %s", one.id, error)  # in a burst: try again when that is over
        time.sleep(ASK_EACH_S)
    return False


def _has_some(one: SessionStatus) -> bool:
    moving = one.state in (SessionState.PAGING_OUT, SessionState.PAGING_IN)
    return moving or one.resident_bytes > 0
