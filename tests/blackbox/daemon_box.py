"""``kiwi daemon`` as its users see it: the command, its sockets, the wire. Nothing of Kiwi is
imported."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from emulated_gpu import EmulatedGpu
from installed import KIWI, end
from patience import die_with_the_test, wait_until
from talker import Talker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MOVER = "kiwi_core.movers"
"""The argument that names a mover: a worker process that calls the driver for a daemon."""

READY_WITHIN_S = 120.0
"""The emulated driver may have to be compiled first."""

LEAVES_WITHIN_S = 90.0
"""A daemon brings all memory back before it leaves."""


class DaemonBox:
    """One ``kiwi daemon`` on emulated GPUs with its own short directory (the path of a socket has
    107 bytes), seen from GPU number ``index``."""

    def __init__(
        self, directory: Path, sizes: str, args: Sequence[str] = (), index: int = 0
    ) -> None:
        self.directory = directory
        self.log_path = directory / "daemon.log"
        self._index = index
        self._command = [
            str(KIWI), "daemon", "--emulate", sizes, "--socket-dir", str(directory), *args,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self._talker: Talker | None = None
        self._gpu: EmulatedGpu | None = None

    @property
    def env(self) -> dict[str, str]:
        """Return the environment that leads programs to it."""
        return {"KIWI_SOCKET_DIR": str(self.directory)}

    @property
    def gpu(self) -> EmulatedGpu:
        if self._gpu is None:
            self._gpu = EmulatedGpu(self.directory / "emulated-gpus")
        return self._gpu

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # --- life

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=die_with_the_test,
                env={**os.environ, **self.env},
            )  # fmt: skip
        self.wait_answer()

    def wait_answer(self, other_than: int = 0) -> int:
        """Return the pid of the GPU's daemon process, once it answers and is not ``other_than``."""

        def look() -> int:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended: {self.process.returncode}\n{self.log()}")
            pid = int((self.status_or_none() or {}).get("daemon_pid", 0))
            return pid if pid != other_than else 0

        return int(wait_until(look, "an answer of the daemon", READY_WITHIN_S))

    def pid(self) -> int:
        """Return the pid of the GPU's daemon process, a child of ``kiwi daemon``."""
        return int(self.status()["daemon_pid"])

    def movers(self) -> list[psutil.Process]:
        """Return its workers that call the driver, by pid."""
        family = psutil.Process(self.pid()).children(recursive=True)
        return sorted((one for one in family if _is_mover(one)), key=lambda one: one.pid)

    def leave(self) -> int:
        """Send SIGTERM, as systemd does; return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(LEAVES_WITHIN_S)

    def close(self) -> None:
        """End everything, whatever its state."""
        self._hang_up()
        if self._gpu is not None:
            self._gpu.close()
        if self.process is not None:
            end(self.process)

    # --- the wire

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to one request of an observer, whichever daemon runs now."""
        try:
            if self._talker is None:
                self._talker = self._dial()
            return self._talker.ask(kind, **fields)
        except BaseException:  # half an answer may be left in the connection
            self._hang_up()
            raise

    def _dial(self) -> Talker:
        """Connect an observer to this GPU's daemon. Raises ``OSError`` if there is none yet."""
        for path in sorted(self.directory.glob("GPU-*.sock")):
            try:
                talker = Talker(path)
            except ConnectionRefusedError:
                continue  # the socket of a killed daemon
            try:
                if talker.hello().get("gpu_index") == self._index:
                    return talker
            except BaseException:
                talker.close()
                raise
            talker.close()
        raise FileNotFoundError(f"no daemon of GPU {self._index} in {self.directory}")

    def status(self) -> dict[str, Any]:
        """Return one element of ``gpus`` of ``kiwi status --json``; this survives a restart."""
        found: dict[str, Any] = wait_until(self.status_or_none, f"a status; {self.log()[-2000:]}")
        return found

    def status_or_none(self) -> dict[str, Any] | None:
        try:
            answer = self.ask("get-status")
        except (OSError, ValueError, AssertionError):
            return None
        gpu: dict[str, Any] | None = answer.get("gpu")
        return gpu

    def wait_for(
        self, condition: Callable[[dict[str, Any]], Any], what: str, within_s: float = 60.0
    ) -> Any:
        """Wait until ``condition(status)`` is true, and return it."""
        last: list[Any] = [None]

        def look() -> Any:
            last[0] = self.status_or_none() or last[0]
            return condition(last[0]) if last[0] else None

        try:
            return wait_until(look, what, within_s)
        except AssertionError as error:
            told = json.dumps(last[0])
            raise AssertionError(f"{error}\n{told}\n{self.log()[-6000:]}") from None

    def session(self, pid: int) -> dict[str, Any] | None:
        return next((s for s in self.status()["sessions"] if s["pid"] == pid), None)

    def wait_state(self, pid: int, *states: str) -> None:
        self.wait_for(
            lambda status: any(
                s["pid"] == pid and s["state"] in states for s in status["sessions"]
            ),
            f"session of {pid} in {states}",
        )

    def set(self, **settings: Any) -> None:
        answer = wait_until(lambda: self._try_set(settings), "the setting is taken")
        assert answer["type"] == "ok", answer

    def _try_set(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self.ask("set", **settings)
        except (OSError, ValueError, AssertionError):
            return None

    @contextmanager
    def beside(self, index: int) -> Iterator[DaemonBox]:
        """Return the same ``kiwi daemon``, seen from another of its GPUs."""
        other = DaemonBox(self.directory, "", index=index)
        other.process = self.process
        other.wait_answer()
        try:
            yield other
        finally:
            other._hang_up()

    def _hang_up(self) -> None:
        if self._talker is not None:
            self._talker.close()
            self._talker = None


def _is_mover(process: psutil.Process) -> bool:
    try:
        return MOVER in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def system_call(process: psutil.Process) -> str:
    """Return the number and the arguments of the system call in which ``process`` waits; "running"
    if it waits in none, "" if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/syscall").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def makes_a_call(mover: psutil.Process) -> bool:
    """Return whether ``mover`` does anything but wait for a request on its standard input.

    A mover that was just started counts too, because it initialises the driver.
    """
    doing = system_call(mover).split()
    return bool(doing) and doing[1:2] != ["0x0"]


@contextmanager
def running_daemon(sizes: str = "1x128MiB", *args: str) -> Iterator[DaemonBox]:
    """Run a daemon; it and its files are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kw-", ignore_cleanup_errors=True) as directory:
        box = DaemonBox(Path(directory), sizes, args)
        with closing(box):
            box.start()
            yield box
