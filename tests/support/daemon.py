"""A real ``kiwi daemon`` (supervisor and children) on emulated GPUs, for tests of the whole path.

All its files are in one short private directory (socket paths have 107 bytes); ``stop`` ends every
process that it started, whatever the test's result.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pagers import CHECKPOINT, PagerUnderTest
from patience import PATIENCE_S, die_with_the_test, wait_until

import kiwi_emulator as emulator
from kiwi_core.client import Client
from kiwi_core.sched.replay import JournalEntry, JournalHeader, decode_line
from kiwi_core.units import MIB
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.wire.messages import GpuStatus, SessionStatus


@dataclass
class Daemon:
    """``kiwi daemon --emulate SIZES ARGS…``; made by ``running_daemon``."""

    directory: Path
    sizes: str
    args: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    extra_env: dict[str, str] = field(default_factory=dict)
    pager: PagerUnderTest = CHECKPOINT
    """Pager of the kernels and programs beside the daemon."""
    _of_thread: threading.local = field(default_factory=threading.local, init=False, repr=False)

    @property
    def env(self) -> dict[str, str]:
        """Return the environment that leads a kernel or program to this daemon."""
        return {"KIWI_SOCKET_DIR": str(self.directory), **self.pager.env}

    @property
    def cuda_env(self) -> dict[str, str]:
        """Return the environment of a program that uses the emulated driver beside this daemon."""
        return self.env | emulator.environment(self.state_path, emulator.build())

    @property
    def log_path(self) -> Path:
        return self.directory / "daemon.log"

    @property
    def state_path(self) -> Path:
        """Return the path of the emulated GPUs' shared state."""
        return self.directory / "emulated-gpus"

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon and wait until all its sockets answer."""
        if "--emulate" in self.which():
            emulator.build()  # The daemon would compile it, and be late on a busy machine.
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kiwi_core.cli", "daemon", *self.which(), "--socket-dir",
                  str(self.directory), *self.args],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=die_with_the_test,
                env={**os.environ, **self.env, **self.extra_env},
            )  # fmt: skip
        self.wait_ready()

    def which(self) -> list[str]:
        """Return the option that selects the GPUs."""
        return ["--emulate", self.sizes]

    def gpus(self) -> int:
        return sum(1 for _ in emulator.parse_gpus(self.sizes))

    def wait_ready(self) -> None:
        try:
            wait_until(self._ready, "daemon ready")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.log()}") from None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def terminate(self, timeout_s: float = 90.0) -> int:
        """Send SIGTERM to the supervisor, as systemd does, and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    def kill_child(self, index: int = 0) -> int:
        """SIGKILL the daemon of GPU ``index``, which the supervisor starts again; return its old
        pid."""
        pid = self.status(index).daemon_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> None:
        """SIGKILL the supervisor and its daemons at once, as an out-of-memory killer might."""
        assert self.process is not None
        supervisor = psutil.Process(self.process.pid)
        family = supervisor.children(recursive=True)
        # All are stopped before the first is killed: a daemon whose supervisor ends would leave in
        # good order, and take its socket with it.
        for way in (psutil.Process.suspend, psutil.Process.kill):
            for process in (supervisor, *family):
                with suppress(psutil.NoSuchProcess):  # movers may end by themselves
                    way(process)
        self.process.wait()
        wait_until(lambda: all(map(_ended, family)), "its daemons end")

    def stop(self) -> None:
        """End everything, whatever the test has left behind."""
        if self.process is None or self.process.poll() is not None:
            return
        self.kill_all()

    # --- looking --------------------------------------------------------------------------------

    def sockets(self) -> list[Path]:
        return sorted(self.directory.glob("GPU-*.sock"))

    def client(self, index: int = 0) -> Client:
        """Return a connected observer; the caller closes it."""
        for path in self.sockets():
            client = Client(path, role=Role.OBSERVER, reconnect=False, connect_timeout_s=PATIENCE_S)
            if client.connect().gpu_index == index:
                return client
            client.close()
        raise AssertionError(f"no daemon of GPU {index}")

    def status(self, index: int = 0) -> GpuStatus:
        with self._observed() as observers:
            return observers.status(index)

    @contextmanager
    def _observed(self) -> Iterator[Observers]:
        """Ask by the same connections in this block: looking again and again by new ones takes
        the processor ten times as long as the answers."""
        found: Observers | None = getattr(self._of_thread, "observers", None)
        if found is not None:
            yield found
            return
        self._of_thread.observers = made = Observers(self)
        try:
            yield made
        finally:
            made.close()
            self._of_thread.observers = None

    def session(self, pid: int, index: int = 0) -> SessionStatus | None:
        return next((s for s in self.status(index).sessions if s.pid == pid), None)

    def resident_mib(self, pid: int) -> int:
        """Return what the daemon knows of the GPU memory of a session; 0 without the session."""
        session = self.session(pid)
        return session.resident_bytes // MIB if session else 0

    def wait_for(
        self, condition: Callable[[GpuStatus], Any], what: str, timeout_s: float = PATIENCE_S
    ) -> Any:
        """Return the first true value of ``condition(status)``, across restarts of the daemon."""
        last: GpuStatus | None = None

        def look() -> Any:
            nonlocal last
            try:
                last = self.status()
            except Exception:  # noqa: BLE001  (it may be restarting: that is what is waited for)
                return None
            return condition(last)

        try:
            with self._observed():
                return wait_until(look, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlast status: {last}\nlog:\n{self.log()}") from None

    def wait_state(self, pid: int, *states: str, timeout_s: float = PATIENCE_S) -> SessionStatus:
        """Wait until the session of process ``pid`` is in one of ``states``."""

        def look(status: GpuStatus) -> SessionStatus | None:
            session = next((s for s in status.sessions if s.pid == pid), None)
            return session if session and session.state.value in states else None

        found: SessionStatus = self.wait_for(look, f"session of {pid} in {states}", timeout_s)
        return found

    def set_tq(self, tq_s: float) -> None:
        client = self.client()
        try:
            client.set(tq_s=tq_s)
        finally:
            client.close()

    def in_a_long_turn(self, condition: Callable[[GpuStatus], Any], what: str) -> None:
        """Let turns change quickly until ``condition(status)`` holds, and make that turn last. The
        turn can change before the long quantum is set, so look again then."""
        while True:
            self.set_tq(0.3)
            self.wait_for(condition, what)
            self.set_tq(60.0)
            if condition(self.status()):
                return

    def books(self) -> Any:
        """Return the emulated driver's own books."""
        return emulator.books(self.state_path)

    def journal(self) -> list[JournalEntry]:
        """Return all entries that the daemons of GPU 0 recorded, oldest first, across restarts."""
        return [one for one in self.records() if not isinstance(one, JournalHeader)]

    def records(self) -> list[JournalHeader | JournalEntry]:
        """Return the journal with its headers."""
        current = sorted((self.directory / "state").glob("GPU-*.journal"))[0]
        numbered = [Path(f"{current}.{n}") for n in range(9, 0, -1)]
        return [
            decode_line(line)
            for path in [p for p in numbered if p.exists()] + [current]
            # Without the line that the daemon may be writing at this moment.
            for line in path.read_bytes().rpartition(b"\n")[0].splitlines()
        ]

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"daemon ended with {self.process.returncode}:\n{self.log()}")
        wanted = self.gpus()
        if len(self.sockets()) < wanted:
            return False
        try:
            return all(self.status(index) for index in range(wanted))
        except Exception:  # noqa: BLE001  (not yet)
            return False


class Observers:
    """Connections to a daemon's GPUs, made when they are needed and after the other end has
    closed them."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._clients: dict[int, Client] = {}

    def status(self, index: int) -> GpuStatus:
        client = self._clients.pop(index, None) or self._daemon.client(index)
        try:
            status = client.status(PATIENCE_S)
        except BaseException:
            client.close()
            raise
        self._clients[index] = client
        return status

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _ended(process: psutil.Process) -> bool:
    """Return whether the process has ended, even if its new parent has not waited for it yet: that
    may take seconds."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def running_daemon(
    sizes: str = "1x256MiB",
    *args: str,
    env: dict[str, str] | None = None,
    pager: PagerUnderTest = CHECKPOINT,
) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    daemon = Daemon(directory, sizes, args, extra_env=env or {}, pager=pager)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)


def as_json(status: Any) -> Any:
    """Return the status as JSON, for assertion messages."""
    return json.loads(json.dumps(status, default=str))
