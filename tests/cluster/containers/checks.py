"""Two containers of one uid share a GPU through the socket that CDI hands in, see no name of each
other, and alter nothing of each other: with the machine's user ids and with their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[1]))

from verdict import Verdict, say

DEVICE = "kiwi-jupyter/socket=all"
KIWI = [sys.executable, "-m", "kiwi_core.cli"]
WORK = Path(__file__).parents[1] / "programs/gpu_work.py"
WITHIN_S = 300.0
LIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
"""Podman's own limits may be above those of this machine, and then cannot be set."""
KINDS = {
    "the machine's user ids": ([], []),
    "user ids of their own": (
        ["--uidmap", "0:200000:65536", "--gidmap", "0:200000:65536"],
        ["--uidmap", "0:300000:65536", "--gidmap", "0:300000:65536"],
    ),
}


class Engine:
    """Podman without a registry: the machine's directories are the root file system."""

    def __init__(self, top: Path) -> None:
        self.top, self.sockets = top, top / "sockets"
        self._root = top / "root"
        for name in "proc sys dev run tmp etc root home usr var/cache opt".split():
            (self._root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self._root / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(Path("/etc") / name, self._root / "etc")
        self._cdi = Path("/etc/cdi/kiwi-cluster.json")

    def install(self) -> None:
        spec = json.loads(run([*KIWI, "doctor", "--print", "cdi"]))
        (mount,) = spec["devices"][0]["containerEdits"]["mounts"]
        mount["hostPath"] = str(self.sockets)  # the machine's own /run/kiwi stays away
        self._cdi.parent.mkdir(exist_ok=True)
        self._cdi.write_text(json.dumps(spec))

    def remove(self) -> None:
        self._cdi.unlink(missing_ok=True)
        subprocess.run([*self._podman(), "rm", "--all", "--force", "--time", "0"],
                       capture_output=True)  # fmt: skip

    def _podman(self) -> list[str]:
        return [
            "podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--log-level", "error",
            "--root", str(self.top / "store"), "--runroot", str(self.top / "runroot"),
            "--storage-driver", "vfs",
        ]  # fmt: skip

    def _home(self) -> Path:
        """Return a new directory that every user of a container may write to."""
        home = Path(tempfile.mkdtemp(prefix="home-", dir=self.top))
        home.chmod(0o1777)
        return home

    def command(self, *words: str, user: str = "1000:1000", options: list[str]) -> list[str]:
        shown = [Path(sys.prefix), WORK.parent, Path("/usr"), Path("/var/cache/kiwi")]
        mounts = [word for path in shown for word in ("-v", f"{path}:{path}:ro")]
        # The state of the emulated GPU, which stands for the driver, is where the daemon says.
        return [
            *self._podman(), "run", "--rm", "--network", "none", *LIMITS, *options, "--user", user,
            "--device", DEVICE, *mounts, "-v", f"{self.sockets}:{self.sockets}",
            "-v", f"{self._home()}:/home", "--env", "HOME=/home", "--env", "TMPDIR=/home",
            "--env", f"PATH={sys.prefix}/bin:/usr/bin",
            "--rootfs", str(self._root), *words,
        ]  # fmt: skip

    def run(self, *words: str, **how: Any) -> str:
        return run(self.command(*words, **how))

    def start(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words, **how), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def run(command: list[str], **environment: str) -> str:
    """Return what ``command`` says, on both outputs, whatever its exit status is."""
    return subprocess.run(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WITHIN_S,
    ).stdout  # fmt: skip


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.1)


def sessions(text: str) -> list[dict[str, Any]]:
    return list(json.loads(text)["gpus"][0]["sessions"]) if text.startswith("{") else []


class Checks:
    def __init__(self, verdict: Verdict, engine: Engine) -> None:
        self._verdict, self._engine = verdict, engine

    def outside(self) -> list[dict[str, Any]]:
        return sessions(run([*KIWI, "status", "--json"], KIWI_SOCKET_DIR=str(self._engine.sockets)))

    def neighbours(self, kind: str) -> None:
        """Check what a container sees and gets while another one has a session."""
        mine, other = KINDS[kind]
        judge, engine = self._verdict.judge, self._engine
        nap = engine.start(*KIWI, "run", "--require", "--name", "secret", "--", "sleep", "100",
                           options=["--name", "first", *mine])  # fmt: skip
        try:
            until(lambda: self.outside() or nap.poll() is not None, "a session has joined")
            (session,) = self.outside() or [{}]
            good = session.get("name") == "secret"
            judge(f"{kind}: a container's program is a session, named for root", good, session)
            said = engine.run(*KIWI, "status", "--json", options=other)
            hidden = [(one["name"], one["pid"], one["mine"]) for one in sessions(said)]
            judge(f"{kind}: another container does not see its name",
                  hidden == [("another user", 0, False)], said)  # fmt: skip
            for user in ("1000:1000", "0:0"):
                said = engine.run(*KIWI, "suspend", str(session.get("id")), user=user,
                                  options=other)  # fmt: skip
                kept_out = [one["kept_out"] for one in self.outside()]
                judge(f"{kind}: user {user} of another one cannot suspend it", kept_out == [""],
                      said)  # fmt: skip
            said = engine.run(*KIWI, "set", "tq=7", user="0:0", options=other)
            judge(f"{kind}: root of a container changes no setting", "may change" in said, said)
            said = engine.run("touch", "/run/kiwi/x", user="0:0", options=other)
            judge(f"{kind}: the directory is read-only", "Read-only" in said, said)
        finally:
            subprocess.run([*engine._podman(), "kill", "first"], capture_output=True)
            said = nap.communicate(timeout=WITHIN_S)[0]
        until(lambda: not self.outside(), f"the session has left: {said}")

    def on_the_gpu(self, kind: str) -> None:
        """Check that the library for programs trusts the socket, too: its gate waits for turns."""
        mine, other = KINDS[kind]
        programs = [
            self._engine.start(*KIWI, "run", "--require", "--", sys.executable, str(WORK), "40",
                               "4", options=options) for options in (mine, other)
        ]  # fmt: skip
        seen: list[dict[str, Any]] = []

        def ended() -> bool:
            seen.extend(self.outside())
            return all(program.poll() is not None for program in programs)

        until(ended, "both programs have ended")
        said = "".join(program.communicate()[0] for program in programs)
        judge = self._verdict.judge
        good = said.count('"wrong": 0') == 2
        judge(f"{kind}: two containers share the GPU, every byte intact", good, said)
        used = [one for one in seen if one["resident_bytes"] >= 40 << 20]
        judge(f"{kind}: the daemon sees the memory of both", len({one["id"] for one in used}) == 2,
              seen[-2:])  # fmt: skip
        gated = bool(used) and all(one["guarded"] for one in used)
        judge(f"{kind}: a gate is in their programs", gated, used[-2:])


def main() -> int:
    verdict = Verdict()
    top = Path(tempfile.mkdtemp(prefix="kiwi-containers-"))
    top.chmod(0o755)
    engine = Engine(top)
    log = (top / "daemon.log").open("w")
    daemon = subprocess.Popen(
        [*KIWI, "daemon", "--socket-dir", engine.sockets, "--state-dir", top / "state",
         "--emulate", "1x64MiB", "--tq", "1"],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        until(lambda: list(engine.sockets.glob("GPU-*.sock")), "the daemon serves")
        engine.sockets.chmod(0o755)
        engine.install()
        checks = Checks(verdict, engine)
        for kind in KINDS:
            say(kind)
            checks.neighbours(kind)
            checks.on_the_gpu(kind)
    except Exception as error:  # noqa: BLE001 (the verdict says what was found until then)
        verdict.judge("the checks run to their end", False, f"{type(error).__name__}: {error}")
    finally:
        engine.remove()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(WITHIN_S)
        if verdict.failed:
            print((top / "daemon.log").read_text()[-2000:])
        shutil.rmtree(top)
    return verdict.close()


if __name__ == "__main__":
    sys.exit(main())
