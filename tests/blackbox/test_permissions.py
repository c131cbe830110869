"""Tests that each file, socket and directory of Kiwi has the owner and the mode in
docs/security.md, whatever the umask is."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_cells
import psutil
import pytest
from daemon_box import DaemonBox
from installed import KIWI
from kernels import running_kernel
from lab import running_lab
from leftovers import nothing_left
from made_files import Row, found_in, rows, wrong
from patience import wait_until
from served_kernel import ServedKernel
from somebody import ALICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

UMASKS = (0o000, 0o077)
ROOT = os.geteuid() == 0
BUILT_WITHIN_S = 300.0
COMES_WITHIN_S = 120.0
ENDS_WITHIN_S = 150.0
"""A kernel whose memory is out has a minute to end, and a daemon has half a minute."""

pytestmark = pytest.mark.timeout(2 * BUILT_WITHIN_S)

needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


@pytest.fixture(autouse=True)
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with nothing_left(monkeypatch) as directory:
        directory.chmod(0o755)
        yield directory


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def judge(table: list[Row], places: Mapping[str, Path], uid: int, *, root: bool) -> set[str]:
    """Check everything that exists against the table, and return its names."""
    made = list(found_in(places))
    told = [said for one in made if (said := wrong(one, table, uid, root=root))]
    assert not told, "\n".join(told)
    return {one.name for one in made}


@contextmanager
def base(uid: int) -> Iterator[Path]:
    """Return a directory of the user that others may read."""
    directory = Path(tempfile.mkdtemp(prefix="p"))
    directory.chmod(0o755)
    os.chown(directory, uid, -1)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """Build a cache with ``kiwi bench`` under the umask 000; return it and what it wrote."""
    with base(os.geteuid()) as directory, umask(0o000):
        env = {**os.environ, "XDG_CACHE_HOME": str(directory / "above" / "cache")}
        # Only the modes of the files matter, so the compiler does not spend its time on optimizing.
        # Where there is none, Kiwi has one of its own.
        if found := shutil.which(os.environ.get("CC") or "cc"):
            compiler = directory / "cc"
            compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(found)} "$@" -O0\n')
            compiler.chmod(0o755)
            env["CC"] = str(compiler)
        done = subprocess.run(
            [KIWI, "bench", "--emulate", "1x96MiB", "--json", directory / "bench.json"],
            env=env | {"TMPDIR": str(directory)}, timeout=BUILT_WITHIN_S, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        yield directory


def cache_of(built: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(built / "above" / "cache")}


def test_the_cache_and_the_results(built: Path, table: list[Row]) -> None:
    """Programs load code from the cache."""
    places = {"above": built / "above", "cache": built / "above" / "cache" / "kiwi"}
    places["FILE"] = built / "bench.json"
    seen = judge(table, places, os.geteuid(), root=ROOT)
    assert sum(name.endswith(".so.1") for name in seen) == 2, seen
    assert any(name.endswith("libkiwi_preload.so") for name in seen), seen


@pytest.mark.parametrize("mask", UMASKS, ids="{:03o}".format)
def test_results_of_a_simulation(mask: int, table: list[Row]) -> None:
    with base(os.geteuid()) as directory, umask(mask):
        subprocess.run(
            [KIWI, "simulate", "--mix", "notebooks", "--hours", "0.02",
             "--json", directory / "s.json", "--svg", directory / "s.svg"],
            check=True, timeout=60, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for name in ("s.json", "s.svg"):
            judge(table, {"FILE": directory / name}, os.geteuid(), root=ROOT)


UNTIL = {
    "demo --headless": ("*.roster", "kernel-B-ipc-*"),
    "bench --emulate 1x256MiB": ("emulated-gpus.d/*", "*.roster"),
}
"""For each command, the files after which its directory is judged."""


@pytest.mark.parametrize("command", UNTIL)
def test_files_that_a_command_makes_are_private(
    command: str, built: Path, table: list[Row]
) -> None:
    with base(os.geteuid()) as directory, umask(0o000):
        process = subprocess.Popen(
            [KIWI, *command.split()],
            env={**os.environ, **cache_of(built), "TMPDIR": str(directory)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for last in UNTIL[command]:
                wait_until(lambda last=last: list(directory.rglob(last)), last, COMES_WITHIN_S)
                (own,) = directory.glob("kiwi-*")
                judge(table, {command.split()[0]: own}, os.geteuid(), root=ROOT)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(ENDS_WITHIN_S)


@pytest.mark.parametrize("mask", UMASKS, ids="{:03o}".format)
def test_a_user_whose_notebook_starts_the_daemon(mask: int, built: Path, table: list[Row]) -> None:
    """A user of the machine runs a Jupyter server, whose first kernel starts the daemon."""
    uid = ALICE if ROOT else os.geteuid()
    with base(uid) as directory, umask(mask), ExitStack() as stack:
        sockets = directory / "above" / "kiwi"
        preload_log = directory / "preload.log"
        env = {
            "KIWI_SOCKET_DIR": str(sockets), "KIWI_DAEMON_ARGS": "--emulate 1x64MiB",
            "KIWI_PAGER": "inprocess", "KIWI_PRELOAD_LOG": str(preload_log), **cache_of(built),
        }  # fmt: skip
        stack.callback(end_daemon, sockets)
        server = stack.enter_context(running_lab(env, app="server", uid=uid if ROOT else None))
        server.rest("GET", "kiwi/api/status")
        kernel = ServedKernel(server, "secret.ipynb")
        kernel.check(gpu_cells.PRELUDE)
        kernel.check(gpu_cells.take(8, 1))
        kernel.check("%kiwi release")
        wait_until(lambda: list(sockets.glob("state/*.usage")), "the usage is written")
        places = {"above": directory / "above", "sockets": sockets, "state": sockets / "state"}
        seen = judge(table, {**places, "KIWI_PRELOAD_LOG": preload_log}, uid, root=False)
        for name in ("sockets/daemon.log", "sockets/start.lock", "sockets/emulated-gpus"):
            assert name in seen
        for kind in ("journal", "roster", "usage"):
            assert any(name.endswith(f".{kind}") for name in seen), kind
        left = [path.name for path in (server.directory / "tmp").iterdir()]
        assert not [name for name in left if "kiwi" in name], left
        kernel.stop()


def end_daemon(sockets: Path) -> None:
    """End the daemon that a notebook has started, which is no child of this process."""
    for lock in sockets.glob("GPU-*.lock"):
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(int(lock.read_text()))
            supervisor = daemon.parent()
            assert supervisor is not None
            assert "daemon" in supervisor.cmdline(), supervisor
            supervisor.terminate()
            psutil.wait_procs([daemon, supervisor], timeout=ENDS_WITHIN_S)


def initialise(sockets: Path, built: Path, uid: int) -> None:
    """Initialise root's emulated driver as another user."""
    (library,) = (built / "above/cache/kiwi").glob("emulator-*/libcuda.so.1")
    # The user may read this Python, wherever it is; this gives no right to write.
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    code = f"import ctypes; raise SystemExit(ctypes.CDLL({str(library)!r}).cuInit(0))"
    subprocess.run(
        ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *reads,
         sys.executable, "-c", code],
        env={**os.environ, "KIWI_EMULATOR_STATE": str(sockets / "emulated-gpus")}, check=True,
        timeout=60,
    )  # fmt: skip


@needs_root
@pytest.mark.parametrize("mask", UMASKS, ids="{:03o}".format)
def test_a_root_daemon(mask: int, built: Path, table: list[Row]) -> None:
    """systemd starts it like this for everybody, in a directory that does not exist."""
    with base(0) as directory, umask(mask), ExitStack() as stack:
        sockets, state = directory / "above" / "kiwi", directory / "elsewhere" / "state"
        args = ("--state-dir", str(state), "--tq", "0.3")
        box = DaemonBox(sockets, "1x64MiB", args)
        box.log_path = directory / "its.log"
        stack.callback(box.close)
        for name, value in cache_of(built).items():
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(name, value)
        box.start()
        kernels = [stack.enter_context(running_kernel(box.env)) for _ in range(2)]
        for number, kernel in enumerate(kernels):
            kernel.check(gpu_cells.PRELUDE)
            kernel.check(gpu_cells.take(36, number))
        for kernel in kernels:
            assert kernel.check(gpu_cells.INTACT).text == "INTACT\n"
        places = {"above": directory / "above", "sockets": sockets, "state": state}
        seen = judge(table, places, 0, root=True)
        assert any(name.endswith(".roster") for name in seen), seen
        as_alice = ("setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups")
        subprocess.run([*as_alice, "ls", sockets], check=True, stdout=subprocess.DEVNULL)
        initialise(sockets, built, ALICE)
        for kernel in kernels:
            kernel.stop()
        assert box.leave() == 0, box.log()
