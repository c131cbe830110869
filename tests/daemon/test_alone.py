"""Tests of daemons that end, hang or return while preloaded programs run on, and vice versa."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cuda_processes import Worker, WorkerError
from daemon import wait_until
from talker import Talker

from kiwi_core.sched import events as ev
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from daemon import Daemon


Start = "Callable[..., Daemon]"
Make = "Callable[..., PreloadedProgram]"

SUPPORT = Path(__file__).parents[1] / "support"

IMPATIENT = {"KIWI_PRELOAD_SILENCE_S": "2", "KIWI_PRELOAD_ALONE_S": "1"}


def out(daemon: Daemon, worker: Worker) -> None:
    session = daemon.wait_state(worker.pid, "idle")
    with Talker(daemon.sockets()[0]) as observer:
        observer.hello()
        assert observer.ask("release", session=session.id)["type"] == "ok"
    daemon.wait_state(worker.pid, "paged-out")


@pytest.mark.parametrize("where", ["in", "out"])
def test_a_daemon_that_hangs(start: Start, preloaded: Make, where: str) -> None:
    """A stopped daemon neither answers nor closes its connections; later it continues."""
    daemon = start("1x128MiB", "--idle-after", "0.3")
    one = preloaded(daemon, **IMPATIENT)
    one.take(64)
    daemon.wait_state(one.pid, "idle")
    if where == "out":
        out(daemon, one)
    child = daemon.status().daemon_pid
    os.kill(child, signal.SIGSTOP)
    try:
        assert one.intact(), "it goes on without the daemon"
    finally:
        os.kill(child, signal.SIGCONT)
    daemon.wait_for(
        lambda s: s.daemon_pid == child and [x.paged_out_bytes for x in s.sessions] == [0],
        "it knows how things are",
    )
    out(daemon, one)
    assert one.intact()


ASKS_FOR_ROOM = """
import time
from pathlib import Path
from talker import Talker
with Talker(Path({path!r})) as talker:
    talker.hello(role="pager")
    talker.say("pager-state", state="resident")
    talker.say("want-room", request=1, bytes={size})
    time.sleep(1000)
"""


def test_a_child_that_dies_while_it_waits_for_room_wants_none(start: Start, program: Any) -> None:
    """Its session lives on, and so would the request, until the scheduler's time limit."""
    daemon = start("1x64MiB")
    holder, parent = program(daemon), program(daemon)
    holder.take(40, 1)
    holder.worker.do("begin()")  # has the rest of the GPU, and continues
    code = ASKS_FOR_ROOM.format(path=str(daemon.sockets()[0]), size=40 * MIB)
    parent.worker.do(
        "import subprocess, sys\n"
        f"environment = {{**os.environ, 'PYTHONPATH': {str(SUPPORT)!r}}}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], env=environment)"
    )
    try:
        wanted = wait_until(lambda: recorded(daemon, ev.RoomWanted), "it has asked")
        parent.worker.do("child.kill(); child.wait()")
        [gone] = wait_until(lambda: recorded(daemon, ev.RoomNoLongerWanted), "it wants none")
        assert (gone.session, gone.request) == (wanted[0].session, wanted[0].request)
        assert not recorded(daemon, ev.SessionLost)
    finally:
        with suppress(WorkerError):  # the test may have failed before this
            parent.worker.do("child.kill(); child.wait()")
        holder.worker.do("client.end_burst()")


def recorded(daemon: Daemon, kind: type[Any]) -> list[Any]:
    return [entry.event for entry in daemon.journal() if isinstance(entry.event, kind)]
