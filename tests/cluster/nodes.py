"""Emulated machines, each with process ids, network, host name, /run, /tmp and /dev of its own, in
namespaces that end with the process that holds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PATH = "/opt/kiwi/bin:/usr/bin:/bin:/usr/sbin:/sbin"
COMMAND_WITHIN_S = 150.0
"""Limit for a command of a check: waits take seconds, a cold hub takes twenty."""


class Node:
    """One machine. ``work`` is the directory that all of them share."""

    def __init__(self, name: str, address: str, work: Path) -> None:
        self.name, self.address, self._work = name, address, work
        self._log = (work / f"{name}.log").open("ab")
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--net", "--pid", "--ipc", "--fork", "--kill-child",
             HERE / "node_init.sh", name, work],
            stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        until(lambda: self._child() != 0 and self._is_up(), f"{name} starts")
        self.pid = self._child()

    def _child(self) -> int:
        found = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        return int(found or 0)

    def _is_up(self) -> bool:
        return Path(f"/proc/{self._child()}/comm").read_text() == "sleep\n"

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p", "-i", "--"]

    def command(self, *command: object, user: str = "root", env: dict[str, str] | None = None,
                directory: str = "") -> list[str]:  # fmt: skip
        """Return the command line that runs ``command`` on this machine as ``user``."""
        home = "/root" if user == "root" else f"/home/{user}"
        settings = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": PATH}
        words = [f"{name}={value}" for name, value in {**settings, **(env or {})}.items()]
        as_user = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        return [
            *self._enter(), *(as_user if user != "root" else []), "env", "-i", *words,
            "sh", "-c", 'cd "$0" && exec "$@"', directory or (home if user != "root" else "/"),
            *map(str, command),
        ]  # fmt: skip

    def run(self, *command: object, user: str = "root", env: dict[str, str] | None = None,
            within_s: float = COMMAND_WITHIN_S) -> str:  # fmt: skip
        """Return what ``command`` says, on both outputs, whatever its exit status is."""
        try:
            done = subprocess.run(
                self.command(*command, user=user, env=env), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=within_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            text = said if isinstance(said, str) else said.decode(errors="replace")
            return f"{text}\n[no answer within {within_s:g} s]"
        return done.stdout

    def start(self, *command: object, user: str = "root", env: dict[str, str] | None = None,
              log: str = "", directory: str = "") -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a program that runs on; ``log`` is a file in the work directory."""
        output = (self._work / log).open("ab") if log else self._log
        return subprocess.Popen(
            self.command(*command, user=user, env=env, directory=directory),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    def status(self, *options: str) -> dict[str, Any]:
        """Return ``kiwi status --json`` of this machine; no GPUs if no daemon answers."""
        with suppress(ValueError):
            found: dict[str, Any] = json.loads(self.run("kiwi", "status", "--json", *options))
            return found
        return {"gpus": []}

    def gpu(self, index: int) -> dict[str, Any]:
        (found,) = (gpu for gpu in self.status()["gpus"] if gpu["index"] == index)
        return dict(found)

    def close(self) -> None:
        """End every process of the machine: its PID 1 goes first."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(30)
        self._log.close()


def connect(nodes: list[Node]) -> None:
    """Join the machines by a bridge on the first one, which leads nowhere else."""
    head, *others = nodes
    for words in (
        ["link", "add", "br0", "type", "bridge"],
        ["addr", "add", f"{head.address}/24", "dev", "br0"],
        ["link", "set", "br0", "up"],
    ):
        head.run("ip", *words)
    for node in others:
        subprocess.run(
            ["ip", "link", "add", f"v{node.name}", "netns", str(head.pid), "type", "veth",
             "peer", "name", "eth0", "netns", str(node.pid)], check=True,
        )  # fmt: skip
        head.run("ip", "link", "set", f"v{node.name}", "master", "br0", "up")
        node.run("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")


def start_kiwi(node: Node, gpus: str = "2x512MiB", *options: str) -> None:
    """Start the daemon as ``kiwi.service`` does, and list its GPUs as NVIDIA's module would."""
    node.run("install", "-d", "-m", "0755", "/run/kiwi")
    node.start(
        "kiwi", "daemon", "--socket-dir", "/run/kiwi", "--emulate", gpus, "--tq", "3",
        "--admin-group", "kiwi-admins", *options,
        env={"KIWI_STATE_DIR": "/var/lib/kiwi"}, log=f"kiwi.{node.name}.log",
    )  # fmt: skip
    until(lambda: len(node.status()["gpus"]) == 2, f"the daemon of {node.name}", 120)
    for gpu in node.status()["gpus"]:
        place = f"/proc/driver/nvidia/gpus/0000:0{gpu['index'] + 1}:00.0"
        facts = f"GPU UUID: \t {gpu['uuid']}\nDevice Minor: \t {gpu['index']}\n"
        node.run("sh", "-c", f"mkdir -p {place} && printf '%s' '{facts}' > {place}/information")


def until(condition: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    """Wait for ``condition``. Raise ``TimeoutError``, which names ``what``."""
    end_s = time.monotonic() + within_s
    while True:
        with suppress(OSError):
            if condition():
                return
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {within_s:g} s in vain: {what}")
        time.sleep(0.2)
