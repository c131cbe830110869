"""Tests of what speaks against a library that owns its program's memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kiwi_core.gpu import ownable, processes
from kiwi_core.gpu.ownable import ProcessFacts
from kiwi_core.states import GateOnly

CLEAN = ProcessFacts(
    {"PATH": "/bin", "NSIGHT_SYSTEMS_VERSION": "2024.5"}, 0, frozenset({"/dev/nvidia0"})
)


@pytest.mark.parametrize(
    ("facts", "why", "detail"),
    [
        (CLEAN, None, ""),
        (None, GateOnly.UNREADABLE, ""),
        (ProcessFacts(tracer_pid=7), GateOnly.TOOL, "process 7 traces it"),
        (
            ProcessFacts({"CUDA_INJECTION64_PATH": "/t.so"}),
            GateOnly.TOOL,
            "CUDA_INJECTION64_PATH is set",
        ),
        (ProcessFacts({"CUDA_INJECTION64_PATH": ""}), None, ""),
        (ProcessFacts({"NSYS_PROFILING_SESSION_ID": "1"}), GateOnly.TOOL, None),
        (ProcessFacts({"NV_NSIGHT_INJECTION_PORT_BASE": "1"}), GateOnly.TOOL, None),
        (ProcessFacts({"NV_SANITIZER_INJECTION_PORT_BASE": "1"}), GateOnly.TOOL, None),
        (ProcessFacts({"NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/x"}), GateOnly.TOOL, None),
        (ProcessFacts(files=frozenset({"/dev/nvidia-fs3"})), GateOnly.DIRECT, "/dev/nvidia-fs3"),
        (ProcessFacts(files=frozenset({"/dev/gdrdrv"})), GateOnly.DIRECT, "/dev/gdrdrv"),
        (
            ProcessFacts(files=frozenset({"/dev/infiniband/uverbs0"})),
            GateOnly.DIRECT,
            "/dev/infiniband/uverbs0",
        ),
        (ProcessFacts(files=frozenset({"/dev/infiniband/rdma_cm"})), None, ""),
        (ProcessFacts(wrappers=("/opt/libvgpu.so",)), GateOnly.HOOKED, "/opt/libvgpu.so"),
    ],
)
def test_what_speaks_against_it(
    facts: ProcessFacts | None, why: GateOnly | None, detail: str | None
) -> None:
    found = ownable.why_not(facts)
    assert (found and found.why) == why
    assert detail is None or (found.detail if found else "") == detail
    on_grace = ownable.why_not(facts, coherent=True)
    assert on_grace is not None
    assert on_grace.why is GateOnly.COHERENT


@pytest.mark.parametrize(
    ("name", "numa_status", "coherent"),
    [
        ("NVIDIA H200", [], False),
        ("NVIDIA H100 80GB HBM3", ["Node: -1\nStatus: disabled\n"], False),
        ("NVIDIA GH200 480GB", [], True),
        ("NVIDIA GB200", [], True),
        ("NVIDIA GB10", [], True),
        ("NVIDIA H100", ["Node: 1\nStatus: online\n"], True),
        ("Emulated GPU 0", [], False),
        ("NVIDIA GeForce RTX 4090", [], False),
    ],
)
def test_where_the_cpu_uses_gpu_memory_by_itself(
    name: str, numa_status: list[str], coherent: bool
) -> None:
    assert ownable.is_coherent(name, numa_status) is coherent
    assert not ownable.coherent_machine("NVIDIA H200") or os.path.exists("/proc/driver/nvidia/gpus")


@pytest.mark.parametrize(
    ("path", "content", "wraps"),
    [
        ("/usr/local/vgpu/libvgpu.so", b"", True),
        ("/x/libvgpu.so.v2", b"", True),
        ("/x/mine.so", b"\0dlsym\0cuMemAlloc_v2\0", True),
        ("/x/mine.so", b"\0cuGetProcAddress\0", True),
        ("/x/torch_memory_saver.so", b"\0cudaMalloc\0cuMemCreate\0cuMemMap\0", False),
        ("/usr/lib/libjemalloc.so.2", b"\0malloc\0free\0", False),
        ("/x/libkiwi_preload.so", b"\0cuMemAlloc_v2\0", False),
    ],
)
def test_which_preloaded_libraries_wrap_the_driver(path: str, content: bytes, wraps: bool) -> None:
    assert ownable.wraps_driver(path, content) is wraps


def test_a_pipe_that_is_named_like_a_library_blocks_nobody(tmp_path: Path) -> None:
    pipe = tmp_path / "libvgpu.so"
    os.mkfifo(pipe)
    pipe.chmod(0o644)
    assert ownable._content(os.getpid(), str(pipe)) == b""
    assert ownable._content(os.getpid(), "plain.so") == b""


def test_the_facts_of_a_process(tmp_path: Path) -> None:
    hook, secret = tmp_path / "hook.so", tmp_path / "secret.so"
    for path, mode in ((hook, 0o644), (secret, 0o600)):
        path.write_bytes(b"\0cuMemAlloc_v2\0")
        path.chmod(mode)
    missing = tmp_path / "missing.so"
    env = {"A": "1", "LD_PRELOAD": f"{hook}:{secret} {missing}:plain.so"}
    here = Path(__file__)
    # The linker passes by what is no library, and says so.
    code = f"f = open({str(here)!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = ownable.facts(child.pid)
        assert found is not None
        assert found.environment["A"] == "1"
        assert found.tracer_pid == 0
        assert str(here) in found.files
        assert found.wrappers == (str(hook),)
        assert ownable.command_line(child.pid).startswith(f"{sys.executable} -c")
        child.communicate(b"\n")
    assert ownable.facts(child.pid) is None
    assert ownable.command_line(child.pid) == ""


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, 0])
def test_the_signal_that_ended_a_process(number: int, collected: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ref = processes.ref_of(child.pid)
        assert ref is not None
        pidfd = os.pidfd_open(child.pid)
        if number:
            child.send_signal(number)
        else:
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.flush()
        select.select([pidfd], [], [])
        if collected:
            child.wait()
        known = not collected or _told_after_the_end(pidfd)
        assert ownable.ended_by(ref, pidfd) == (number if known else 0)
        os.close(pidfd)


def _told_after_the_end(pidfd: int) -> bool:
    """Return whether this kernel still knows how a collected process ended (Linux 6.15)."""
    release = tuple(int(word) for word in os.uname().release.split(".")[:2])
    return release >= (6, 15)
