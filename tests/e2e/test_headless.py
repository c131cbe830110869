"""Tests of kernels without a front end: notebooks executed by tools, kernels without a Jupyter
server, daemons that start by themselves, and the demo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ledger
import psutil
import pytest
from cli_process import finish, start_kiwi
from daemon import PATIENCE_S, Daemon, wait_until
from gpu_cells import INTACT, PRELUDE, take
from jupyter_client.blocking.client import BlockingKernelClient
from kernels import running_kernel
from notebooks import assert_books_agree

from kiwi_core import preload
from kiwi_core.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parents[2] / "examples"
NBCLIENT = "import sys; from nbclient.cli import main; sys.exit(main())"
CPU_ONLY = ("emulated_training.ipynb", "emulated_exploration.ipynb")


@pytest.fixture(autouse=True)
def empty_home(private_tmp: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """Use an empty home directory for everything that the test starts."""
    home = private_tmp / "home"
    stack.callback(shutil.rmtree, home)
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR",
                 "JUPYTER_RUNTIME_DIR"):  # fmt: skip
        place = home if name == "HOME" else home / name.lower()
        place.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(place))
    # Otherwise a kernel with an empty home compiles the library in the background.
    monkeypatch.setenv("KIWI_PRELOAD_LIBRARY", str(preload.library()))


def test_notebooks_executed_by_tools_side_by_side(
    make_daemon: Callable[..., Daemon], stack: ExitStack
) -> None:
    """nbclient executes one example, papermill the other. Both find their bytes unchanged, and the
    saved notebooks contain nothing of the waits."""
    daemon = make_daemon("1x128MiB", "--tq", "0.5")
    one, other = (EXAMPLES / name for name in CPU_ONLY)
    results = {
        daemon.directory / "one.ipynb": ["-c", NBCLIENT, str(one), "--output", "%"],
        daemon.directory / "other.ipynb": ["-m", "papermill", str(other), "%", "--no-progress-bar"],
    }
    (socket,) = daemon.sockets()
    with Client(socket, name="a third") as third:  # until both wait: one may be slow to start
        session = third.connect().session
        third.acquire()
        running = {
            path: _start([part.replace("%", str(path)) for part in command], daemon, stack)
            for path, command in results.items()
        }
        daemon.wait_for(lambda status: len(status.queue) == 2, "both wait for the GPU")
        third.end_burst()
        daemon.wait_for(lambda status: session not in status.holders, "its turn has ended")
        third.goodbye(PATIENCE_S)
    for path, process in running.items():
        result = finish(process)
        assert result.code == 0, result.err
        assert "INTACT: all " in _saved_text(path)
    read = ledger.read(daemon.journal())
    assert read.overlaps() == []
    assert any(way == "in" for _, way, _ in read.moved), "they were never in each other's way"
    daemon.wait_for(lambda status: not status.sessions, "both have left")
    assert_books_agree(daemon)


@pytest.mark.parametrize("name", CPU_ONLY)
def test_all_cells_of_an_example_can_be_run_again(
    make_daemon: Callable[..., Daemon], stack: ExitStack, name: str
) -> None:
    """The second run must not find the GPU full of what the first one has left."""
    daemon = make_daemon("1x128MiB")
    notebook = json.loads((EXAMPLES / name).read_text())
    again = [{**cell, "id": f"{cell['id']}-again"} for cell in notebook["cells"]]
    notebook["cells"] += again
    twice, result = daemon.directory / name, daemon.directory / "result.ipynb"
    twice.write_text(json.dumps(notebook))
    done = finish(_start(["-c", NBCLIENT, str(twice), "--output", str(result)], daemon, stack))
    assert done.code == 0, done.err
    assert _saved_text(result).count("INTACT: all ") == 2


def _start(arguments: list[str], daemon: Daemon, stack: ExitStack) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *arguments], env=os.environ | daemon.env, cwd=daemon.directory,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def _saved_text(path: Path) -> str:
    """Return the text of all outputs; fail if a part of a wait was saved."""
    texts = []
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text", "")))
            data = output.get("data", {})
            texts.append("".join(data.get("text/plain", "")))
            assert "text/html" not in data, data
            assert data.get("text/plain") != "", "an output that is empty"
    saved = "\n".join(texts)
    assert "Waiting for the GPU" not in saved
    return saved


def test_a_kernel_without_a_jupyter_server(
    make_daemon: Callable[..., Daemon], stack: ExitStack
) -> None:
    """VS Code starts kernels like this: ``python -m ipykernel_launcher`` with a connection file,
    TCP, no JPY_SESSION_NAME, and a silent cell that sets the notebook's name."""
    daemon = make_daemon("1x128MiB", "--tq", "0.5")
    file = daemon.directory / "kernel-v2-1.json"
    file.write_text(json.dumps(CONNECTION))
    process = _start(["-m", "ipykernel_launcher", f"--f={file}"], daemon, stack)
    _await_ports(process, file)
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    stack.callback(client.stop_channels)
    _await_ready(client, process)
    said: list[str] = []

    def run(code: str, **options: Any) -> str:
        said.clear()
        reply = client.execute_interactive(
            code, timeout=60, allow_stdin=False, output_hook=_collector(said), **options
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said)

    run("__vsc_ipynb_file__ = '/home/somebody/explore.ipynb'", silent=True)
    run(PRELUDE)
    run(take(75, 1))
    assert daemon.wait_state(process.pid, "idle").name == "explore.ipynb"
    with running_kernel(daemon.env) as other:
        other.check(PRELUDE)
        other.check(take(75, 2))
        daemon.wait_state(process.pid, "paged-out")
        assert run(INTACT) == "INTACT\n"
        assert other.check(INTACT).text == "INTACT\n"
    client.shutdown()
    try:
        finish(process)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{daemon.status()}\n{daemon.log()}") from None
    daemon.wait_for(lambda status: not status.sessions, "both have left")


PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
CONNECTION = {
    "ip": "127.0.0.1", "transport": "tcp", "key": "a-key", "signature_scheme": "hmac-sha256",
    **dict.fromkeys(PORTS, 0),
}  # fmt: skip
"""A connection file whose ports the kernel chooses: somebody else could take one that the test
chose before the kernel does."""


def _await_ports(process: subprocess.Popen[str], file: Path) -> None:
    """Wait until the kernel listens and has written its ports."""

    def listens() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            told = json.loads(file.read_text())
        except ValueError:
            return False  # it is writing
        return all(told[name] for name in PORTS)

    wait_until(listens, "the kernel listens", 90)


def _await_ready(client: BlockingKernelClient, process: subprocess.Popen[str]) -> None:
    """Wait for the kernel. On a busy machine a starting kernel may miss heartbeats, which the
    client takes for its death; so this checks the process itself."""
    ends_at_s = time.monotonic() + 90
    while True:
        try:
            return client.wait_for_ready(timeout=60)
        except RuntimeError:
            if process.poll() is not None or time.monotonic() > ends_at_s:
                raise


def _collector(said: list[str]) -> Callable[[dict[str, Any]], None]:
    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            said.append(message["content"]["text"])

    return collect


def test_two_kernels_start_one_daemon(private_tmp: Path, stack: ExitStack) -> None:
    """There is no daemon, and KIWI_DAEMON_ARGS gives its options. The first GPU cells of two
    kernels run at once and get the same daemon. When it is killed with its supervisor, the kernels
    start it again, although one of them is paged out. SIGTERM ends it; it leaves nothing and stays
    away."""
    daemon = Daemon(private_tmp / "run", "1x256MiB")
    stack.callback(shutil.rmtree, daemon.directory, ignore_errors=True)
    stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in _daemons()])
    env = daemon.env | {"KIWI_DAEMON_ARGS": "--emulate 1x256MiB --tq 0.5"}
    a, b = (stack.enter_context(running_kernel(env)) for _ in "ab")
    for kernel in (a, b):
        kernel.check("1 + 1")
    assert not daemon.sockets(), "a CPU cell starts no daemon"
    preludes = [kernel.send(PRELUDE) for kernel in (a, b)]
    for kernel, cell in zip((a, b), preludes, strict=True):
        assert kernel.finish(cell).status == "ok", cell.traceback
        assert not cell.stream("stderr")
    loads = [kernel.send(take(150, seed)) for seed, kernel in enumerate((a, b))]
    for kernel, cell in zip((a, b), loads, strict=True):
        assert kernel.finish(cell).status == "ok", cell.traceback
    for kernel in (a, b):
        assert kernel.check(INTACT).text == "INTACT\n"
    assert {session.pid for session in daemon.status().sessions} == {a.pid, b.pid}
    first = _one_daemon(daemon)
    # All are stopped before the first is killed: a supervisor starts its daemon again.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in first:
            os.kill(pid, number)
    wait_until(lambda: not first & _daemons() and _daemons(), "another is started", 90.0)
    for kernel in (a, b):
        assert kernel.check(INTACT).text == "INTACT\n"
    pid = daemon.status().daemon_pid
    (supervisor,) = _one_daemon(daemon) - {pid}
    os.kill(supervisor, signal.SIGTERM)
    wait_until(lambda: not _daemons(), "the daemon ends")
    assert not daemon.sockets()
    for kernel in (a, b):  # everything was brought back if possible; otherwise a message says so
        assert kernel.check("2 + 2").result == "4"


def _one_daemon(daemon: Daemon) -> set[int]:
    """Wait until there is only one daemon; return its pid and its supervisor's. For a moment, a
    process that one of them starts looks like it."""

    def found() -> set[int] | None:
        pid = daemon.status().daemon_pid
        supervisor = psutil.Process(pid).parent()
        pair = {pid, supervisor.pid} if supervisor else set()
        return pair if _daemons() == pair else None

    one: set[int] = wait_until(found, "one daemon and its supervisor")
    return one


def _daemons() -> set[int]:
    """Return the pids of this test's ``kiwi daemon`` processes, found by their environment."""
    mark = os.environ["KIWI_E2E_TEST"]
    found = set()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if "daemon" in " ".join(command) and process.environ().get("KIWI_E2E_TEST") == mark:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(180)
def test_the_demo_ends_with_a_good_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is left open is told to stderr, which must stay empty: a traceback after the verdict
    # looks like a failure.
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    process = start_kiwi(
        "demo", "--headless", "--emulate", "--size", "256MiB", "--tq", "0.5", "--copy-rate", "1GiB"
    )
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    assert "VERDICT: GOOD (on an EMULATED GPU)" in out
    assert err == ""
