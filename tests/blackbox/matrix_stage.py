"""Two notebooks that do not fit together, for killing any process in any state.

The GPU has 128 MiB. A is a notebook of a real Jupyter server and has a child process that uses the
GPU: 48 + 16 MiB and two contexts. B, the neighbour, is a plain kernel with 72 MiB and a context.
``reach`` brings A into a state, and B is the other one.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import family_cells
import psutil
from daemon_box import DaemonBox, makes_a_call, running_daemon, system_call
from kernels import running_kernel
from lab import running_lab
from patience import wait_until
from served_kernel import ServedKernel

if TYPE_CHECKING:
    from kernels import Cell, Kernel

MIB = 1 << 20
SLOW = 20 * MIB
"""In bytes per second. A's memory takes 3.2 s and B's 3.6 s, long enough to kill a process
meanwhile, even if the test is paused for a second."""

A_MIB, CHILD_MIB, B_MIB = 48, 16, 72

STATES = ("waiting", "running", "suspended", "paged-out", "paging-out", "paging-in")
"""The slow ones come last, because the scheduler's quanta grow with the measured swaps."""

KILLED = ("kernel", "child", "daemon", "supervisor", "mover", "server")

LEAST_MOVERS = 2
"""A daemon has at least this many at any time."""

LONG_S = 0.1
CUT_SHORT = "a mover ended in mid-call"
"""A line of the daemon's log."""

AGAIN_WITHIN_S = 60.0
"""Limit for survivors to use the GPU again. A kernel takes some seconds to start on a busy machine.
No time limit of Kiwi helps by accident before: a quantum here is a minute, and a notebook works
without a daemon only after five."""

PATIENT = "c.Kiwi.daemon_grace_s = 300.0"


RUNS = ("running", 0)


def _doing(mover: psutil.Process) -> tuple[str, int]:
    """Return its system call, and how often it has waited so far; ``RUNS`` if it does not wait or
    has ended."""
    doing = system_call(mover)
    with suppress(psutil.NoSuchProcess):
        return doing, 0 if doing == RUNS[0] else mover.num_ctx_switches().voluntary
    return RUNS


class Stage:
    """``pager`` is ``checkpoint`` or ``inprocess``."""

    def __init__(self, pager: str) -> None:
        self._stack = ExitStack()
        self._working: dict[Kernel, Cell] = {}
        self._seed = 0
        self.child_pid = 0
        self._same_daemon = 0
        try:
            self._build(pager)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, pager: str) -> None:
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kw-")))
        # The floor of a turn stays short, whatever the swaps cost.
        self.daemon: DaemonBox = self._stack.enter_context(
            running_daemon("1x128MiB", "--tq", "60", "--swap-floor", "0")
        )
        theirs = {**self.daemon.env, "KIWI_PAGER": pager}
        own = dict(theirs)
        if pager == "inprocess":
            own |= self.daemon.gpu.pager_environment()
            theirs["KIWI_PRELOAD_LIBRARY"] = own["KIWI_PRELOAD_LIBRARY"]
        self.lab = self._stack.enter_context(running_lab(
            theirs, app="server", options=("--KernelRestarter.time_to_dead=0.3",)
        ))  # fmt: skip
        profile = Path(self.lab.env["IPYTHONDIR"]) / "profile_default"
        profile.mkdir(parents=True, exist_ok=True)
        (profile / "ipython_kernel_config.py").write_text(PATIENT)
        self.b: Kernel = self._stack.enter_context(running_kernel(own, config=PATIENT))
        self._take(self.b, B_MIB)
        self._new_a()
        for kernel in (self.a, self.b):
            # A child's library has to report before it moves the child's memory.
            wait_until(lambda pid=kernel.pid: self._moved_by(pid) == pager, pager, AGAIN_WITHIN_S)

    def _moved_by(self, pid: int) -> str:
        session = self.daemon.session(pid)
        return "" if session is None else str(session["pager"])

    def close(self) -> None:
        self._stack.close()

    def leave_nothing(self) -> None:
        """End the programs, check that the GPU is empty, and let the daemon leave in order."""
        self.a.stop()
        self.b.stop()
        wait_until(self._nobody_holds, "the GPU is free again", AGAIN_WITHIN_S)
        assert self.daemon.leave() == 0, self.daemon.log()

    def _nobody_holds(self) -> bool:
        return not any(self.daemon.gpu.used_bytes().values())

    # --- programs

    def _take(self, kernel: Kernel, mib: int) -> None:
        self._seed += 1
        kernel.check(family_cells.FAMILY)
        kernel.check(f"memory = Memory({mib}, {self._seed})")

    def _new_a(self) -> None:
        self.a = ServedKernel(self.lab, "A.ipynb")
        self._fill_a()

    def _fill_a(self) -> None:
        self._take(self.a, A_MIB)
        self._new_child()

    def _new_child(self) -> None:
        text = self.a.check(family_cells.child(CHILD_MIB, self._seed)).text
        self.child_pid = int(text)

    def _file(self, kernel: Kernel, what: str) -> Path:
        return self.directory / f"{what}-{'A' if kernel is self.a else 'B'}"

    def work(self, kernel: Kernel) -> None:
        """Start a loop that runs until ``end``; each step is a beat."""
        stop, beat = self._file(kernel, "stop"), self._file(kernel, "beat")
        stop.unlink(missing_ok=True)
        beat.touch()
        self._working[kernel] = kernel.send(f"family_loop({str(stop)!r}, {str(beat)!r})")

    def wait_beat(self, kernel: Kernel) -> None:
        """Wait for a step that ends after this call."""
        began_s = time.time()
        beat = self._file(kernel, "beat")
        wait_until(lambda: beat.stat().st_mtime > began_s, "the loop goes on", AGAIN_WITHIN_S)

    def end_work(self) -> None:
        """End the loops and check their results."""
        for kernel in self._working:
            self._file(kernel, "stop").touch()
        for kernel, cell in self._working.items():
            kernel.finish(cell, AGAIN_WITHIN_S)
            assert (cell.status, cell.text) == ("ok", "worked\n"), cell.outputs()
        self._working.clear()

    # --- states

    def reach(self, state: str) -> None:
        """Bring A into ``state``, in which it stays except for a quantum of a minute."""
        getattr(self, "_reach_" + state.replace("-", "_"))()
        self.daemon.wait_state(self.a.pid, state)
        self.daemon.set(tq_s=60)

    def _runs(self, kernel: Kernel) -> None:
        self.work(kernel)
        self.daemon.wait_state(kernel.pid, "running")
        self.wait_beat(kernel)

    def _reach_waiting(self) -> None:
        self._runs(self.b)
        self.work(self.a)

    def _reach_running(self) -> None:
        self._runs(self.a)
        self.work(self.b)
        self.daemon.wait_state(self.b.pid, "waiting")

    def _reach_suspended(self) -> None:
        self._runs(self.a)
        self.work(self.b)
        pair = (self.a.pid, self.b.pid)

        def suspended(status: dict[str, Any]) -> bool:
            states = {s["pid"]: s["state"] for s in status["sessions"]}
            return [states.get(pid) for pid in pair] == ["suspended", "running"]

        while True:  # the turn can change before the long quantum is set
            self.daemon.set(tq_s=0.3)
            self.daemon.wait_for(suspended, "A suspended, B running")
            self.daemon.set(tq_s=60)
            if suspended(self.daemon.status()):
                return

    def _reach_paged_out(self) -> None:
        self._runs(self.b)

    def _reach_paging_out(self) -> None:
        self._runs(self.a)
        self.daemon.gpu.copy_at(SLOW)
        self.daemon.set(tq_s=0.3)
        self.work(self.b)

    def _reach_paging_in(self) -> None:
        self._runs(self.b)
        self.daemon.gpu.copy_at(SLOW)
        self.daemon.set(tq_s=0.3)
        self.work(self.a)

    # --- deaths

    def kill(self, who: str) -> None:
        """Send SIGKILL to ``who``, and do what its environment does: systemd restarts ``kiwi
        daemon``, a user restarts the server."""
        getattr(self, "_kill_" + who.replace("-", "_"))()

    def _kill_kernel(self) -> None:
        self._forget_a()
        self.a.kill()
        self.daemon.gpu.copy_at(0)
        self.a.connect()

    def _kill_child(self) -> None:
        os.kill(self.child_pid, signal.SIGKILL)
        self.child_pid = 0
        self.daemon.gpu.copy_at(0)

    def _kill_daemon(self) -> None:
        old = self.daemon.pid()
        os.kill(old, signal.SIGKILL)
        self.daemon.gpu.copy_at(0)
        self.daemon.wait_answer(other_than=old)

    def _kill_supervisor(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.daemon.gpu.copy_at(0)
        self.daemon.start()

    def _kill_mover(self) -> None:
        """Kill all movers. The daemon continues, and starts others."""
        self._lose(self.daemon.movers())

    def _kill_busy_mover(self) -> None:
        """Kill the mover that moves memory, in the middle of its call."""
        logged = len(self.daemon.log())
        self._lose([wait_until(self._busy_mover, "a mover makes a long call")])
        wait_until(lambda: CUT_SHORT in self.daemon.log()[logged:], "its call is cut short")

    def _busy_mover(self) -> psutil.Process | None:
        """Return a mover that has waited for one answer of the driver for a while; most answers
        take a millisecond. A mover that is starting works, or waits for less time."""
        before = {mover: _doing(mover) for mover in self.daemon.movers()}
        time.sleep(LONG_S)
        for mover, doing in before.items():
            if makes_a_call(mover) and doing != RUNS and _doing(mover) == doing:
                return mover
        return None

    def _idle_movers(self) -> set[psutil.Process]:
        return {mover for mover in self.daemon.movers() if not makes_a_call(mover)}

    def _lose(self, movers: list[psutil.Process]) -> None:
        assert movers, "the daemon has no movers"
        self._same_daemon = self.daemon.pid()
        for mover in movers:
            mover.kill()
        self.daemon.gpu.copy_at(0)
        wait_until(
            lambda: len(self._idle_movers() - set(movers)) >= LEAST_MOVERS,
            "the daemon starts other movers", AGAIN_WITHIN_S,
        )  # fmt: skip

    def _kill_server(self) -> None:
        """Its kernels end with it: a second later each notices that its parent has ended."""
        assert self.lab.process is not None
        self._forget_a()
        self.a.hang_up()
        self.lab.process.kill()
        self.lab.process.wait()
        wait_until(lambda: not psutil.pid_exists(self.a.pid), "the kernel ends, too")
        self.daemon.gpu.copy_at(0)
        for path in Path(self.lab.env["JUPYTER_RUNTIME_DIR"]).iterdir():
            path.unlink()
        self.lab.start()

    def _forget_a(self) -> None:
        self.child_pid = 0
        self._working.pop(self.a, None)

    # --- afterwards

    def all_well(self, who: str) -> None:
        """Check that survivors have lost no byte, all can use the GPU, and nobody else has memory
        in it."""
        self.daemon.set(tq_s=0.3)
        for kernel in list(self._working):
            self.wait_beat(kernel)
        self.end_work()
        self._use(self.b, "INTACT")
        if who == "server":
            self._new_a()
        elif who == "kernel":
            self._fill_a()
        self._use(self.a, "INTACT INTACT" if self.child_pid else "INTACT")
        self._use(self.b, "INTACT")
        wait_until(self._only_the_living_hold, f"only they use the GPU: {self._told()}")
        if who in ("mover", "busy-mover"):
            assert self.daemon.pid() == self._same_daemon, "the daemon ended with its movers"

    def _use(self, kernel: Kernel, intact: str) -> None:
        assert kernel.check(family_cells.STEP).text == "stepped\n"
        assert kernel.check(family_cells.INTACT).text == f"{intact}\n"

    def _only_the_living_hold(self) -> bool:
        living = {self.a.pid, self.b.pid, self.child_pid} - {0}
        holding = {pid for pid, size in self.daemon.gpu.used_bytes().items() if size}
        return holding == living

    def _told(self) -> str:
        return f"{self.daemon.gpu.used_bytes()} of {self.a.pid, self.child_pid, self.b.pid}"

    def ready_again(self) -> None:
        """Prepare the next case: a child, a long quantum, fast copies."""
        if not self.child_pid:
            self._new_child()
        self.daemon.set(tq_s=60)

    def described(self) -> str:
        """Return a description for the report of a failure."""
        parts = [self.daemon.log()[-20_000:], str(self.daemon.status_or_none()), self._told()]
        for kernel in (self.a, self.b):
            alive = psutil.pid_exists(kernel.pid)
            parts.append(f"{kernel.pid} {'lives' if alive else 'is dead'}: {kernel.log()[-1500:]}")
        return "\n".join(parts)
