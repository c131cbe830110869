"""Everything that needs a real GPU: conformance, tests marked ``gpu``, and the figures of paging.

    python benchmarks/gpu/run_all.py RESULTS_FOLDER

Run it with the machine's own Python (with PyTorch, if there is one) after ``pip install -e .`` and
``pip install pytest pytest-timeout hypothesis``. It writes one JSON file after each part, so that
what was measured survives whatever comes later, and ``summary.json`` at the end. A part whose
library is missing, or for which no time is left, says so and is left out. It never resets the GPU
nor changes its settings. ``--emulated-selftest`` runs the same logic, small, on the emulated
driver: that shows that this script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB, GIB = 1 << 20, 1 << 30
JOB = str(Path(__file__).with_name("job.py"))
BUDGET_S = 520.0
"""For everything; the machine may be lent for ten minutes."""
INPROCESS = "tests/gpu/inprocess"
"""Tests of the in-process pager with PyTorch, CuPy, JAX and Triton."""


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """This part cannot be run here; the text says why."""


@dataclass
class Bench:
    folder: Path
    emulated: bool
    ends_s: float
    work: Path
    job_s: float
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """Of programs without Kiwi: with the emulated driver where there is no other."""
    uuid: str = ""
    total_bytes: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    """These parts; empty: all."""

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def part(self, name: str, at_least_s: float, run: Callable[[Bench], Any]) -> None:
        if self.only and name not in (*self.only, "machine"):
            return
        began_s = time.monotonic()
        print(f"--- {name} ({self.left_s:.0f} s left)", flush=True)
        try:
            if self.left_s < at_least_s:
                raise Skipped(f"{self.left_s:.0f} s were left and it takes {at_least_s:.0f} s")
            outcome = run(self)
        except Skipped as why:
            outcome = {"skipped": str(why)}
        except Exception as error:  # noqa: BLE001 - one part's failure must not cost the others
            outcome = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        outcome["took_s"] = round(time.monotonic() - began_s, 1)
        self.summary[name] = outcome
        for file in (name, "summary"):
            what = outcome if file == name else self.summary
            (self.folder / f"{file}.json").write_text(json.dumps(what, indent=1) + "\n")
        print(json.dumps(outcome)[:1500], flush=True)


# --- programs and daemons -----------------------------------------------------------------------


def has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def need(bench: Bench, library: str) -> None:
    if bench.emulated:
        raise Skipped(f"{library} needs the CUDA runtime, which the emulated driver has not")
    if not has(library):
        raise Skipped(f"{library} is not installed in this Python")


def job_command(kind: str, **options: object) -> list[str]:
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, JOB, kind, *words]


def spawn(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """What it said. Ended by SIGTERM where it takes too long; SIGKILL only after that."""
    try:
        said, _ = process.communicate(timeout=max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"a job ended with status {process.returncode}")
    answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return answer


def alone(bench: Bench, command: list[str]) -> dict[str, Any]:
    return finish(spawn(command, bench.env), bench.left_s)


class Daemon:
    """``kiwi daemon`` for the one GPU that is measured, and programs under it."""

    def __init__(self, bench: Bench, directory: Path, tq_s: float) -> None:
        self.bench, self.directory = bench, directory
        self.env = bench.env | {"KIWI_SOCKET_DIR": str(directory)}
        which = (
            ["--emulate", f"1x{bench.total_bytes // MIB}MiB"]
            if bench.emulated
            else ["--gpu", bench.uuid]
        )
        self.log = (directory / "log").open("wb")
        command = ["daemon", *which, "--tq", str(tq_s), "--socket-dir", str(directory)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kiwi_core.cli", *command],
            env=self.env, cwd=ROOT, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_ready(self) -> None:
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s and self.process.poll() is None:
            with suppress(Exception):
                self.status()
                return
            time.sleep(0.1)
        raise RuntimeError("no daemon: " + (self.directory / "log").read_text()[-1500:])

    def status(self) -> Any:
        from kiwi_core.client import Client
        from kiwi_core.wire.messages import Role

        path = next(self.directory.glob("GPU-*.sock"))
        with Client(path, role=Role.OBSERVER, reconnect=False) as client:
            client.connect()
            return client.status()

    def run(self, name: str, command: list[str]) -> subprocess.Popen[str]:
        kiwi = [sys.executable, "-m", "kiwi_core.cli", "run", "--require", "--name", name]
        env = self.env if not self.bench.emulated else _without_driver(self.env)
        return spawn([*kiwi, "--", *command], env)

    def stop(self) -> None:
        """It brings everybody back before it leaves."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def _without_driver(env: dict[str, str]) -> dict[str, str]:
    """The daemon gives its own emulated driver to what runs under it."""
    return {k: v for k, v in env.items() if "EMULATOR" not in k and k != "LD_LIBRARY_PATH"}


@contextmanager
def daemon(bench: Bench, tq_s: float) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    one = Daemon(bench, directory, tq_s)
    try:
        one.wait_ready()
        yield one
    finally:
        one.stop()
        shutil.rmtree(directory, ignore_errors=True)


# --- the parts ----------------------------------------------------------------------------------


def pytest_part(*words: str, limit_s: float = 150.0) -> Callable[[Bench], dict[str, Any]]:
    def run(bench: Bench) -> dict[str, Any]:
        if not has("pytest"):
            raise Skipped("pytest is not installed in this Python")
        within_s = min(limit_s, bench.left_s - 60)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            return {"failed": f"not done in {within_s:.0f} s", "tail": text[-1500:]}
        lines = done.stdout.strip().splitlines()
        return {"status": done.returncode, "last": lines[-1] if lines else "", "tail": lines[-25:]}

    return run


def pinned_copy(bench: Bench) -> dict[str, float]:
    """GB/s of plain copies between pinned memory and the GPU, by a process of its own."""
    size = 32 * MIB if bench.emulated else GIB
    code = f"""
import json, sys, time
sys.path.insert(0, {str(Path(JOB).parent)!r})
from job import DriverWork, check
work = DriverWork({size} + (1 << 26)); cu = work.cu; n = {size}
device = int(check(cu.cuMemAlloc(n)))
host = int(check(cu.cuMemAllocHost(n)))
def rate(copy):
    best = 0.0
    for _ in range(6):
        began = time.perf_counter(); check(copy()); check(cu.cuCtxSynchronize())
        best = max(best, n / (time.perf_counter() - began) / 1e9)
    return best
print(json.dumps({{"out_gb_s": rate(lambda: cu.cuMemcpyDtoH(host, device, n)),
                   "in_gb_s": rate(lambda: cu.cuMemcpyHtoD(device, host, n))}}))
"""
    return finish(spawn([sys.executable, "-c", code], bench.env), 60)


def paging(bench: Bench) -> dict[str, Any]:
    """Row 5: GB/s out and in by size, as shares of the pinned copy before and after each size."""
    from kiwi_core.gpu import driver, processes
    from kiwi_core.pager.api import Moved, Target
    from kiwi_core.pager.checkpoint import CheckpointPager

    driver.init()
    pager = CheckpointPager(bench.uuid)
    sizes = [16 * MIB, 64 * MIB] if bench.emulated else [256 * MIB, GIB, 4 * GIB, 16 * GIB]
    rows = []
    for size in sizes:
        if size > bench.total_bytes * 0.8 or bench.left_s < 60:
            continue
        before = pinned_copy(bench)
        process = spawn(job_command("hold", bytes=size), bench.env)
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        ref = processes.ref_of(process.pid)
        assert ref is not None
        target = Target("bench", ref)  # type: ignore[arg-type]
        rates: dict[str, list[float]] = {"out": [], "in": []}
        for _ in range(3):
            for way, call in (("out", pager.page_out), ("in", pager.page_in)):
                outcome = call(target, time.monotonic_ns() + 60 * 10**9)
                if not isinstance(outcome, Moved):
                    raise RuntimeError(f"page {way}: {outcome}")  # noqa: TRY004
                rates[way].append(outcome.bytes_moved / outcome.elapsed_ns)
        last = finish(process, 60)
        after = pinned_copy(bench)
        row: dict[str, Any] = {"bytes": size, "intact": first["digest"] == last["digest"]}
        for way in ("out", "in"):
            pinned = statistics.mean([before[f"{way}_gb_s"], after[f"{way}_gb_s"]])
            gb_s = statistics.median(rates[way])
            row |= {
                f"{way}_gb_s": round(gb_s, 3),
                f"{way}_all": [round(rate, 3) for rate in rates[way]],
                f"pinned_{way}_gb_s": round(pinned, 2),
                f"{way}_share_of_pinned": round(gb_s / pinned, 4),
            }
        rows.append(row)
    return {"backend": "checkpoint", "rows": rows}


def limits(bench: Bench) -> dict[str, Any]:
    """``kiwi bench``: its own JSON, whole; the GPU must be nobody else's meanwhile."""
    file = (bench.folder / "kiwi_bench.json").absolute()
    which = ["--emulate", "1x256MiB"] if bench.emulated else ["--gpu", bench.uuid]
    env = _without_driver(bench.env) if bench.emulated else bench.env
    done = subprocess.run(
        [sys.executable, "-m", "kiwi_core.cli", "bench", *which, "--json", str(file)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if not file.exists():
        raise RuntimeError(done.stderr[-1500:])
    data = json.loads(file.read_text())
    os.environ["KIWI_BENCH_JSON"] = str(file)  # its test judges these numbers
    rows = {
        row["name"]: f"{row['spread']['median']:.4g} {row['unit']}"
        + (f", {row['ratio']:.3g} {row['limit']['of']}" if row["limit"] else "")
        for row in data["rows"]
    }
    return {
        "status": done.returncode, "in_full": file.name, "rows": rows,
        "left_out": data["left_out"], "remedies": data["remedies"],
    }  # fmt: skip


def calibrated(bench: Bench, kind: str, size: int, seconds: float) -> list[str]:
    """A job of about ``seconds`` by itself."""
    sample_s = 1.0 if bench.emulated else 3.0
    said = alone(bench, job_command(kind, bytes=size, calibrate=sample_s))
    rate = said["rounds"] / (said["ended_s"] - said["ready_s"])
    return job_command(kind, bytes=size, rounds=max(10, int(rate * seconds)))


def together(bench: Bench, programs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    return [finish(program, bench.left_s) for program in programs]


def kind_of_job(bench: Bench) -> str:
    return "torch" if has("torch") and not bench.emulated else "driver"


def _wall(run: Callable[[], list[dict[str, Any]]]) -> tuple[float, list[dict[str, Any]]]:
    began_s = time.monotonic()
    said = run()
    return time.monotonic() - began_s, said


def not_fitting(bench: Bench) -> dict[str, Any]:
    """Row 6: two jobs of 60 % each, sharing with a quantum, against one after the other."""
    kind = kind_of_job(bench)
    tq_s = 1.0 if bench.emulated else 30.0
    command = calibrated(bench, kind, int(bench.total_bytes * 0.6), bench.job_s)
    serial_s, one_by_one = _wall(lambda: [alone(bench, command) for _ in range(2)])
    with daemon(bench, tq_s) as kiwi:
        shared_s, shared = _wall(
            lambda: together(bench, [kiwi.run(name, command) for name in ("a", "b")])
        )
        swaps = kiwi.status().swaps
    digests = {one["digest"] for one in (*one_by_one, *shared)}
    out = [s for s in swaps if s.seconds > 0]
    return {
        "kind": kind,
        "tq_s": tq_s,
        "job_s_alone": [round(one["ended_s"] - one["began_s"], 2) for one in one_by_one],
        "one_after_the_other_s": round(serial_s, 2),
        "sharing_s": round(shared_s, 2),
        "ratio": round(shared_s / serial_s, 4),
        "target": 1.03,
        "results_identical": len(digests) == 1,
        "longest_pause_s": [one["slowest_round_s"] for one in shared],
        "pause_bound_s": round(tq_s + sum(s.seconds for s in out[-2:]), 2),
        "swaps": [
            {"direction": str(s.direction), "gb_s": round(s.bytes_moved / s.seconds / 1e9, 3)}
            for s in out
        ],
    }


def fitting(bench: Bench) -> dict[str, Any]:
    """Row 7: two notebooks of 30 % each, ten cells each at the same time, with Kiwi and without,
    in turns. Measured from when both have set up: that is the state in which notebooks live."""
    kind = kind_of_job(bench)
    command = calibrated(bench, kind, int(bench.total_bytes * 0.3), bench.job_s / 4)
    command += ["--cells=10"]
    without: list[float] = []
    with_kiwi: list[float] = []
    digests: set[str] = set()
    with daemon(bench, 30.0) as kiwi:
        for _ in range(3):
            without.append(_pair(bench, command, bench.env, digests))
            env = _without_driver(kiwi.env) if bench.emulated else kiwi.env
            with_kiwi.append(_pair(bench, [*command, "--kiwi"], env, digests))
        swaps = len(kiwi.status().swaps)
    ratio = statistics.median(with_kiwi) / statistics.median(without)
    return {
        "kind": kind,
        "without_s": [round(value, 3) for value in without],
        "with_kiwi_s": [round(value, 3) for value in with_kiwi],
        "ratio": round(ratio, 4),
        "target": 1.02,
        "swaps": swaps,
        "results_identical": len(digests) == 1,
    }


def _pair(bench: Bench, command: list[str], env: dict[str, str], digests: set[str]) -> float:
    env = env | {"PYTHONPATH": str(ROOT)}
    pair = [spawn(command, env) for _ in range(2)]
    for _ in range(2):
        for one in pair:
            assert one.stdout is not None
            one.stdout.readline()
        time.sleep(1.0)
        for one in pair:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
    said = together(bench, pair)
    digests.update(one["digest"] for one in said)
    return float(max(one["ended_s"] for one in said) - min(one["began_s"] for one in said))


def training(bench: Bench) -> dict[str, Any]:
    """A PyTorch training loop, suspended in mid-cell again and again: the same losses?"""
    need(bench, "torch")
    command = job_command("train", rounds=400)
    plain = alone(bench, command)
    tq_s = 2.0
    with daemon(bench, tq_s) as kiwi:
        subprocess.run(
            [sys.executable, "-m", "kiwi_core.cli", "set", "anti-thrash=always",
             "--socket-dir", str(kiwi.directory)],
            env=kiwi.env, cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        said = together(bench, [kiwi.run(name, command) for name in ("a", "b")])
        swaps = len(kiwi.status().swaps)
        journal = next((kiwi.directory / "state").glob("*.journal")).read_text()
    suspended = sum(journal.count(f'"action":"{what}"') for what in ("Suspend", "PageOut"))
    return {
        "rounds": plain["rounds"],
        "losses_identical": [one["losses"] == plain["losses"] for one in said],
        "stopped_in_mid_loop": suspended,
        "swaps": swaps,
        "first_and_last_loss": [float.fromhex(plain["losses"][i]) for i in (0, -1)],
    }


def libraries(bench: Bench) -> dict[str, Any]:
    """CuPy and JAX: memory taken, moved out and in, and the same afterwards."""
    if bench.emulated:
        raise Skipped("CuPy and JAX need the CUDA runtime, which the emulated driver has not")
    found: dict[str, Any] = {}
    programs = {
        "cupy": "import cupy as x; a = x.arange(1 << 26, dtype='float32'); f = lambda: "
        "float(a.sum())",
        "jax": "import jax.numpy as x; a = x.arange(1 << 26, dtype='float32'); f = lambda: "
        "float(a.sum())",
    }
    for library, code in programs.items():
        found[library] = _moved(bench, code) if has(library) else "not installed"
    return found


def _moved(bench: Bench, code: str) -> str:
    from kiwi_core.gpu import driver, processes
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.checkpoint import CheckpointPager

    driver.init()
    pager = CheckpointPager(bench.uuid)
    loop = "; print(f(), flush=True); input(); print(f(), flush=True)"
    env = bench.env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = spawn([sys.executable, "-c", code + loop], env)
    assert process.stdout is not None
    before = process.stdout.readline().strip()
    ref = processes.ref_of(process.pid)
    if not before or ref is None:
        return "the program failed"
    target = Target("bench", ref)  # type: ignore[arg-type]
    out = pager.page_out(target, time.monotonic_ns() + 60 * 10**9)
    back = pager.page_in(target, time.monotonic_ns() + 60 * 10**9)
    after, _ = process.communicate("\n", timeout=60)
    verdict = "same" if after.strip() == before else f"{before} became {after.strip()}"
    return f"{verdict}; out: {out}; in: {back}"


# --- all of it ----------------------------------------------------------------------------------


def prepare(bench: Bench) -> dict[str, Any]:
    from common import machine

    if bench.emulated:
        from kiwi_core import emulator

        libs = emulator.build()
        state = bench.work / "gpus"
        emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
        extra = emulator.environment(state, libs)
        bench.env |= extra
        os.environ.update(extra)
        emulator.load(str(libs.libcuda), str(libs.libnvml))
    from kiwi_core.gpu import nvml

    gpu = nvml.gpus()[0]
    bench.uuid, bench.total_bytes = gpu.uuid, gpu.total_bytes
    bench.env.setdefault("CUDA_VISIBLE_DEVICES", gpu.uuid if not bench.emulated else "0")
    words = "emulated" if bench.emulated else f"{gpu.name}, driver {gpu.driver_version}"
    return {
        "machine": machine(words),
        "gpu_bytes": gpu.total_bytes,
        "libraries": {name: has(name) for name in ("torch", "cupy", "jax", "cuda", "pynvml")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the JSON files go")
    parser.add_argument(
        "--emulated-selftest",
        action="store_true",
        help="the same logic on the emulated driver; the figures mean nothing",
    )
    parser.add_argument(
        "--job-seconds",
        type=float,
        default=None,
        help="how long a job takes by itself (default: 60; self-test: 3)",
    )
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART",
        help="only these parts, by the names of their files, for a second run of ten minutes",
    )  # fmt: skip
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    args = parser.parse_args()  # fmt: skip
    args.folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kw-"))
    emulated = args.emulated_selftest
    job_s = args.job_seconds or (3.0 if emulated else 60.0)
    ends_s = time.monotonic() + args.budget_seconds
    bench = Bench(args.folder, emulated, ends_s, work, job_s, only=tuple(args.only))
    try:
        bench.part("machine", 1, prepare)
        if not bench.uuid:
            print("there is no GPU to measure; see machine.json", file=sys.stderr)
            return 1
        bench.part("limits", 125, limits)
        marks = "gpu" if not emulated else "not gpu"
        if not args.skip_tests:
            bench.part("conformance", 60, pytest_part("-m", marks, "tests/conformance"))
        bench.part("paging", 40, paging)
        bench.part("training", 60 if not emulated else 1, training)
        bench.part("two_that_do_not_fit", 4 * job_s + 15, not_fitting)
        bench.part("two_that_fit", 2 * job_s + 15, fitting)
        bench.part("libraries", 20, libraries)
        if not args.skip_tests and not emulated:
            words = ("-m", "gpu", "tests", "--ignore=tests/conformance", f"--ignore={INPROCESS}")
            bench.part("gpu_tests", 60, pytest_part(*words))
            # Only a run of its own (--only inprocess) has time for all of it.
            bench.part("inprocess", 90, pytest_part("-m", "gpu", INPROCESS, limit_s=BUDGET_S))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
