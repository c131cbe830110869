"""Tests of ``kiwi run`` against a scripted daemon: waits, the program's life, signals, exit
codes."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from cli_process import PATIENCE_S, finish
from scripted_daemon import eventually

from kiwi_core import config, preallocation
from kiwi_core.cli import child, exits, run
from kiwi_core.cli.wait_line import TerminalWaitLine
from kiwi_core.states import Notice
from kiwi_core.wire.messages import (
    Acquire,
    Emulation,
    EndBurst,
    Granted,
    Hello,
    Role,
    UserNotice,
    Waiting,
    Welcome,
    Withdraw,
)

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


@pytest.fixture
def no_gpu(monkeypatch):
    """Hide this machine's GPU, so that no real daemon is started."""
    monkeypatch.setattr(config, "gpu_possible", lambda: False)


def test_a_program_is_one_burst_of_one_session(spawn, daemon):
    result = finish(spawn("run", "--name", "nightly", *python("print('hello')")))
    assert (result.code, result.out, result.err) == (0, "hello\n", "")
    (hello,) = daemon.received(Hello)
    assert (hello.role, hello.name) == (Role.SESSION, "nightly")
    (acquired,) = daemon.received(Acquire)
    (ended,) = daemon.await_received(EndBurst)
    assert ended.burst == acquired.burst


def test_the_name_is_the_command_unless_given(spawn, daemon):
    finish(spawn("run", "--", "true", "--fast"))
    assert daemon.received(Hello)[0].name == "true --fast"


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_codes_are_passed_on(spawn, daemon, code):
    assert finish(spawn("run", *python(f"raise SystemExit({code})"))).code == code


def test_a_signal_that_ends_the_program_is_128_and_more(spawn, daemon):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert finish(spawn("run", *python(code))).code == exits.of_signal(signal.SIGKILL)


def test_the_program_starts_only_when_the_gpu_is_granted(spawn, scripted, tmp_path):
    daemon = scripted(grants=False)
    started = tmp_path / "started"
    process = spawn("run", *python(f"open({str(started)!r}, 'w')"))
    (acquired,) = daemon.await_received(Acquire)
    daemon.peer.say(Waiting(burst=acquired.burst, position=1, ahead=1))
    assert not started.exists()
    daemon.peer.say(Granted(burst=acquired.burst, quantum_s=1.0))
    assert finish(process).code == 0
    assert started.exists()


def test_waiting_is_told_in_a_log(spawn, scripted):
    daemon = scripted(grants=False)
    process = spawn("run", "--", "true")
    (acquired,) = daemon.await_received(Acquire)
    line = ""
    while not line:  # nothing is printed in the first moments
        daemon.peer.say(Waiting(burst=acquired.burst, position=2, ahead=1, holder="train.ipynb"))
        if select.select([process.stderr], [], [], 0.2)[0]:
            line = process.stderr.readline()
    assert "2nd in line, train.ipynb has it" in line
    daemon.peer.say(Granted(burst=acquired.burst, quantum_s=1.0))
    assert "The GPU is yours, after" in finish(process).err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_giving_up_while_waiting_frees_the_place(spawn, scripted, tmp_path, number, code):
    daemon = scripted(grants=False)
    started = tmp_path / "started"
    process = spawn("run", *python(f"open({str(started)!r}, 'w')"))
    daemon.await_received(Acquire)
    process.send_signal(number)
    result = finish(process)
    assert (result.code, result.out) == (code, "")
    assert "Traceback" not in result.err
    eventually(lambda: daemon.received(Withdraw) or daemon.peer.ended)
    assert not started.exists()


# print() must not be called again by a handler that interrupts it.
TRAP = """
import os, signal, sys, time
def got(number, frame):
    os.write(1, f"got {number:d}\\n".encode())
    if number != signal.SIGUSR1:
        sys.exit(9)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, got)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_are_passed_on_to_the_program(spawn, daemon, number):
    process = spawn("run", *python(TRAP))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == f"got {int(signal.SIGUSR1)}\n"
    process.send_signal(number)
    result = finish(process)
    assert (result.code, result.out) == (9, f"got {int(number)}\n")
    daemon.await_received(EndBurst)


INTERRUPTED_ONCE = """
import os, signal, time
times = []
def got(number, frame):
    times.append(number)
    os.write(1, b"INTERRUPTED\\n")
signal.signal(signal.SIGINT, got)
print("ready", flush=True)
while not times:
    time.sleep(0.05)
time.sleep(0.5)  # a second one would come now
"""


def test_ctrl_c_on_the_terminal_reaches_the_program_once(daemon):
    """On a real terminal, Ctrl-C goes to the whole foreground group, and must not arrive twice."""
    command = [sys.executable, "-m", "kiwi_core.cli", "run", *python(INTERRUPTED_ONCE)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    seen = b""
    interrupted = False
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # EIO: all processes at the other end have ended
            break
        if b"ready" in seen and not interrupted:
            os.write(terminal, b"\x03")
            interrupted = True
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert seen.count(b"INTERRUPTED") == 1, seen
    assert os.waitstatus_to_exitcode(status) == 0, seen


def test_programs_get_default_signals_and_no_inherited_blocks(spawn, daemon):
    # Not Python, which ignores SIGPIPE by itself.
    result = finish(spawn("run", "--", "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"))
    values = dict(line.split(":\t") for line in result.out.splitlines())
    ignored = int(values["SigIgn"], 16)
    assert int(values["SigBlk"], 16) == 0
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    assert not ignored & 1 << (signal.SIGINT - 1)


def test_a_program_that_is_not_there_is_127_and_nobody_is_bothered(spawn, daemon):
    result = finish(spawn("run", "--", "no-such-program-anywhere"))
    assert result.code == exits.NOT_FOUND
    assert "was not found" in result.err
    assert daemon.received(Acquire) == []


def test_a_file_that_cannot_be_executed_is_126(spawn, daemon, tmp_path):
    (tmp_path / "data").write_text("x")
    result = finish(spawn("run", "--", str(tmp_path / "data")))
    assert result.code == exits.CANNOT_EXECUTE
    assert "cannot be executed" in result.err


def test_a_broken_interpreter_line_is_126_and_ends_the_burst(spawn, daemon, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = finish(spawn("run", "--", str(script)))
    assert result.code == exits.CANNOT_EXECUTE
    daemon.await_received(EndBurst)


def test_no_command_is_a_usage_error(kiwi, sockets):
    result = kiwi("run")
    assert result.code == exits.USAGE
    assert "kiwi run --" in result.err


def test_without_a_daemon_it_runs_all_the_same_and_says_so(spawn, sockets):
    if config.gpu_possible():
        pytest.skip("on a machine with a GPU a daemon would be started")
    result = finish(spawn("run", *python("print('ran'); raise SystemExit(5)")))
    assert (result.code, result.out) == (5, "ran\n")
    assert "runs without Kiwi" in result.err


def test_require_fails_without_a_daemon(kiwi, sockets, no_gpu):
    result = kiwi("run", "--require", "--", "true")
    assert result.code == exits.FAILED
    assert "No Kiwi daemon" in result.err


def test_a_socket_left_by_a_dead_daemon_is_passed_over(kiwi, scripted, no_gpu):
    dead = scripted("GPU-1")
    dead.stop()
    result = kiwi("run", "--require", "--", "true")
    assert result.code == exits.FAILED
    assert "No Kiwi daemon" in result.err
    alive = scripted("GPU-2")
    assert kiwi("run", "--require", "--", "true").code == 0
    assert alive.await_received(EndBurst)


def test_the_program_sees_the_leased_gpu_and_knows_it_is_in_a_session(spawn, daemon):
    env = json.loads(finish(spawn("run", *python(SHOW_ENVIRONMENT))).out)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert env["KIWI_DISABLE"] == "1"
    assert env["KIWI_RUN_SESSION"] == "s1"


def test_an_index_becomes_the_uuid_of_the_gpu_that_is_leased(spawn, scripted):
    """CUDA's number of the GPU may differ from the daemons' number."""
    scripted("GPU-1", index=1)
    scripted("GPU-2", index=0)
    program = spawn("run", *python(SHOW_ENVIRONMENT), env={"CUDA_VISIBLE_DEVICES": "1"})
    assert json.loads(finish(program).out)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    program = spawn("run", *python(SHOW_ENVIRONMENT), env={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert json.loads(finish(program).out)["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_a_program_on_a_mig_instance_is_told_that_it_is_not_shared(kiwi, daemon, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    result = kiwi("run", "--require", "--", "true")
    assert result.code == exits.FAILED
    assert "MIG-1 is a MIG instance" in result.err
    assert not daemon.received(Acquire)


def test_a_run_inside_a_run_does_not_wait_for_itself(spawn, daemon):
    inner = [sys.executable, "-m", "kiwi_core.cli", "run", *python("raise SystemExit(4)")]
    assert finish(spawn("run", "--", *inner)).code == 4
    assert len(daemon.received(Acquire)) == 1


def test_an_emulating_daemon_lends_its_driver(spawn, daemon):
    emulation = Emulation(
        libcuda="/emu/libcuda.so.1", libnvml="/emu/libnv.so.1", env={"STATE": "x"}
    )
    welcome = daemon.welcome()

    def script(peer, message):
        if isinstance(message, Hello):
            fields = {name: getattr(welcome, name) for name in welcome.__struct_fields__}
            peer.say(Welcome(**{**fields, "emulation": emulation}))
        else:
            daemon.obey(peer, message)

    daemon.script = script
    env = {"LD_LIBRARY_PATH": "/mine"}
    result = finish(spawn("run", *python(SHOW_ENVIRONMENT), env=env))
    got = json.loads(result.out)
    assert got["STATE"] == "x"
    assert got["LD_LIBRARY_PATH"] == "/emu:/mine"
    assert "EMULATED" in result.err


UNTIL_FILE = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"


@pytest.mark.parametrize("verbose", [False, True])
def test_what_the_user_must_know_is_told_the_rest_on_request(spawn, daemon, tmp_path, verbose):
    options = ["--verbose"] if verbose else []
    process = spawn("run", *options, *python(UNTIL_FILE), str(tmp_path / "end"))
    daemon.await_received(Acquire)
    daemon.peer.say(
        UserNotice(notice=Notice.SUSPENDED, text="It was suspended."),
        UserNotice(notice=Notice.LOST, text="It is lost.", remedy="Start again."),
    )
    lines = []
    while not lines or "Start again." not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "the program ended"
    (tmp_path / "end").touch()
    assert finish(process).code == 0
    told = ["kiwi: It was suspended.\n"] if verbose else []
    assert lines == [*told, "kiwi: It is lost.\n", "      Start again.\n"]


@pytest.mark.parametrize(
    ("named", "env", "gpu"),
    [
        (None, {}, None),
        ("1", {"KIWI_GPU": "2", "CUDA_VISIBLE_DEVICES": "3"}, "1"),
        (None, {"KIWI_GPU": "2", "CUDA_VISIBLE_DEVICES": "3"}, "2"),
        (None, {"CUDA_VISIBLE_DEVICES": "3"}, "3"),
        (None, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_the_wanted_gpu_comes_from_option_or_environment(named, env, gpu):
    assert run.wanted_gpu(named, env) == gpu


XLA, XLA_SHARE, TF = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "TF_FORCE_GPU_ALLOW_GROWTH",
)
BY_US = {XLA: "false", TF: "true", "KIWI_PREALLOCATE": "0"}


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({}, BY_US),
        ({XLA: "true"}, {XLA: "true", TF: "true", "KIWI_PREALLOCATE": "0"}),
        ({XLA_SHARE: ".4"}, {XLA_SHARE: ".4", TF: "true", "KIWI_PREALLOCATE": "0"}),
        ({XLA: "true", TF: "false"}, {XLA: "true", TF: "false"}),
        ({"KIWI_PREALLOCATE": "1"}, {"KIWI_PREALLOCATE": "1"}),
        (BY_US, BY_US),
    ],
)
def test_frameworks_take_memory_as_they_need_it_unless_the_user_has_chosen(env, changed):
    env = dict(env)
    preallocation.switch_off(env)
    assert env == changed


def test_the_program_gets_these_settings(spawn, daemon):
    code = f"import os; print([os.environ.get(n) for n in ({XLA!r}, {TF!r})])"
    process = spawn("run", *python(code))
    daemon.await_received(Acquire)
    assert finish(process).out == "['false', 'true']\n"


def test_find_answers_as_a_shell_would(tmp_path):
    assert child.find(sys.executable) == sys.executable
    assert child.find("no-such-program-anywhere") == exits.NOT_FOUND
    assert child.find(str(tmp_path)) == exits.CANNOT_EXECUTE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_on_a_terminal_is_redrawn_and_removed():
    now = [0.0]
    terminal = Terminal()
    line = TerminalWaitLine(terminal, lambda: now[0])
    waiting = Waiting(burst=1, position=1, ahead=0, holder="a\x1b")
    line.show(waiting)
    assert terminal.getvalue() == ""
    now[0] = 1.0
    line.show(waiting)
    line.granted()
    assert terminal.getvalue() == "\r\x1b[KWaiting for the GPU: 1st in line, a\ufffd has it\r\x1b[K"


def test_a_log_gets_a_line_every_ten_seconds():
    now = [0.0]
    log = io.StringIO()
    line = TerminalWaitLine(log, lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        line.show(Waiting(burst=1, position=1, ahead=0))
    line.granted()
    lines = log.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "kiwi: The GPU is yours, after 24 s."


def test_no_zombie_and_no_stray_process(spawn, daemon):
    process = spawn("run", "--", "sleep", "1000")
    mine = f"/proc/{process.pid}/task/{process.pid}/children"
    children = eventually(lambda: Path(mine).read_text().split())
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == exits.of_signal(signal.SIGTERM)
    eventually(lambda: not os.path.exists(f"/proc/{children[0]}"))
