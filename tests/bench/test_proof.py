"""Tests of the proof that Kiwi's library moves memory: a sound one passes, and a library that is
broken in one line is noticed."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from daemon import running_daemon
from installed import eventually
from proof_cache import unproven

import kiwi_emulator as emulator
from kiwi_core import interpreter
from kiwi_core.bench.process import BenchWorker
from kiwi_core.bench.proof import STOPPED, prove
from kiwi_core.client import Client
from kiwi_core.errors import KiwiError
from kiwi_core.gpu import nvml, proofs
from kiwi_core.gpu.nvml import GpuInfo
from kiwi_core.gpu.proofs import Proof
from kiwi_core.preload import _build
from kiwi_core.preload._paths import ENV_LIBRARY

ALL = (
    "memory is owned", "every byte comes back", "the program's own mappings", "graphs and captures",
    "while threads work", "a page-out that is cut short", "speed",
)  # fmt: skip


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = interpreter.module("kiwi_core.cli", "doctor", "--prove", *words)
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in unproven(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache" / "kiwi"


def test_the_emulated_gpu_proves_itself(cache: Path) -> None:
    said = doctor("--emulate", "2x128MiB")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("OK    proof") == 2
    found = proofs.load(*proofs.EMULATED)
    assert found is not None
    assert (found.passed, found.checks) == (True, ALL)
    assert min(found.out_bytes_per_s, found.in_bytes_per_s) > 0


BREAKS = {
    "a-byte-is-not-copied": (
        "owner/pass.c", "e.at, f.at + offset, n, lane", "e.at, f.at + offset, n - 1, lane",
        "other contents",
    ),
    "nothing-is-unmapped": (
        "owner/physical.c", ": kp_real.cuMemUnmap(at, bytes);", ": CUDA_SUCCESS;", "",
    ),
    "captures-are-not-seen": (
        "hooks/captures.c", "if (result == CUDA_SUCCESS) kp_capture_begun(stream);", "", "CAPTURE",
    ),
    "one-of-two-mappings-comes-back": (
        "owner/vmm_move.c", "if (m->there && !m->reachable && m->access_count)", "if (false)", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_library_is_noticed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file, old, new, said = BREAKS[name]
    sources = tmp_path / "src"
    shutil.copytree(_build.SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    monkeypatch.setattr(_build, "SOURCES", sources)
    broken = tmp_path / "broken" / _build.NAME
    broken.parent.mkdir()
    _build.build(broken)
    monkeypatch.setenv(ENV_LIBRARY, str(broken))
    found = doctor("--emulate", "1x128MiB")
    assert found.returncode == 1
    assert "FAIL  proof" in found.stdout
    assert said in found.stdout
    failed = proofs.load(*proofs.EMULATED)
    assert failed is not None
    assert failed.failed
    assert not failed.passed


def kill_in(program: BenchWorker, number: int) -> None:
    """Send a signal to the program once it has begun its work."""
    eventually(lambda: len(psutil.Process(program.pid).threads()) > 2, "its library is at work")
    os.kill(program.pid, number)


@pytest.mark.parametrize(
    ("number", "evidence"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)], ids=["crash", "kill"]
)
def test_a_program_that_ends_in_the_middle(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, evidence: bool
) -> None:
    """A crash speaks against the library. A kill, by the system for want of RAM say, proves
    nothing."""
    state = tmp_path / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    for name, value in emulator.environment(state, emulator.build()).items():
        monkeypatch.setenv(name, value)
    books = emulator.books(state).gpus[0]
    gpu = GpuInfo(0, books.uuid, books.name, books.total_bytes, False, None, "1")
    monkeypatch.setattr(nvml, "memory", lambda _uuid: nvml.GpuMemory(1 << 28, 1 << 28, 0))
    monkeypatch.setattr(nvml, "processes", lambda _uuid: {})
    killers = []

    def began(program: BenchWorker, _directory: Path) -> None:
        killers.append(threading.Thread(target=kill_in, args=(program, number)))
        killers[0].start()

    if evidence:
        assert "ended (status -11)" in prove(gpu, lambda _name: None, began).failed
    else:
        with pytest.raises(KiwiError, match="ended"):
            prove(gpu, lambda _name: None, began)
    killers[0].join()


def test_nothing_is_proven_where_somebody_computes(cache: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon("1x256MiB"))
        client = Client(daemon.sockets()[0], name="a", reconnect=False)
        stack.enter_context(client)
        client.connect()
        client.acquire(timeout_s=60.0)
        said = doctor("--socket-dir", str(daemon.directory), **daemon.cuda_env)
        assert said.returncode == 1
        assert "is in use" in said.stderr
    assert proofs.load(*proofs.EMULATED) is None


def test_nothing_is_proven_without_a_library(cache: Path) -> None:
    said = doctor("--emulate", "1x128MiB", **{ENV_LIBRARY: "/nowhere/libkiwi_preload.so"})
    assert said.returncode == 0
    assert "WARN  proof" in said.stdout
    assert proofs.load(*proofs.EMULATED) is None


def test_nothing_is_proven_in_a_full_gpu(cache: Path) -> None:
    said = doctor("--emulate", "1x64MiB")
    assert (said.returncode, "too little free memory" in said.stdout) == (0, True)


def test_a_machine_without_a_gpu(cache: Path) -> None:
    said = doctor(KIWI_EMULATOR_STATE="")
    assert said.returncode == 1
    assert "Traceback" not in said.stderr


def test_a_proof_that_is_stopped_leaves_nothing(cache: Path, tmp_path: Path, alone: Path) -> None:
    """The daemon closes the pipe when somebody needs the GPU; its death does the same."""
    libraries = emulator.build()
    state = tmp_path / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    uuid = emulator.books(state).gpus[0].uuid
    proof = subprocess.Popen(
        interpreter.module("kiwi_core.bench.proof", uuid),
        stdin=subprocess.PIPE, env=os.environ | emulator.environment(state, libraries),
    )  # fmt: skip
    assert proof.stdin is not None
    eventually(lambda: emulator.books(state).processes, "the proof begins")
    proof.stdin.close()
    assert proof.wait(30) == STOPPED
    eventually(lambda: not emulator.books(state).processes, "its program ends")
    assert proofs.load(*proofs.EMULATED) is None


def test_what_is_no_proof_counts_as_none(cache: Path) -> None:
    proof = Proof(gpu=proofs.EMULATED[0], driver=proofs.EMULATED[1], checks=ALL)
    proofs.save(proof)
    assert proofs.load(*proofs.EMULATED) == proof
    (path,) = (cache / "proofs").iterdir()
    path.write_text('{"gpu": 3')
    assert proofs.load(*proofs.EMULATED) is None
    path.unlink()
    assert proofs.load(*proofs.EMULATED) is None


@pytest.mark.usefixtures("cache")
def test_a_proof_holds_for_one_driver_and_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs.save(Proof(gpu="NVIDIA H200", driver="580.1"))
    assert proofs.load("NVIDIA H200", "580.1") is not None
    assert proofs.load("NVIDIA H200", "580.2") is None
    assert proofs.load("NVIDIA H100", "580.1") is None
    monkeypatch.setattr(proofs, "sources_digest", lambda: "other sources")
    assert proofs.load("NVIDIA H200", "580.1") is None


def test_nobody_else_may_write_a_proof_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        proofs.save(Proof(gpu="NVIDIA H200", driver="580.1"))
    finally:
        os.umask(before)
    (path,) = (cache / "proofs").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_cache_that_others_can_write_to_proves_nothing(cache: Path) -> None:
    proofs.save(Proof(gpu="NVIDIA H200", driver="580.1"))
    (cache / "proofs").chmod(0o777)
    assert proofs.load("NVIDIA H200", "580.1") is None
    with pytest.raises(PermissionError):
        proofs.save(Proof(gpu="NVIDIA H200", driver="580.1"))
