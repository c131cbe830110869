"""A session whose job has too little RAM is ended if others wait for its room for long and its turn
is over: it idles, runs on past its turn, or its process is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cramped import limited
from daemon import wait_until
from patience import PATIENCE_S, die_with_the_test
from surfaces import watching

from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.daemon.sessions import ending
from kiwi_core.daemon.sessions.ending import Ending
from kiwi_core.gpu import processes
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import EndSession, Notify
from kiwi_core.states import Notice
from kiwi_core.units import MIB, SessionId
from kiwi_core.wire.messages import UsageBy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from daemon import Daemon
    from session_program import SessionProgram
    from surfaces import Watch

    from kiwi_core.wire.messages import GpuStatus

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


# --- a real daemon and two programs ---------------------------------------------------------------


WRITES_ITS_NOTICES = """
class Written(list):
    def append(self, notice):
        with open({path!r}, "a") as file:
            file.write(json.dumps(notice) + "\\n")
notices = Written()
"""
"""Keeps them beyond the end of the program."""


def test_an_immovable_program_is_ended_and_the_other_one_runs(
    start: Start, program: Program, tmp_path: Path
) -> None:
    daemon = start("1x128MiB", "--end-immovable-after", "4")
    one, other = program(daemon, 100, name="one"), program(daemon, name="other")
    one.worker.do(WRITES_ITS_NOTICES.format(path=str(tmp_path / "notices")))
    with limited(one.pid, 50 * MIB), watching(daemon) as watch:
        other.begin_take(60, 2)
        _is_announced(watch, one.pid)
        wait_until(lambda: one.worker.returncode is not None, "it is ended")
        assert one.worker.returncode == -signal.SIGTERM
    assert _had_a_figure(watch, one.pid), "the wait for its end"
    told = dict(map(json.loads, (tmp_path / "notices").read_text().splitlines()))
    assert "Kiwi ends the program in 4 s (at " in told["ending"]
    assert "--mem=" in told["ending"]
    other.worker.answer()
    assert other.intact()
    assert "session is ended" in daemon.log()
    assert "--mem=" in daemon.log()
    with closing(daemon.client()) as client:
        rows = client.usage(UsageBy.NOTEBOOK, 0.0).rows
        assert {row.name: row.ended for row in rows} == {"one": 1, "other": 0}
        assert client.metrics().ended == 1
    [(_, order)] = _actions(daemon, EndSession)
    assert order.cause.startswith("others have waited 4 s for its unused GPU memory. ")


def test_nobody_is_ended_unless_an_admin_has_decided_so(start: Start, program: Program) -> None:
    daemon = start("1x128MiB")
    one, other = program(daemon, 100), program(daemon)
    with limited(one.pid, 50 * MIB):
        other.begin_take(60, 2)
        shown = daemon.wait_for(lambda s: _session(s, one.pid, "page-out-refused"), "refused")
        assert shown.ends_in_s is None
        status = daemon.status()
        assert status.queue[0].expected_wait_s is None
        assert status.newcomer_wait_s is None, "nobody can tell"
    other.worker.answer()
    assert one.intact(), "with more RAM it is moved out and back as any other"


SAVES = """
import json, pathlib, signal, sys, time
from cuda.bindings import driver
def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
ok(driver.cuInit(0))
ok(driver.cuCtxCreate(None, 0, ok(driver.cuDeviceGet(0))))
size = 100 << 20
address = ok(driver.cuMemAlloc(size))
ok(driver.cuMemsetD8(address, 7, size))
over = []
signal.signal(signal.SIGTERM, lambda *_: over.append(True))
computed_ns, small, file = [], bytearray(64), pathlib.Path(sys.argv[1])
while not over:
    ok(driver.cuMemcpyDtoH(small, address, 64))
    computed_ns.append(time.monotonic_ns())
    file.touch()
    time.sleep(0.01)
file.write_text(json.dumps(computed_ns))
part = bytearray(1 << 20)
for offset in range(0, size, len(part)):
    ok(driver.cuMemcpyDtoH(part, int(address) + offset, len(part)))
    assert part == bytes([7]) * len(part)
print("saved", flush=True)
raise SystemExit(3)
"""
"""Computes without an end in 100 MiB of the GPU, and saves them at SIGTERM; then it writes when it
has computed."""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_program_under_kiwi_run_is_ended_once_its_turn_is_over(
    start: Start, program: Program, tmp_path: Path, stopped: bool
) -> None:
    daemon = start("1x128MiB", "--end-immovable-after", "4", "--tq", "1")
    other, computed = program(daemon, name="other"), tmp_path / "computed"
    command = ["run", "--require", "--name", "training", "--", sys.executable, "-c", SAVES]
    run = subprocess.Popen(
        [sys.executable, "-m", "kiwi_core.cli", *command, str(computed)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | daemon.env,
        preexec_fn=die_with_the_test,
    )  # fmt: skip
    wait_until(computed.exists, "it computes")
    # Nobody asks the driver about a stopped program: its memory must be known before.
    daemon.wait_for(lambda _: daemon.resident_mib(run.pid) >= 100, "its memory is known")
    [child] = psutil.Process(run.pid).children()
    with limited(child.pid, 50 * MIB), watching(daemon) as watch:
        if stopped:
            child.suspend()
        other.begin_take(60, 2)
        _is_announced(watch, run.pid)
        out, err = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, out) == (3, "saved\n"), err
    assert _had_a_figure(watch, run.pid), "the wait for its end"
    assert "Kiwi ends the program in 4 s (at " in err
    assert "Kiwi ends this program: its turn was over" in err
    assert "in Slurm: --mem=" in err
    other.worker.answer()
    assert other.intact()
    assert "session is ended" in daemon.log()
    [(ordered_ns, order)] = _actions(daemon, EndSession)
    notices = _actions(daemon, Notify)
    told_ns = next(now_ns for now_ns, notice in notices if notice.notice is Notice.ENDING)
    between = [at_ns for at_ns in json.loads(computed.read_text()) if told_ns < at_ns < ordered_ns]
    assert between or stopped, "it goes on computing until its end"
    # Kiwi lets a stopped program run for each try to move it: then it is only past its turn.
    overs = [" past its turn. ", *([", and its process is stopped. "] if stopped else [])]
    causes = tuple(f"others have waited 4 s for its GPU memory{over}" for over in overs)
    assert order.cause.startswith(causes)


def _actions(daemon: Daemon, kind: type[Any]) -> list[tuple[int, Any]]:
    """Return the daemon's actions of that kind, with their times."""
    entries = [(entry.now_ns, action) for entry in daemon.journal() for action in entry.actions]
    return [(now_ns, action) for now_ns, action in entries if isinstance(action, kind)]


def _is_announced(watch: Watch, pid: int) -> None:
    """Wait until the watcher has received that session ``pid`` will be ended."""

    def received() -> Any:
        every = (status for statuses in watch.received for status in statuses)
        return next(filter(None, (_session(status, pid, "ending") for status in every)), None)

    shown = wait_until(received, "its end is announced")
    assert shown.ends_in_s <= 4
    assert "--mem=" in shown.problem_text


def _had_a_figure(watch: Watch, pid: int) -> bool:
    """Return whether the first in line was told how long it waits for the end of session ``pid``,
    which takes four seconds: the watcher has received it, however late the test looks."""
    received = (status for statuses in watch.received for status in statuses)
    return any(
        _session(status, pid, "ending") and status.queue and status.queue[0].expected_wait_s
        for status in received
    )


def _session(status: GpuStatus, pid: int, problem: str) -> Any:
    found = (one for one in status.sessions if one.pid == pid and one.problem == problem)
    return next(found, None)


# --- signals and words ----------------------------------------------------------------------------

DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


class Stage:
    """A session whose process does not end at SIGTERM, and the events that the core is fed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.notices: list[Any] = []
        self.fed: list[ev.Event] = []
        ref = processes.ref_of(self.process.pid)
        assert ref is not None
        self.record = self.session("k1", ref, "kernel")
        registry: Any = SimpleNamespace(
            get={self.record.id: self.record}.get, refs=lambda: frozenset({ref})
        )
        self.ending = Ending(SimpleNamespace(feed=self.fed.append), registry)  # type: ignore[arg-type]

    def session(self, id_: str, ref: processes.ProcessRef, kernel_id: str) -> SessionRecord:
        connection: Any = SimpleNamespace(send=self.notices.append)
        return SessionRecord(
            id=SessionId(id_), ref=ref, uid=os.geteuid(), kernel_id=kernel_id, connection=connection
        )

    def order(self) -> None:
        actions = [EndSession(session=self.record.id, cause="limit 8 GiB: ask for 9216 MiB")]
        self.ending.after(Step(ev.DeadlinePassed(), actions, (), 0))

    async def ended(self) -> None:
        while self.process.poll() is None and not self.fed:
            await asyncio.sleep(0.01)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(ending, "NOTICE_S", 0.0)
    monkeypatch.setattr(ending, "GRACE_S", 0.1)
    made = Stage()
    yield made
    made.process.kill()
    made.process.communicate()


def run(stage: Stage) -> None:
    async def order() -> None:
        stage.order()
        await asyncio.wait_for(stage.ended(), PATIENCE_S)

    asyncio.run(order())


def test_a_program_that_ignores_sigterm_is_killed(stage: Stage) -> None:
    run(stage)
    assert stage.process.wait() == -signal.SIGKILL
    [notice] = stage.notices
    assert notice.notice is Notice.ENDED
    assert "ask for 9216 MiB" in notice.text
    assert not stage.fed


def test_another_users_process_is_left_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54330)
    stage.record.uid = 54331
    run(stage)
    assert stage.fed == [ev.EndRefused(session=stage.record.id, why=(
        "the daemon may not signal another user's processes"
    ))]  # fmt: skip
    assert stage.process.poll() is None
    assert not stage.notices


def test_a_signal_that_is_refused_is_reported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)
    run(stage)
    [event] = stage.fed
    assert isinstance(event, ev.EndRefused)
    assert "Operation not permitted" in event.why
    assert stage.process.poll() is None


def test_a_daemon_that_leaves_ends_nobody(stage: Stage) -> None:
    stage.ending.closed = True
    stage.order()
    assert not stage.notices


def test_the_kernel_that_follows_is_told_once_why_the_last_one_ended(stage: Stage) -> None:
    run(stage)
    stage.notices.clear()
    ref = processes.ref_of(os.getpid())
    assert ref is not None
    stranger = stage.session("k2", ref, "another kernel")
    stage.ending.notify_successor(stranger, stranger.connection)  # type: ignore[arg-type]
    stage.ending.notify_successor(stage.record, stage.record.connection)  # type: ignore[arg-type]
    assert not stage.notices, "the kernel itself, which is still there, and other kernels"
    other_user = stage.session("k3", ref, "kernel")
    other_user.uid += 1
    stage.ending.notify_successor(other_user, other_user.connection)  # type: ignore[arg-type]
    assert not stage.notices
    successor = stage.session("k4", ref, "kernel")
    stage.ending.notify_successor(successor, successor.connection)  # type: ignore[arg-type]
    stage.ending.notify_successor(successor, successor.connection)  # type: ignore[arg-type]
    [notice] = stage.notices
    assert notice.notice is Notice.ENDED
    assert "Kiwi ended the kernel that was here before" in notice.text
    assert "ask for 9216 MiB" in notice.text
