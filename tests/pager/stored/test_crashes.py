"""Deaths at every stage: of the daemon (the pager), the keeper and the program.

A stage is a driver call that hangs until it is let go, or a copy that takes long. What the emulated
driver does where NVIDIA's documentation says nothing is the worst that is plausible.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import Worker, wait_until
from stopped import stopped
from worlds import EmulatedWorld

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Lost
from kiwi_core.pager.keeper import messages
from kiwi_core.pager.keeper.messages import Look, State
from kiwi_core.pager.keeper.record import Place
from kiwi_core.pager.keeper.server import CONNECTIONS_MAX, Server
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stored_world import StoredWorld
    from worlds import RunningSession

STAGES = [
    ("page_out", "lock"),
    ("page_out", "checkpoint"),
    ("page_out", "copy"),
    ("page_out", "complete"),
    ("page_in", "restore"),
    ("page_in", "copy"),
    ("page_in", "complete"),
    ("page_in", "unlock"),
]
UNDER_WAY = {"page_out": "CHECKPOINTING", "page_in": "RESTORING"}


def begin(world: StoredWorld, session: RunningSession, call: str, stage: str) -> None:
    """Brings ``call`` to ``stage``, by a pager that may be killed: ``world.pager``."""
    if call == "page_in":
        moved(world.pager.page_out(session.target, soon_ns()))
    if stage == "copy":
        world.set_copy_bandwidth(MIB)
    else:
        world.hang(stage, session.pid)
    world.pager.begin(call, session.target, soon_ns())
    if stage == "copy":
        wait_until(lambda: state(world, session) == UNDER_WAY[call], UNDER_WAY[call])
    else:
        world.wait_hanging()


def let_go(world: StoredWorld, stage: str) -> None:
    if stage == "copy":
        world.set_copy_bandwidth(0)
    else:
        world.let_go()


def state(world: StoredWorld, session: RunningSession) -> str:
    """Asked by nobody that takes part."""
    if not hasattr(world, "asker"):
        world.asker = EmulatedWorld.new_pager(world)  # type: ignore[attr-defined]
    code = f"__import__('kiwi_core.gpu.driver').gpu.driver.checkpoint_state({session.pid}).name"
    return str(world.asker.worker.get(code))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "stage", "wanted"),
    [(*stage, True) for stage in STAGES] + [(*stage, False) for stage in STAGES[2::3]],
)
def test_the_daemon_killed_at_each_stage(
    world: StoredWorld, call: str, stage: str, wanted: bool
) -> None:
    """The next one finds the keeper, whatever was asked of it, and goes on; no byte is lost."""
    session = world.start(4 * MIB)
    before = session.digest()
    begin(world, session, call, stage)
    world.pager.kill()
    let_go(world, stage)
    pager = world.new_pager(wanted=wanted)
    pager.import_footprints({session.root: 4 * MIB + world.context_bytes})  # the roster's
    moved(pager.page_in(session.target, soon_ns()))
    assert session.digest() == before
    seen = pager.observe(session.target)
    assert (seen.residency, seen.paged_out_bytes) == (Residency.RESIDENT, 0)
    moved(pager.page_out(session.target, soon_ns()))
    assert (world.record(session) is not None) == wanted
    moved(pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.parametrize(("call", "stage"), STAGES[1::2] + STAGES[4:5])
def test_the_program_killed_at_each_stage(world: StoredWorld, call: str, stage: str) -> None:
    session = world.start(4 * MIB)
    begin(world, session, call, stage)
    half = next(world.directory.glob("*.lock")).with_suffix(".new")
    half.touch()  # of a keeper that was killed while it wrote its record
    session.kill()
    let_go(world, stage)
    refused(world.pager.finish(), Reason.GONE)
    assert not world.pager.observe(session.target).alive
    wait_until(lambda: not world.keepers(), "the keeper has ended, too")
    wait_until(lambda: world.used_bytes() == 0, "the memory is free")
    assert not list(world.directory.glob("*")), "and has left nothing"


@pytest.mark.parametrize("stage", ["lock", "checkpoint"])
def test_the_keeper_killed_before_anything_began(world: StoredWorld, stage: str) -> None:
    """The program is as it was. (That a call which the driver had taken up comes to nothing is
    what the emulated one does.)"""
    session = world.start(4 * MIB)
    before = session.digest()
    begin(world, session, "page_out", stage)
    world.kill_keeper(session)
    if stage == "checkpoint":
        world.faults.set("checkpoint_fail", pid=session.pid)
    world.let_go()
    outcome = world.pager.finish()
    if stage == "lock":
        moved(outcome)  # the driver's own checkpoint
        assert world.record(session) is None
    else:
        refused(outcome, Reason.DRIVER)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.record(session) is not None, "by a new keeper"
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.parametrize(
    ("call", "stage"), [("page_out", "copy"), ("page_in", "copy"), ("page_in", "restore")]
)
def test_the_keeper_killed_in_the_middle(world: StoredWorld, call: str, stage: str) -> None:
    """Lost, and told in plain words, now and later; nobody else is held up."""
    other = world.start(4 * MIB)
    session = world.start(4 * MIB)
    begin(world, session, call, stage)
    world.kill_keeper(session)
    let_go(world, stage)
    for outcome in (world.pager.finish(), world.pager.page_in(session.target, soon_ns())):
        assert isinstance(outcome, Lost)
        assert f"process {session.pid}" in outcome.detail
        assert "keeper" in outcome.detail
        assert "Restart" in outcome.detail
    assert world.pager.observe(session.target).residency is Residency.LOST
    assert world.new_pager().observe(session.target).residency is Residency.LOST
    before = other.digest()
    moved(world.pager.page_out(other.target, soon_ns()))
    moved(world.pager.page_in(other.target, soon_ns()))
    assert other.digest() == before
    session.kill()
    wait_until(lambda: world.used_bytes() <= 8 * MIB, "what was stuck is free")


def test_the_keeper_killed_while_it_keeps(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    moved(world.pager.page_out(session.target, soon_ns()))
    world.kill_keeper(session)
    for pager in (world.pager, world.new_pager(), world.new_pager(wanted=False)):
        assert pager.observe(session.target).residency is Residency.LOST
        assert isinstance(pager.page_in(session.target, soon_ns()), Lost)


def test_a_keeper_that_was_killed_while_it_kept_nothing_is_replaced(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    for _ in range(2):
        moved(world.pager.page_out(session.target, soon_ns()))
        moved(world.pager.page_in(session.target, soon_ns()))
        world.kill_keeper(session)
    assert session.digest() == before


def test_signals_do_not_end_a_keeper_that_keeps_something(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    keeper = world.keeper_pid(session)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(keeper, number)
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before
    assert world.keeper_pid(session) == keeper
    os.kill(keeper, signal.SIGTERM)
    wait_until(lambda: processes.stat_of(keeper) is None, "one that keeps nothing ends")


ANOTHER = """
import pathlib
from kiwi_core.gpu import driver as checkpoints
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.keeper.mover import Mover
from kiwi_core.pager.keeper.record import Place

place = Place(pathlib.Path({directory!r}), ProcessRef({pid}, {ticks}))
mover = Mover({uuid!r}, place, "")
mover._way, mover._out_bytes = "out", 123
"""


def test_a_program_that_became_another_one_while_it_was_out(world: StoredWorld) -> None:
    """By ``exec``: same pid, same start time, and now it has memory in the GPU. What the keeper
    has is nobody's any more."""
    session = world.start_without_keeper(4 * MIB)
    before = session.digest()
    root = session.root
    worker = Worker(world.environment)
    try:
        worker.do(
            ANOTHER.format(
                directory=str(world.directory), pid=root.pid, ticks=root.start_ticks,
                uuid=world.gpu_uuid,
            )
        )  # fmt: skip
        assert worker.get("mover.out().code") == "not-now", "it runs"
        worker.do(f"checkpoints.lock({root.pid}, 60_000)")
        assert worker.get("mover.out() is None")
        assert worker.get("[mover.state().way, mover.state().out_bytes]") == ["out", 4 * MIB]
        assert worker.get("mover.bring_in() is None")
        worker.do(f"checkpoints.unlock({root.pid})")
        assert session.digest() == before
    finally:
        worker.close()


def test_a_keeper_that_does_not_answer_leaves_the_move_to_the_driver(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    with stopped(world.keeper_pid(session)):
        pager = world.new_pager(keeper_within_s=1.0)
        moved(pager.page_out(session.target, soon_ns()))
        assert world.record(session) is None
        moved(pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_keeper_whose_queue_is_full_is_not_waited_for(world: StoredWorld) -> None:
    """It has been stopped for long, and a daemon that asked it again and again has filled it."""
    session = world.start(4 * MIB)
    before = session.digest()
    with stopped(world.keeper_pid(session)), contextlib.ExitStack() as waiting:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.enter_context(world.connect(session))
        pager = world.new_pager(keeper_within_s=1.0)
        moved(pager.page_out(session.target, soon_ns()))
        assert world.record(session) is None
        moved(pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_keepers_that_nobody_wants_any_more_end(world: StoredWorld) -> None:
    """The daemon was started anew, without custom storage: what is out comes back the way that it
    went, and then nobody needs its keeper, nor one that had nothing to keep."""
    session, other = world.start(4 * MIB), world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    world.pager.kill()
    idle = world.keeper_pid(other)
    pager = world.new_pager(wanted=False)
    pager.import_footprints({session.root: 4 * MIB + world.context_bytes})
    wait_until(lambda: processes.stat_of(idle) is None, "the one that keeps nothing has ended")
    moved(pager.page_in(session.target, soon_ns()))
    wait_until(lambda: not world.keepers(), "and the other one, too")
    assert session.digest() == before


def test_a_keeper_that_can_have_no_thread_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps would end with it. Whoever connects is served when there are threads again."""
    mover: Any = SimpleNamespace(state=lambda: State(pid=1, start_ticks=1, way="out"))
    place = Place(tmp_path, ProcessRef(1, 1))
    server = Server(place, mover)
    with place.listen() as listener:
        with monkeypatch.context() as patched:

            def none_left(_thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patched.setattr(threading.Thread, "start", none_left)
            for _ in range(CONNECTIONS_MAX + 1):
                with place.connect() as sock:
                    server._accept(listener)
                    assert sock.recv(1) == b"", "it hangs up"
        with place.connect() as sock:
            server._accept(listener)
            messages.send(sock, Look())
            assert messages.receive_reply(sock) == mover.state()


def test_a_keeper_is_nobodys_child(world: StoredWorld) -> None:
    """The pager's process, its terminal session and its process group may all end."""
    session = world.start(4 * MIB)
    keeper, pager = (
        processes.stat_of(pid) for pid in (world.keeper_pid(session), world.pager.worker.pid)
    )
    assert keeper is not None
    assert pager is not None
    assert keeper.session != pager.session
    assert os.getpgid(world.keeper_pid(session)) != os.getpgid(world.pager.worker.pid)
    assert world.pager.worker.pid not in [
        ref.pid for ref in processes.ancestors(world.keeper_ref(session))
    ]


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    struct.pack("!I", 1 << 31) + b"x",
    struct.pack("!I", 0),
    struct.pack("!I", 4) + b"\xff{[\x00",
    struct.pack("!I", 4) + b"null",
    struct.pack("!I", 16) + b'{"type":"nope"}\n',
    struct.pack("!I", 40_000) + b"[" * 40_000,
    struct.pack("!I", 100) + b"half",
]


def test_garbage_at_the_keepers_socket(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    for garbage in GARBAGE:
        with world.connect(session) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b"", f"it says nothing and hangs up: {garbage[:20]!r}"
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_connections_that_say_nothing_do_not_shut_others_out_for_ever(world: StoredWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    idle = [world.connect(session) for _ in range(40)]
    outcome = world.pager.page_out(session.target, soon_ns())
    for sock in idle:
        sock.close()
    moved(outcome)
    moved(world.pager.page_in(session.target, soon_ns()))
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.record(session) is not None
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_records_that_cannot_be_read_are_no_reason_to_try(world: StoredWorld) -> None:
    """Out, and nobody knows by which way: the driver is not asked for the other one."""
    session = world.start(4 * MIB)
    moved(world.pager.page_out(session.target, soon_ns()))
    world.kill_keeper(session)
    path = next(world.directory.glob("*.record"))
    path.write_bytes(b"{")
    assert isinstance(world.pager.page_in(session.target, soon_ns()), Lost)


def test_a_second_keeper_for_the_same_program_ends_at_once(
    make_world: Callable[..., StoredWorld],
) -> None:
    world = make_world()
    session = world.start(4 * MIB)
    options = {
        "pid": session.root.pid, "start_ticks": session.root.start_ticks,
        "gpu_uuid": world.gpu_uuid, "directory": str(world.directory),
    }  # fmt: skip
    command = [sys.executable, "-m", "kiwi_core.pager.keeper", json.dumps(options)]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == 0
    wait_until(lambda: len(world.keepers()) == 1, "the second one ends")
    assert world.pager.keeper(session.root)["keeper_pid"] == world.keeper_pid(session)
