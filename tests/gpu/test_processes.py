"""Tests of process identity and process trees, with real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from shortages import no_descriptor_left

from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef, parse_stat

SLEEPER = "import time; print('up', flush=True); time.sleep(1000)"


@contextmanager
def python(code: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and yield it once it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("name", ["python", "a b", "x) R 1 1 1", "((", "))", "new\nline"])
def test_a_command_name_cannot_confuse_the_fields(name: str) -> None:
    tail = "S 7 8 9 0 -1 4194560 1 0 2 0 3 4 0 0 20 0 5 0 123456 1000 200"
    stat = parse_stat(f"42 ({name}) {tail}")
    assert (stat.state, stat.parent, stat.session, stat.start_ticks) == ("S", 7, 9, 123456)
    assert not stat.dead


@pytest.mark.parametrize(
    ("state", "flags", "dead"),
    [("S", 0x404000, False), ("Z", 0, True), ("X", 0, True), ("R", 0x404004, True)],
)
def test_the_dead_and_the_dying(state: str, flags: int, dead: bool) -> None:
    line = f"42 (x) {state} 7 8 9 0 -1 {flags} 1 0 2 0 3 4 0 0 20 0 5 0 123456"
    assert parse_stat(line).dead is dead


@pytest.mark.parametrize("text", ["", "42", "42 (x", "42 (x) S 1 2", ") " + "a " * 30])
def test_what_is_no_stat_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stat"):
        parse_stat(text)


def test_a_reference_names_one_process_and_dies_with_it() -> None:
    with python(SLEEPER) as process:
        first_line(process)
        ref = processes.ref_of(process.pid)
        assert ref is not None
        assert processes.alive(ref)
        assert not processes.alive(ProcessRef(ref.pid, ref.start_ticks + 1)), "a reused pid"
        assert processes.owner_uid(ref.pid) == os.getuid()
        process.kill()
        wait(lambda: not processes.alive(ref))  # not reaped yet: a zombie counts as ended
        assert processes.ref_of(process.pid) is None
    assert processes.ref_of(process.pid) is None
    assert processes.owner_uid(process.pid) is None
    assert processes.tree(ref) == ()


def test_a_program_that_execs_is_another_one_in_the_same_process() -> None:
    again = "import os; input(); os.execv(sys.executable, [sys.executable, '-c', code])"
    code = "import sys; code = {!r}; print('ready', flush=True); "
    program = code.format("print('again', flush=True); input()") + again
    with python(program) as process:
        first_line(process)
        ref = processes.ref_of(process.pid)
        assert ref is not None
        before = processes.image_of(ref)
        assert before
        assert processes.image_of(ref) == before
        assert processes.image_of(ProcessRef(ref.pid, ref.start_ticks + 1)) == ""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        first_line(process)
        assert processes.ref_of(process.pid) == ref
        assert processes.image_of(ref) not in ("", before)
        process.kill()
        wait(lambda: processes.image_of(ref) == "")


def test_a_thread_is_not_a_process() -> None:
    told, stop = threading.Event(), threading.Event()
    ids = []

    def run() -> None:
        ids.append(threading.get_native_id())
        told.set()
        stop.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert told.wait(60)
    try:
        assert processes.stat_of(ids[0]) is not None, "/proc shows threads too"
        assert not processes.is_process(ids[0])
        assert processes.ref_of(ids[0]) is None
    finally:
        stop.set()
        thread.join()


def test_a_pidfd_tells_the_end_of_that_process_only() -> None:
    with python(SLEEPER) as process:
        first_line(process)
        ref = processes.ref_of(process.pid)
        assert ref is not None
        assert processes.open_pidfd(ProcessRef(ref.pid, ref.start_ticks + 1)) is None
        descriptor = processes.open_pidfd(ref)
        assert descriptor is not None
        try:
            assert select.select([descriptor], [], [], 0)[0] == []
            process.kill()
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
        finally:
            os.close(descriptor)
    assert processes.open_pidfd(ref) is None


FAMILY = """
import subprocess, sys, threading
child = 'import time; print(1, flush=True); time.sleep(1000)'
middle = (
    'import subprocess, sys, time;'
    'p = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE);'
    'p.stdout.readline(); print(p.pid, flush=True); time.sleep(1000)'
)
pids = []
def start():
    p = subprocess.Popen([sys.executable, '-c', middle, child], stdout=subprocess.PIPE, text=True)
    pids.append((p.pid, int(p.stdout.readline())))
    sys.stdin.readline()
t = threading.Thread(target=start)   # children of a thread are the process's, too
t.start()
while not pids: pass
print(*pids[0], flush=True)
t.join()
"""


def test_a_tree_has_children_of_threads_and_their_children(monkeypatch: object) -> None:
    with python(FAMILY, start_new_session=True) as process:
        middle, leaf = map(int, first_line(process).split())
        root = processes.ref_of(process.pid)
        inner = processes.ref_of(middle)
        assert root is not None
        assert inner is not None
        try:
            assert [ref.pid for ref in processes.tree(root)] == [process.pid, middle, leaf]
            assert [ref.pid for ref in processes.tree(root, {inner})] == [process.pid]
            assert processes.in_session_of(root, leaf)
            assert not processes.in_session_of(root, os.getpid())
            assert not processes.in_session_of(inner, leaf), "it leads no session"
            os.kill(middle, 9)
            leaf_ref = processes.ref_of(leaf)
            wait(lambda: leaf_ref not in processes.tree(root))
            assert processes.in_session_of(root, leaf), "an orphan is still found"
            process.kill()
            process.wait()
            assert processes.in_session_of(root, leaf), "even after its kernel's end"
            assert not processes.in_session_of(ProcessRef(root.pid, 2**62), leaf)
        finally:
            os.kill(leaf, 9)


def test_children_without_the_kernels_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with python(SLEEPER) as process:
        first_line(process)
        here = processes.ref_of(os.getpid())
        assert here is not None
        monkeypatch.setattr(processes, "_children_of_thread", lambda *_: None)
        assert process.pid in [ref.pid for ref in processes.tree(here)]


def test_ancestors_are_those_above_nearest_first() -> None:
    me = processes.ref_of(os.getpid())
    assert me is not None
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"
    with python(child) as parent:
        grandchild = processes.ref_of(int(first_line(parent)))
        assert grandchild is not None
        above = tuple(processes.ancestors(grandchild))
        assert [ref.pid for ref in above[:2]] == [parent.pid, os.getpid()]
        assert above[1:] == (me, *processes.ancestors(me))
        os.kill(grandchild.pid, signal.SIGKILL)
        wait(lambda: not processes.alive(grandchild))
        assert not tuple(processes.ancestors(grandchild))


GRANDCHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


NAMED = "open('/proc/self/comm', 'wb').write(b'x\\rUid:\\t7\\t7'); " + SLEEPER


def test_a_name_cannot_pass_for_a_user() -> None:
    with python(NAMED) as process:
        assert first_line(process) == "up"
        assert not processes.runs_as(process.pid, 7)
        assert processes.runs_as(process.pid, os.getuid())


def test_a_process_that_cannot_be_looked_at_is_not_dead() -> None:
    with python(SLEEPER) as process:
        first_line(process)
        ref = processes.ref_of(process.pid)
        assert ref is not None
        gone = ProcessRef(process.pid, ref.start_ticks - 1)
        with no_descriptor_left():
            assert processes.alive(ref)
            assert processes.alive(gone), "nobody can say"
            assert processes.owner_uid(process.pid) == os.getuid(), "takes no descriptor"
            for look in (processes.stat_of, processes.is_process, processes.ref_of):
                with pytest.raises(GpuError, match=r"(?i)too many open files.*ulimit"):
                    look(process.pid)
            with pytest.raises(GpuError):
                processes.tree(ref)
            with pytest.raises(GpuError):
                processes.runs_as(process.pid, 0)
            with pytest.raises(OSError, match="Too many open files"):
                processes.open_pidfd(ref)
        assert processes.alive(ref)
        assert not processes.alive(gone)


def test_the_name_of_this_run_of_the_system_is_asked_for_once() -> None:
    name = processes.boot_id()
    assert name
    with no_descriptor_left():
        assert processes.boot_id() == name


@pytest.mark.parametrize(
    ("group", "variable", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_0", "", "41"),
        ("9:memory:/slurm_kn1/uid_1001/job_7", "SLURM_JOB_ID=8", "7"),
        ("0::/user.slice", "SLURM_JOB_ID=8", "8"),
        ("0::/user.slice/job_nightly", "", ""),
    ],
)
def test_the_batch_job_of_a_process(
    monkeypatch: pytest.MonkeyPatch, group: str, variable: str, job: str
) -> None:
    texts = {"/proc/12/cgroup": f"{group}\n", "/proc/12/environ": f"A=1\0{variable}\0"}
    monkeypatch.setattr(processes, "text_of", texts.__getitem__)
    assert processes.job_of(12) == job
