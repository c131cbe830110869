"""The daemon with the options, the capabilities and the read-only root that the chart gives it:
programs of two other users share an emulated GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chart_checks import IMAGE
from objects import Object, containers

import kiwi_emulator as emulator
from kiwi_core.preload import ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from verdict import Verdict

WITHIN_S: Final = 120.0
USERS: Final = (1000, 1001)
KIWI: Final = [sys.executable, "-m", "kiwi_core.cli"]
WORK: Final = Path(__file__).parents[1] / "programs/gpu_work.py"
CACHE: Final = {"XDG_CACHE_HOME": "/var/cache"}
"""Root's cache, which has the libraries of all: an image has them, too."""

ROOT: Final = """\
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/kiwi
mkdir -p /var/lib/kiwi
mount -t tmpfs -o mode=0755 tmpfs /var/lib/kiwi
mount --bind /tmp /tmp
mount -o remount,bind,ro /
exec "$@"
"""
"""What the pod mounts: the sockets, the state and /tmp can be written, and nothing else."""


class Pod:
    """The container ``daemon`` of the chart, as far as namespaces and capabilities go."""

    def __init__(self, container: Object, log: Path) -> None:
        rights = container["securityContext"]["capabilities"]
        assert rights["drop"] == ["ALL"]
        kept = ",".join(["-all", *(f"+{name.lower()}" for name in rights["add"])])
        command = [*container["command"], *container["args"]]
        assert command[0] == "kiwi"
        self._log = log.open("w")
        self._process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", ROOT, "sh",
             "setpriv", "--no-new-privs", "--bounding-set", kept, "--inh-caps", kept,
             *KIWI, *command[1:]],
            env={**os.environ, **CACHE}, stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def enter(self, *words: object, user: int = 0) -> list[str]:
        who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [
            "nsenter", "-t", str(self._process.pid), "-m", "--", *(who if user else []),
            *map(str, words),
        ]  # fmt: skip

    def run(self, *words: object, user: int = 0) -> str:
        return subprocess.run(
            self.enter(*words, user=user), env={**os.environ, **CACHE}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=WITHIN_S,
        ).stdout  # fmt: skip

    def start(self, *words: object, user: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.enter(*words, user=user), env={**os.environ, **CACHE, "HOME": "/tmp"}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def gpus(self) -> list[dict[str, Any]]:
        said = self.run(*KIWI, "status", "--json", "--socket-dir=/run/kiwi")
        return list(json.loads(said.splitlines()[0])["gpus"]) if said.startswith("{") else []

    def capabilities(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
        return int(line.split()[1], 16)

    def is_there(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(WITHIN_S)


def check_daemon(verdict: Verdict) -> None:
    emulator.build()
    ready.ensure()
    options = ["--emulate=1x64MiB", "--tq=1"]
    container = containers({**IMAGE, "daemon": {"options": options}})["daemon"]
    with tempfile.TemporaryDirectory(prefix="kiwi-kubernetes-") as place:
        log = Path(place) / "daemon.log"
        pod = Pod(container, log)
        try:
            _until(lambda: pod.gpus() or not pod.is_there(), "the daemon serves")
            _check(verdict, pod)
        finally:
            status = pod.end()
            verdict.judge("SIGTERM ends it", status == 0, log.read_text())


def _check(verdict: Verdict, pod: Pod) -> None:
    rights = pod.capabilities()
    verdict.judge("it has three capabilities", rights.bit_count() == 3, f"{rights:x}")
    said = pod.run("touch", "/etc/kiwi")
    verdict.judge("its root is read-only", "Read-only" in said, said)
    metrics = pod.run("curl", "-s", "http://127.0.0.1:9402/metrics")
    verdict.check("its metrics answer", metrics, r"^kiwi_up\{.*\} 1")
    programs = [
        pod.start(*KIWI, "run", "--require", "--", sys.executable, WORK, 40, 4, user=user)
        for user in USERS
    ]
    moved = []

    def ended() -> bool:
        moved.extend(one["suspensions"] for gpu in pod.gpus() for one in gpu["sessions"])
        return all(program.poll() is not None for program in programs)

    _until(ended, "both programs have ended")
    said = "".join(program.communicate()[0] for program in programs)
    intact = said.count('"wrong": 0') == len(USERS)
    verdict.judge("programs of two users share the GPU, every byte intact", intact, said)
    verdict.judge("one was suspended in its middle", any(moved), moved[-4:])


def _until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.2)
