"""Real IPython kernels, driven from a test: start, run cells, interrupt, restart, kill.

``KIWI_TEST_KERNEL_PYTHON`` names the Python of the kernels (another environment with other
versions of IPython and ipykernel); by default it is the tests' own.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PATIENCE_S = 60.0
"""Time limit for what should take milliseconds: the machine may be busy."""

KERNEL_PYTHON = os.environ.get("KIWI_TEST_KERNEL_PYTHON") or sys.executable

_NOT_INHERITED = (
    "KIWI_DISABLE", "KIWI_GPU", "KIWI_PAGER", "KIWI_DAEMON_ARGS", "KIWI_RUN_SESSION",
    "JPY_SESSION_NAME",
    "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONSTARTUP", "XDG_RUNTIME_DIR",
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
SET_GRACE = """%%kiwi cpu
import kiwi_jupyter.kernel as _kiwi
_kiwi._loaded.config.daemon_grace_s = {seconds}
if _kiwi._loaded.session._client is not None:
    _kiwi._loaded.session._client._daemon_grace_s = {seconds}
del _kiwi
"""

EXTENSION = "--ext=kiwi_jupyter.kernel"
"""Option for a user who has Kiwi only on ``PYTHONPATH`` (docs/notebooks.md)."""

Message = dict[str, Any]


@dataclass
class Cell:
    """An execution and its messages so far; ``done`` once the kernel is idle again after it."""

    code: str
    msg_id: str
    messages: list[Message] = field(default_factory=list)
    reply: Message | None = None
    idle: bool = False
    sent_at_s: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        return self.idle and self.reply is not None

    @property
    def status(self) -> str:
        """Return ``ok``, ``error`` or ``aborted``."""
        assert self.reply is not None, "the cell is not done"
        return str(self.reply["content"]["status"])

    @property
    def error(self) -> str:
        """Return the name of the exception that ended the cell, or ""."""
        assert self.reply is not None, "the cell is not done"
        return str(self.reply["content"].get("ename", ""))

    def of_type(self, *kinds: str) -> list[Message]:
        return [m for m in self.messages if m["msg_type"] in kinds]

    def stream(self, name: str = "stdout") -> str:
        found = (m["content"] for m in self.of_type("stream"))
        return "".join(c["text"] for c in found if c["name"] == name)

    @property
    def text(self) -> str:
        return self.stream("stdout")

    @property
    def result(self) -> str | None:
        """Return ``text/plain`` of the last expression's display."""
        found = self.of_type("execute_result")
        return str(found[-1]["content"]["data"]["text/plain"]) if found else None

    @property
    def traceback(self) -> str:
        return "\n".join(line for m in self.of_type("error") for line in m["content"]["traceback"])

    def displays(self) -> list[str]:
        """Return the text of everything displayed or updated in place, in order. Kiwi's waiting
        lines are among it: an empty text takes one away."""
        found = self.of_type("display_data", "update_display_data", "comm_msg")
        data = [m["content"]["data"] for m in found]
        return [str(each.get("text/plain", each.get("text", ""))) for each in data]

    def outputs(self) -> list[Message]:
        """Return what a notebook would save: updates applied in place, streams joined."""
        saved: list[Message] = []
        by_display_id: dict[str, Message] = {}
        for message in self.messages:
            _apply(message, saved, by_display_id)
        return saved


def _apply(message: Message, saved: list[Message], by_display_id: dict[str, Message]) -> None:
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        if saved and saved[-1].get("name") == content["name"]:
            saved[-1]["text"] += content["text"]
        else:
            saved.append({"output_type": kind, **content})
    elif kind == "update_display_data":
        shown = by_display_id.get(content["transient"]["display_id"])
        if shown is not None:
            shown["data"] = content["data"]
    elif kind in ("display_data", "execute_result"):
        output = {"output_type": kind, "data": content["data"]}
        saved.append(output)
        display_id = content.get("transient", {}).get("display_id")
        if display_id:
            by_display_id[display_id] = output
    elif kind == "error":
        saved.append({"output_type": kind, **content})


class Kernel:
    """A running kernel; made by ``running_kernel``. Called from one thread."""

    def __init__(self, directory: Path, env: Mapping[str, str], python: str) -> None:
        self.directory = directory
        self.env = _with_pager(clean_environment(directory, python) | dict(env))
        self.manager = KernelManager(
            transport="ipc",
            ip=str(directory / "k"),
            connection_file=str(directory / "kernel-t.json"),
        )
        argv = [
            python,
            "-Xfrozen_modules=off",
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            *(() if installed(python) else (EXTENSION,)),
        ]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
        self._cells: dict[str, Cell] = {}
        self.client: Any = None
        self._log: BinaryIO | None = None

    # --- life

    def start(self) -> None:
        # The log stays open until the end, because a restart uses it again.
        self._log = (self.directory / "kernel.log").open("ab")
        self.manager.start_kernel(
            env=self.env, cwd=str(self.directory), stdout=self._log, stderr=self._log
        )
        self._open_client()

    def _open_client(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=PATIENCE_S)
        except RuntimeError as error:
            raise AssertionError(f"the kernel did not start: {self.log()}") from error

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    @property
    def alive(self) -> bool:
        return bool(self.manager.is_alive())

    def interrupt(self) -> None:
        """Send SIGINT, as the ■ button does."""
        self.manager.interrupt_kernel()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)

    def restart(self, *, now: bool = True) -> None:
        """Restart. ``now=False``: ask the kernel to shut down first, as Jupyter's ⟳ button does."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._open_client()

    def stop(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        if self._log is not None:
            self._log.close()
        context = self.manager.context
        context.destroy(linger=0)

    def log(self) -> str:
        """Return the output of the kernel's process itself (not of its cells)."""
        path = self.directory / "kernel.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- cells

    def send(
        self,
        code: str,
        *,
        subshell: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Cell:
        """Ask to run ``code`` without waiting. ``options`` are those of ``execute``."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        } | options
        message = self.client.session.msg("execute_request", content, metadata=dict(metadata or {}))
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        cell = Cell(code, message["header"]["msg_id"])
        self._cells[cell.msg_id] = cell
        return cell

    def to_widget(self, comm_id: str) -> Cell:
        """Send a message to a widget; what its callback shows is in the result."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm_id, "data": {}})
        self.client.shell_channel.send(message)
        callback = self._cells[message["header"]["msg_id"]] = Cell(
            f"the callback of {comm_id}", message["header"]["msg_id"]
        )
        return callback

    def run(self, code: str, timeout_s: float = PATIENCE_S, **options: Any) -> Cell:
        """Run ``code`` and wait until it is done."""
        return self.finish(self.send(code, **options), timeout_s)

    def check(self, code: str, **options: Any) -> Cell:
        """Like ``run``, for code that must not fail."""
        cell = self.run(code, **options)
        assert cell.status == "ok", f"{code!r} failed:\n{cell.traceback}\n{self.log()}"
        return cell

    def finish(self, cell: Cell, timeout_s: float = PATIENCE_S) -> Cell:
        self.until(lambda: cell.done, f"the end of {cell.code!r}", timeout_s)
        return cell

    def finished(self, cell: Cell) -> bool:
        """Return whether the cell is done, by the messages so far."""
        self.pump()
        return cell.done

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Process messages until ``condition()`` is true; return its value."""
        ends_at = time.monotonic() + timeout_s
        while True:
            self.pump()
            value = condition()
            if value:
                return value
            if time.monotonic() > ends_at:
                said = {cell.code: cell.outputs() for cell in self._cells.values()}
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{said}\n{self.log()}")

    def pump(self, timeout_s: float = 0.02) -> None:
        """Process the messages that the kernel has sent."""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=timeout_s)
            except queue.Empty:
                break
            self._take(message)
            timeout_s = 0
        while self.client.shell_channel.msg_ready():
            self._reply(self.client.get_shell_msg(timeout=PATIENCE_S))
        while self.client.stdin_channel.msg_ready():
            self._take(self.client.get_stdin_msg(timeout=PATIENCE_S))

    def _take(self, message: Message) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is None:
            return
        cell.messages.append(message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            cell.idle = True

    def _reply(self, message: Message) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None and message["msg_type"] == "execute_reply":
            cell.reply = message
            if message["content"]["status"] == "aborted":
                cell.idle = True

    def set_daemon_grace(self, seconds: float) -> None:
        """Change the setting ``daemon_grace_s``, for the present connection, too. A test that needs
        a short one sets it when the daemon is to be away: a busy machine may keep one that is there
        from answering for as long."""
        self.check(SET_GRACE.format(seconds=seconds))

    def ask(self, kind: str, content: Message, *, control: bool = False) -> Message:
        """Send another request (``complete_request``, ``inspect_request`` …) and return the
        reply."""
        message = self.client.session.msg(kind, content)
        channel = self.client.control_channel if control else self.client.shell_channel
        channel.send(message)
        ends_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_at:
            reply: Message = channel.get_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply
            self._reply(reply)
        raise AssertionError(f"no answer to {kind}")


def _with_pager(env: dict[str, str]) -> dict[str, str]:
    """Return ``env`` with the pager; import Kiwi only if the caller has not prepared ``env``, as
    black-box tests do."""
    if env.get("KIWI_PRELOAD") or not env.get("KIWI_PAGER"):
        return env
    import pagers

    return pagers.into(env)


def installed(python: str) -> bool:
    """Return whether kernels of this Python load Kiwi by themselves: a wheel installs the
    configuration for that, but a checkout on ``PYTHONPATH`` or ``pip install --target`` does
    not."""
    places = (Path(python).parents[1] / "etc", Path("/usr/local/etc"), Path("/etc"))
    return any((place / "ipython" / "ipython_kernel_config.py").exists() for place in places)


def clean_environment(directory: Path, python: str = KERNEL_PYTHON) -> dict[str, str]:
    """Return an environment with an empty home, so that no profile or configuration of the
    machine's user has an effect. If Kiwi is not installed, or ``PYTHONPATH`` names this checkout,
    the checkout and the packages on ``PYTHONPATH`` stay there."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    carried = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if not installed(python) or str(ROOT) in carried:
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *carried]))
    places = {
        "HOME": "home", "IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime", "KIWI_SOCKET_DIR": "sockets",
    }  # fmt: skip
    # The user's cache of compiled libraries, which ``make`` fills: a kernel that has to compile
    # Kiwi's gate runs without it for a minute, and a daemon that has to compile the driver is late.
    # The place is Kiwi's own, said again: the black-box tests import nothing of Kiwi.
    own = "/var/cache" if os.getuid() == 0 else os.path.expanduser("~/.cache")
    env.setdefault("XDG_CACHE_HOME", own)
    for name, place in places.items():
        (directory / place).mkdir(exist_ok=True, mode=0o700)
        env[name] = str(directory / place)
    return env


@contextmanager
def running_kernel(
    env: Mapping[str, str] | None = None, *, python: str = KERNEL_PYTHON, config: str = ""
) -> Iterator[Kernel]:
    """Run a kernel in an empty home, with ``env`` added; remove it and its files at the end.

    ``config`` is the text of the user's ``ipython_kernel_config.py``.
    """
    directory = Path(tempfile.mkdtemp(prefix="kiwi-kernel-"))
    kernel = Kernel(directory, env or {}, python)
    if config:
        profile = directory / "ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(config)
    try:
        kernel.start()
        yield kernel
    finally:
        kernel.stop()
        shutil.rmtree(directory, ignore_errors=True)
