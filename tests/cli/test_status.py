"""Tests of ``kiwi status`` against scripted daemons: text, JSON, and live."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time

import msgspec
import pytest
from cli_process import PATIENCE_S, finish
from scripted_daemon import status_of

from kiwi_core.cli import choosing
from kiwi_core.cli.choosing import Choice
from kiwi_core.cli.status import to_json
from kiwi_core.cli.status_text import gpu_lines
from kiwi_core.cli.terminal import Screen, Style, fit
from kiwi_core.states import AntiThrash, Priority, SessionState
from kiwi_core.units import GIB
from kiwi_core.wire.messages import (
    Error,
    GetStatus,
    GpuStatus,
    MemoryStatus,
    OutsideProgram,
    QueueEntry,
    SchedulerStatus,
    SessionStatus,
    Set,
    StatusReport,
    SwapStatus,
)

replace = msgspec.structs.replace


def session(name: str = "train.ipynb", **changes) -> SessionStatus:
    fields = {
        "id": "s1",
        "pid": 41,
        "owner": "ann",
        "name": name,
        "state": SessionState.RUNNING,
        "resident_bytes": 20 * GIB,
        "paged_out_bytes": 0,
        "suspensions": 2,
        "held_s": 12.0,
        "waited_s": 0.0,
    }
    return SessionStatus(**{**fields, **changes})


def busy_gpu() -> GpuStatus:
    return GpuStatus(
        uuid="GPU-1",
        name="NVIDIA H100",
        index=0,
        emulated=False,
        memory=MemoryStatus(
            total_bytes=80 * GIB,
            free_bytes=38 * GIB,
            paged_out_bytes=10 * GIB,
            host_budget_bytes=200 * GIB,
            outside_bytes=GIB,
        ),
        scheduler=SchedulerStatus(
            tq_s=30.0,
            anti_thrash=AntiThrash.ON,
            serialised=True,
            why="90 GiB are needed",
            swap_round_trip_s=3.1,
            floor_s=3.1,
        ),
        holders=["s1"],
        queue=[QueueEntry(session="s2", position=1, expected_wait_s=12.0, waited_s=4.0)],
        sessions=[
            session(time_left_s=18.0),
            session(
                "explore.ipynb",
                id="s2",
                owner="bob",
                state=SessionState.WAITING,
                problem="stuck",
                problem_text="A driver call hangs. Restart this kernel.",
                connected=False,
            ),
        ],
        outside=[OutsideProgram(name="python3", owner="eve", pid=815, used_bytes=GIB)],
        swaps=[
            SwapStatus(
                session="s2",
                name="explore.ipynb",
                direction="out",
                bytes_moved=10**10,
                seconds=2.0,
                ago_s=12.0,
            ),
            SwapStatus(session="s3", direction="in", bytes_moved=10**10, seconds=2.0, ago_s=15.0),
        ],
    )


def picture(gpu: GpuStatus) -> str:
    return "\n".join(gpu_lines(gpu, Style(False)))


def test_picture_answers_who_has_it_who_waits_and_how_long():
    text = picture(busy_gpu())
    assert "train.ipynb (ann), at most 18 s more" in text
    assert "1. explore.ipynb (bob): about 12 s (has waited 4.0 s)" in text
    assert "one at a time: 90 GiB are needed" in text
    assert "38 GiB of 80 GiB free, 10 GiB paged out" in text
    assert "1 GiB held by programs outside Kiwi" in text
    assert "explore.ipynb out: 9.3 GiB in 2.0 s (5.0 GB/s), 12 s ago" in text
    assert "a program that has ended in: 9.3 GiB" in text
    assert "explore.ipynb (bob): A driver call hangs. Restart this kernel." in text
    assert "waiting (away)" in text
    assert "EMULATED" not in text


@pytest.mark.parametrize(("unnamed_mib", "words"), [(6, ""), (600, "600 MiB held by the driver")])
def test_memory_that_nobody_is_named_for_is_shown_where_it_matters(unnamed_mib, words):
    memory = replace(busy_gpu().memory, outside_bytes=unnamed_mib << 20)
    shown = picture(replace(busy_gpu(), memory=memory, outside=[]))
    assert "programs outside Kiwi" not in shown
    assert words in shown
    assert (" held by " in shown) is bool(words)


def test_picture_has_priorities_where_somebody_has_another_than_normal():
    assert "PRIORITY" not in picture(busy_gpu())
    one, other = busy_gpu().sessions
    gpu = replace(busy_gpu(), sessions=[replace(one, priority=Priority.TRAINING), other])
    head, first, second = picture(gpu).splitlines()[-3:]
    assert head.endswith("SUSPENDED  PRIORITY")
    assert first.endswith("training")
    assert second.endswith("normal")


def test_picture_of_a_quiet_emulated_gpu_is_short_and_loud():
    text = picture(status_of())
    assert "EMULATED" in text.splitlines()[0]
    assert "holder    nobody" in text
    assert "nobody waits" in text
    assert "SESSION" not in text
    assert "problems" not in text


def test_picture_says_when_nobody_can_tell_the_wait():
    entry = QueueEntry(session="s9", position=1, expected_wait_s=None)
    assert "s9: nobody can tell" in picture(replace(busy_gpu(), queue=[entry]))


def test_picture_tells_a_range_why_and_how_good_the_last_ones_were():
    gpu = busy_gpu()
    assert "expected waits" not in picture(gpu)
    (entry,) = gpu.queue
    entry = replace(
        entry, expected_low_s=10.0, expected_high_s=26.0, expected_why="others go first"
    )
    scheduler = replace(gpu.scheduler, foretold=100, foretold_well=87)
    text = picture(replace(gpu, queue=[entry], scheduler=scheduler))
    assert "1. explore.ipynb (bob): 10–25 s (others go first) (has waited 4.0 s)" in text
    assert "expected waits: 87 of the last 100 right to 2 s or a quarter of the figure" in text


def test_picture_neutralises_names():
    gpu = replace(busy_gpu(), sessions=[session("evil\x1b[2J.ipynb")])
    assert "\x1b" not in picture(gpu)


def crowd() -> GpuStatus:
    waiting = SessionState.WAITING
    others = [
        session("b.ipynb", id="s2", owner="bob", state=waiting, resident_bytes=GIB),
        session("c.ipynb", id="s3", owner="bob", pid=None, resident_bytes=2 * GIB),
    ]
    return replace(busy_gpu(), sessions=[session("a.ipynb"), *others], queue=[])


def chosen(*words: str) -> Choice:
    parser = argparse.ArgumentParser()
    choosing.add_arguments(parser)
    return choosing.choice_of(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["s1", "s2", "s3"]),
        (("--user", "bob"), ["s2", "s3"]),
        (("--user", "bob,ann", "--state", "running"), ["s1", "s3"]),
        (("--sort", "resident_bytes"), ["s2", "s3", "s1"]),
        (("--sort=owner,-resident_bytes",), ["s1", "s3", "s2"]),
        (("--sort=-owner,resident_bytes",), ["s2", "s3", "s1"]),
        (("--sort", "pid,id"), ["s3", "s1", "s2"]),
        (("--state", "lost"), []),
    ],
)
def test_sessions_are_chosen_and_sorted(words, expected):
    choice = chosen("--format", "id,name", *words)
    table = gpu_lines(crowd(), Style(False), choice)
    at = table.index("") + 1
    assert [line.split()[0] for line in table[at:] if line.startswith("  s")] == expected
    shown = json.loads(to_json([crowd()], choice))["gpus"][0]["sessions"]
    assert [one["id"] for one in shown] == expected
    if not expected:
        assert table[-1] == "  no session matches"


def test_columns_are_chosen():
    head, first, *_ = chosen("--format", "pid,owner,peak_bytes").lines(
        crowd().sessions, Style(False)
    )
    assert head.split() == ["PID", "OWNER", "PEAK"]
    assert first.split()[:2] == ["41", "ann"]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("--state", "asleep"), "paged-out"),
        (("--format", "colour"), "resident_bytes"),
        (("--sort", "-colour"), "resident_bytes"),
    ],
)
def test_what_there_is_none_of_is_refused_with_what_there_is(kiwi, words, known):
    result = kiwi("status", f"{words[0]}={words[1]}")
    assert result.code == 2
    assert known in result.err


def test_a_line_is_cut_off_at_the_windows_width():
    style = Style(True)
    line = style.bold("GPU 0") + "  " + style.dim("a long identifier")
    assert fit(line, 40) == line
    cut = fit(line, 10)
    assert re.sub(r"\x1b\[[0-9;]*m", "", cut) == "GPU 0  a …"
    assert cut.endswith("\x1b[0m")
    assert fit("abc", 3) == "abc"
    assert fit("abcd", 3) == "ab…"
    assert fit(style.bold("abc") + "def", 4) == style.bold("abc") + "…"
    three = style.bold("abc") + style.dim("defg") + style.bold("hijk")
    assert re.sub(r"\x1b\[[0-9;]*m", "", fit(three, 5)) == "abcd…"


def test_a_small_window_counts_what_it_hides(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 6)))
    stream = io.StringIO()
    Screen(stream).draw([f"line {number}" for number in range(9)], "foot")
    lines = [line.removesuffix("\x1b[K") for line in stream.getvalue()[3:].split("\n")]
    assert lines == ["line 0", "line 1", "line 2", "… and 6 more lines …", "foot", "\x1b[J"]


def test_no_daemon_is_said_with_what_to_do(kiwi, sockets):
    result = kiwi("status")
    assert result.code == 1
    assert result.out == ""
    assert str(sockets) in result.err
    assert "kiwi daemon" in result.err


def test_json_without_a_daemon_is_an_empty_list_and_code_1(kiwi, sockets):
    result = kiwi("status", "--json")
    assert result.code == 1
    assert json.loads(result.out) == {"gpus": []}


def test_json_has_the_documented_shape(kiwi, daemon):
    daemon.script = lambda peer, message: (
        peer.say(StatusReport(gpu=busy_gpu()))
        if isinstance(message, GetStatus)
        else daemon.obey(peer, message)
    )
    result = kiwi("status", "--json")
    assert result.code == 0
    (gpu,) = json.loads(result.out)["gpus"]
    assert {"uuid", "name", "index", "emulated", "memory", "scheduler"} <= gpu.keys()
    memory = {"total_bytes", "free_bytes", "paged_out_bytes", "host_budget_bytes"}
    assert memory <= gpu["memory"].keys()
    assert {"tq_s", "anti_thrash", "serialised"} <= gpu["scheduler"].keys()
    assert gpu["holders"] == ["s1"]
    assert {"session", "position", "expected_wait_s"} <= gpu["queue"][0].keys()
    wanted = {"id", "pid", "owner", "name", "state", "resident_bytes", "paged_out_bytes"}
    assert {*wanted, "suspensions", "held_s", "waited_s"} <= gpu["sessions"][0].keys()
    assert gpu["sessions"][0]["state"] == "running"


def test_every_gpu_is_shown_or_the_one_asked_for(kiwi, scripted):
    scripted("GPU-1", index=0)
    scripted("GPU-2", index=1)
    assert len(json.loads(kiwi("status", "--json").out)["gpus"]) == 2
    assert len(json.loads(kiwi("status", "--json", "--gpu", "1").out)["gpus"]) == 1
    assert len(json.loads(kiwi("status", "--json", "--gpu", "GPU-2").out)["gpus"]) == 1
    missing = kiwi("status", "--gpu", "7")
    assert missing.code == 1
    assert "GPU 7" in missing.err


def test_one_silent_daemon_does_not_hide_the_others(kiwi, scripted):
    scripted("GPU-1")
    refusing = scripted("GPU-2")
    refusing.script = lambda peer, _message: peer.say(
        Error(code="busy", message="Too many.", remedy="Wait.", fatal=True)
    )
    result = kiwi("status")
    assert result.code == 1
    assert "Test GPU" in result.out
    assert "GPU-2" in result.err
    assert "Too many." in result.err


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"q", 0)])
def test_the_watched_picture_leaves_the_terminal_as_it_was(daemon, monkeypatch, key, code):
    """On a real terminal, the picture uses the other screen, which Ctrl-C or q closes again."""
    monkeypatch.setenv("TERM", "xterm")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "kiwi_core.cli", "status", "--watch"])
    before = termios.tcgetattr(terminal)
    seen, deadline = b"", time.monotonic() + PATIENCE_S
    interrupted = False
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # EIO: it has ended
            break
        if b"Ctrl-C leaves" in seen and b"Test GPU" in seen and not interrupted:
            assert not termios.tcgetattr(terminal)[3] & termios.ECHO, "keys are not shown"
            os.write(terminal, key)
            interrupted = True
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert seen.startswith(b"\x1b[?1049h")
    assert seen.rstrip().endswith(b"\x1b[?1049l")
    assert b"Traceback" not in seen


@pytest.fixture
def stays():
    """Read lines of a watching process until one satisfies the condition."""

    def until(process, condition):
        for line in process.stdout:
            if condition(json.loads(line)):
                return
        raise AssertionError("the watching process ended")

    return until


@pytest.mark.timeout(PATIENCE_S * 2)
def test_watch_follows_changes_and_survives_a_restart_of_the_daemon(spawn, daemon, stays):
    process = spawn("status", "--watch", "--json")
    stays(process, lambda seen: len(seen["gpus"]) == 1)
    daemon.stop()
    stays(process, lambda seen: seen["gpus"] == [])
    daemon.tq_s = 7.0
    daemon.start()
    stays(process, lambda seen: [gpu["scheduler"]["tq_s"] for gpu in seen["gpus"]] == [7.0])
    daemon.peer.say(StatusReport(gpu=status_of(9.0)))
    stays(process, lambda seen: [gpu["scheduler"]["tq_s"] for gpu in seen["gpus"]] == [9.0])
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.code, result.err) == (130, "")


def test_watch_without_a_daemon_waits_for_one(spawn, scripted, stays):
    process = spawn("status", "--watch", "--json")
    stays(process, lambda seen: seen["gpus"] == [])
    scripted()
    stays(process, lambda seen: len(seen["gpus"]) == 1)


def test_set_tells_what_the_daemon_then_has(kiwi, daemon):
    result = kiwi("set", "tq=10", "anti-thrash=always")
    assert result.code == 0
    assert "quantum 10 s" in result.out
    (heard,) = daemon.received(Set)
    assert (heard.tq_s, heard.anti_thrash) == (10.0, AntiThrash.ALWAYS)


def test_set_sends_policy_and_priority(kiwi, daemon):
    assert kiwi("set", "policy=interactive").code == 0
    daemon.status = status_of(30.0)
    (heard,) = daemon.received(Set)
    assert (heard.policy, heard.priority, heard.session) == ("interactive", None, "")
    result = kiwi("set", "--session", "k9", "priority=high")
    assert (result.code, daemon.received(Set)) == (1, [heard])
    assert "No GPU has a session 'k9'" in result.err
    for wrong in (["--session", "k9", "tq=1"], ["priority=high"], ["--session", "k9", "policy=x"]):
        assert kiwi("set", *wrong).code in (1, 2)
    result = kiwi("set", "policy=best")
    assert result.code == 2
    assert "there are: interactive, round-robin" in result.err


def test_set_refused_is_code_1_with_the_daemons_words(kiwi, daemon):
    refusal = Error(code="not-permitted", message="Only the owner may.", remedy="Ask them.")
    daemon.script = lambda peer, message: (
        peer.say(refusal) if isinstance(message, Set) else daemon.obey(peer, message)
    )
    result = kiwi("set", "tq=10")
    assert result.code == 1
    assert "Only the owner may." in result.err
    assert "Ask them." in result.err


@pytest.mark.parametrize(
    "setting", ["tq=0", "tq=nan", "tq=1e9", "tq=ten", "anti-thrash=maybe", "x=1"]
)
def test_bad_settings_never_reach_a_daemon(kiwi, daemon, setting):
    result = kiwi("set", setting)
    assert result.code == 2
    assert daemon.received(Set) == []
