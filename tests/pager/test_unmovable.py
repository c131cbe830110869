"""Tests of which processes must not be moved, read from a fake /proc, and of what the pager
does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.gpu.results import cuda_error
from kiwi_core.pager.api import Lost
from kiwi_core.pager.unmovable import (
    MIG,
    STICKY,
    RestoreFailures,
    Unmovable,
    unreached,
    why_unmovable,
)
from kiwi_core.states import Reason

REF = ProcessRef(12, 1)
UVM = "7f5c00000000-7f5c02000000 rw-s 7f5c00000000 00:06 812 {name:>30}\n"
PROPRIETARY_580, PROPRIETARY_595, OPEN_610 = "580.178.04", "595.84", "610.57.04"


def proc(
    root: Path, *, uvm: int = 1, threads: tuple[str, ...] = ("python",), other: int = 3
) -> Path:
    directory = root / f"proc/{REF.pid}"
    for number, name in enumerate(threads):
        task = directory / f"task/{number}"
        task.mkdir(parents=True)
        (task / "comm").write_text(f"{name}\n")
    lines = [UVM.format(name="/dev/nvidia-uvm")] * uvm
    lines += [UVM.format(name="/dev/nvidiactl")] * other
    lines += [UVM.format(name="/dev/nvidia-uvm-tools"), "7f00-7f01 rw-p 00000000 00:00 0\n"]
    (directory / "maps").write_text("".join(lines))
    return root


@pytest.mark.parametrize("uvm", [0, 1])
def test_an_ordinary_program_may_be_moved(tmp_path: Path, uvm: int) -> None:
    assert why_unmovable(REF, PROPRIETARY_595, root=proc(tmp_path, uvm=uvm)) is None


def test_a_program_that_has_ended_may_be_moved(tmp_path: Path) -> None:
    assert why_unmovable(REF, PROPRIETARY_595, root=tmp_path) is None


@pytest.mark.parametrize("driver", [PROPRIETARY_580, PROPRIETARY_595, OPEN_610, ""])
def test_managed_memory_is_refused_on_every_driver(tmp_path: Path, driver: str) -> None:
    why = why_unmovable(REF, driver, root=proc(tmp_path, uvm=2))
    assert why is not None
    assert "managed memory" in why.sentence
    assert "cudaMalloc" in why.remedy


@pytest.mark.parametrize("thread", ["pt_nccl_watchdg", "pt_nccl_heartbt"])
def test_nccl_is_refused_where_the_driver_dies_of_it(tmp_path: Path, thread: str) -> None:
    root = proc(tmp_path, threads=("python", "cuda-EvtHandlr", thread))
    why = why_unmovable(REF, PROPRIETARY_595, root=root)
    assert why is not None
    assert "NCCL" in why.sentence
    assert PROPRIETARY_595 in why.sentence
    assert why_unmovable(REF, OPEN_610, root=root) is not None, (
        "nobody has told: the worst is assumed"
    )
    assert why_unmovable(REF, PROPRIETARY_580, root=root) is None
    assert why_unmovable(REF, "", root=root) is None


def test_what_a_library_tells_is_believed(tmp_path: Path) -> None:
    root = proc(tmp_path)
    why = why_unmovable(REF, PROPRIETARY_580, reported={"ipc", "pool"}, root=root)
    assert why is not None
    assert "CUDA IPC" in why.sentence
    why = why_unmovable(REF, PROPRIETARY_580, reported={"managed"}, root=root)
    assert why is not None
    assert "managed memory" in why.sentence
    assert why_unmovable(REF, PROPRIETARY_580, reported={"pool", "array"}, root=root) is None


def test_where_mig_is_on_everybody_is_refused(tmp_path: Path) -> None:
    why = why_unmovable(REF, PROPRIETARY_580, mig=True, root=proc(tmp_path))
    assert why is MIG


def test_a_program_with_our_library_is_known_by_its_mappings(tmp_path: Path) -> None:
    root = proc(tmp_path)
    assert unreached(REF, root=root) is None
    maps = root / f"proc/{REF.pid}/maps"
    line = "7f10-7f11 r-xp 00000000 08:01 77    /opt/my env/kiwi_core/preload/libkiwi_gate.so\n"
    maps.write_text(maps.read_text() + line)
    why = unreached(REF, root=root)
    assert why is not None
    assert "not connected" in why.sentence
    assert why.reason is Reason.LOCK_TIMEOUT, "it may connect at any moment"


def test_a_real_program_is_looked_at() -> None:
    """The names are where the code looks for them."""
    renames = "open('/proc/self/task/%d/comm' % threading.get_native_id(), 'w').write('pt_nccl_x')"
    code = f"import threading, sys; {renames}; print('named', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"named\n"
        ref = processes.ref_of(child.pid)
        assert ref is not None
        why = why_unmovable(ref, PROPRIETARY_595)
        assert child.stdin is not None
        child.stdin.close()
    assert why is not None
    assert "NCCL" in why.sentence


# --- what failed before --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 801, 719, 700, 709, 720])
def test_what_can_have_damaged_a_process_is_not_tried_again(number: int) -> None:
    me = processes.ref_of(os.getpid())
    assert me is not None
    unmovable = Unmovable()
    assert unmovable.why(me) is None
    told = unmovable.refused(me, cuda_error("page-out", number))
    assert told is not None
    assert told == unmovable.why(me)
    assert "estart it" in told.remedy
    assert ("has failed before" in told.sentence) == (number in STICKY)
    assert unmovable.why(ProcessRef(me.pid, me.start_ticks + 1)) is None, "another process"


BECOMES_ANOTHER = """
import os, sys
print("first", flush=True)
input()
os.execv(sys.executable, [sys.executable, "-c", "print('second', flush=True); input()"])
"""


def test_a_program_that_replaces_another_one_starts_without_its_faults() -> None:
    command = [sys.executable, "-c", BECOMES_ANOTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        ref = processes.ref_of(process.pid)
        assert ref is not None
        unmovable, failures = Unmovable(), RestoreFailures()
        unmovable.refused(ref, cuda_error("page-out", 700))
        failures.lost(ref, Lost("it failed"))
        assert unmovable.why(ref) is not None
        assert failures.lost_before(ref) is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "second\n"
        assert processes.ref_of(process.pid) == ref, "the same process"
        assert unmovable.why(ref) is None
        assert failures.lost_before(ref) is None
        process.kill()


@pytest.mark.parametrize("number", [304, 401, 600, 800, 999])
def test_what_may_be_different_the_next_time_is_tried_again(number: int) -> None:
    unmovable = Unmovable()
    assert unmovable.refused(REF, cuda_error("page-out", number)) is None
    assert unmovable.why(REF) is None
