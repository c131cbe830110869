"""``python -m kiwi_core.bench.proof UUID``: let this machine prove that Kiwi's library moves memory
here without losing a byte.

All happens in a program of Kiwi's own and in free memory: nobody is disturbed but for the GPU's
time. ``gpu.proofs`` keeps the result, which decides whether the library owns the memory of programs
that ask for nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core import config, preload
from kiwi_core.bench.conductor import ENV_VISIBLE
from kiwi_core.bench.one_link import CONNECTS_WITHIN_S, OneLink
from kiwi_core.bench.process import BenchWorker
from kiwi_core.errors import GpuError, KiwiError
from kiwi_core.gpu import nvml, proofs
from kiwi_core.gpu.proofs import Proof
from kiwi_core.preload import ready
from kiwi_core.states import Reason
from kiwi_core.units import MIB
from kiwi_core.wire.pager import PagerAction, PagerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.wire.pager import PagerDone

STOPPED: Final = 3
"""Exit status if nothing was proven, neither this nor that."""

LIMIT_S: Final = 60.0
"""For all steps together. A proof that takes longer shows nothing."""

HANGS_S: Final = 120.0
"""Then the whole proof ends, whatever waits for whatever."""

WRONG: Final = "proof"
"""Code of errors that speak against the library: wrong or lost bytes. All others (no memory, no
time, a reading of NVML that fails) may be gone at the next try, and prove nothing."""
UNCLEAR: Final = "unclear"
BROKEN: Final = frozenset({"driver", "invalid-value", "bad-context"})
"""Errors of the driver that speak against the library, too, once it has moved something."""
CRASHES: Final = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT})

STEP_S: Final = 20.0
MOVE_S: Final = 10.0

PIECE_MAX_BYTES: Final = 64 * MIB
TIMED_MAX_BYTES: Final = 512 * MIB
"""At 55 GB/s it takes 10 ms."""

FREE_MIN_BYTES: Final = 96 * MIB
CONTEXT_BYTES: Final = 600 * MIB
"""A context on the largest GPUs; the proof leaves room for it."""

ROUND_TRIPS: Final = 3
ROUNDS_UNDER_THREADS: Final = 8
THREADS: Final = 4
CUTS_MAX: Final = 6
PINNED_WITHIN_S: Final = 10.0
NVML_EVERY_S: Final = 0.02


@dataclass
class ProofRun:
    """One proof under way: the program, the daemon's end of its library, and what went well."""

    gpu: GpuInfo
    program: BenchWorker
    link: OneLink
    say: Callable[[str], None]
    ends_s: float
    done: list[str] = field(default_factory=list)
    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        if time.monotonic() > self.ends_s:
            raise GpuError(UNCLEAR, f"It took more than {LIMIT_S:.0f} s.")
        self.say(name)
        yield
        self.done.append(name)

    def move(self, action: PagerAction) -> PagerDone:
        """Move all memory of the program. Raise if that is refused."""
        done = self.link.order(action, MOVE_S)
        if done.outcome is not PagerOutcome.MOVED:
            by_driver = done.reason == Reason.DRIVER.value  # and not for want of memory or time
            code = WRONG if by_driver or done.outcome is PagerOutcome.LOST else UNCLEAR
            raise GpuError(code, f"A {action.value} was {done.outcome.value}: {done.detail}")
        return done

    def out_and_in(self) -> None:
        self.move(PagerAction.PAGE_OUT)
        self.move(PagerAction.PAGE_IN)


def prove(
    gpu: GpuInfo,
    say: Callable[[str], None],
    began: Callable[[BenchWorker, Path], None] = lambda _program, _directory: None,
) -> Proof:
    """Let ``gpu`` prove itself; ``say`` is told what begins, ``began`` the program and the
    directory of both. Raise ``KiwiError`` if nothing was proven, neither this nor that: there is no
    library or no memory, somebody got in the way, or it took too long."""
    try:
        library = ready.ensure()
    except preload.Unavailable as error:
        raise KiwiError("no-library", error.message, error.remedy) from error
    free = nvml.memory(gpu.uuid).free_bytes
    if free < FREE_MIN_BYTES:
        raise KiwiError("no-room", "The GPU has too little free memory now to prove anything.")
    directory = Path(tempfile.mkdtemp(prefix="kiwi-prove-"))
    failed = ""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        link = stack.enter_context(OneLink(directory / f"{gpu.uuid}.sock"))
        env = _environment(gpu, directory, library)
        program = stack.enter_context(BenchWorker("proving", env, directory / "program.log"))
        run = ProofRun(gpu, program, link, say, time.monotonic() + LIMIT_S)
        began(program, directory)
        try:
            _all_steps(run, free)
        except BaseException as error:
            program.kill()  # it may wait at the gate for ever
            failed = _evidence(error, run)
            if not failed:
                raise
    model, driver = proofs.kind_of(gpu)
    return Proof(
        gpu=model, driver=driver, failed=failed, checks=tuple(run.done),
        out_bytes_per_s=run.out_bytes_per_s, in_bytes_per_s=run.in_bytes_per_s,
    )  # fmt: skip


def _evidence(error: BaseException, run: ProofRun) -> str:
    """Return what speaks against the library, in words; "": nothing does."""
    if not isinstance(error, KiwiError):
        return ""
    crashed = error.code == "worker-ended" and run.program.status in CRASHES
    wrong = error.code == WRONG or (bool(run.done) and error.code in BROKEN)
    return error.message if crashed or wrong else ""


def _environment(gpu: GpuInfo, directory: Path, library: Path) -> dict[str, str]:
    left_out = (config.ENV_DISABLE, config.ENV_GPU, "KIWI_RUN_SESSION")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **env,
        **preload.environment(library, env),
        preload.ENV_OWN: "1",
        config.ENV_SOCKET_DIR: str(directory),
        ENV_VISIBLE: gpu.uuid,
    }


def _all_steps(run: ProofRun, free_bytes: int) -> None:
    room = max(free_bytes - CONTEXT_BYTES, free_bytes // 2) // 2
    piece = min(PIECE_MAX_BYTES, room // 8 // MIB * MIB)
    with _nvml_meanwhile(run.gpu.uuid):
        with run.step("memory is owned"):
            _own(run, piece)
        with run.step("every byte comes back"):
            _round_trips(run)
        with run.step("the program's own mappings"):
            _mappings(run)
        with run.step("graphs and captures"):
            _graphs(run)
        with run.step("while threads work"):
            _under_threads(run)
        with run.step("a page-out that is cut short"):
            _cut_short(run)
        with run.step("speed"):
            _speed(run, min(TIMED_MAX_BYTES, room // 2 // MIB * MIB))


def _own(run: ProofRun, piece: int) -> None:
    link, program = run.link, run.program
    program.ask("open", STEP_S * 2, uuid=run.gpu.uuid)
    link.wait_for(lambda: link.state is not None, "for its state", CONNECTS_WITHIN_S)
    taken = program.ask("take_pieces", STEP_S, size_bytes=piece)
    what = f"to own the {taken} bytes that its program took"
    link.wait_for(lambda: link.state is not None and link.state.resident_bytes >= taken, what, 5.0)


def _round_trips(run: ProofRun) -> None:
    poor = 0
    for seed in range(ROUND_TRIPS):
        before = nvml.memory(run.gpu.uuid).free_bytes
        moved = run.move(PagerAction.PAGE_OUT).bytes
        gained = nvml.memory(run.gpu.uuid).free_bytes - before
        poor += gained * 2 < moved  # once, somebody else may have taken it meanwhile
        if poor == ROUND_TRIPS:
            words = f"The GPU gained {gained} bytes when {moved} bytes were paged out, each time."
            raise GpuError(WRONG, words)
        run.move(PagerAction.PAGE_IN)
        run.program.ask("same", STEP_S)
        run.program.ask("write", STEP_S, seed=seed)


def _mappings(run: ProofRun) -> None:
    for change in ("alias", "unmap", "map_again"):
        run.program.ask(change, STEP_S)
        run.out_and_in()
        run.program.ask("same", STEP_S)


def _graphs(run: ProofRun) -> None:
    program, link = run.program, run.link
    program.ask("capture", STEP_S)
    in_capture = link.order(PagerAction.PAGE_OUT, 0.5)
    if in_capture.outcome is not PagerOutcome.REFUSED:
        raise GpuError(WRONG, "A page-out in the middle of a capture was not refused.")
    program.ask("end_capture", STEP_S)
    program.ask("launch", STEP_S)
    run.out_and_in()
    program.ask("launch", STEP_S)
    program.ask("same", STEP_S)


def _under_threads(run: ProofRun) -> None:
    run.program.ask("start_threads", STEP_S, count=THREADS)
    for _ in range(ROUNDS_UNDER_THREADS):
        time.sleep(0.02)
        run.out_and_in()
    run.program.ask("stop_threads", STEP_S)
    run.program.ask("same", STEP_S)


def _cut_short(run: ProofRun) -> None:
    """Give a page-out ever less time, until it cannot end. What it had moved must be back."""
    within_s = max(run.move(PagerAction.PAGE_OUT).elapsed_ns / 2e9, 1e-4)
    run.move(PagerAction.PAGE_IN)
    for _ in range(CUTS_MAX):
        done = run.link.order(PagerAction.PAGE_OUT, within_s)
        if done.outcome is PagerOutcome.MOVED:
            run.move(PagerAction.PAGE_IN)
        elif done.outcome is PagerOutcome.LOST:
            raise GpuError(WRONG, f"A page-out that was cut short lost memory: {done.detail}")
        else:
            run.link.order(PagerAction.FREE, MOVE_S)
        run.program.ask("same", STEP_S)
        within_s /= 2


def _speed(run: ProofRun, size: int) -> None:
    link, program = run.link, run.program
    program.ask("hold", STEP_S, size_bytes=size)
    assert link.state is not None
    held = link.state.resident_bytes + size
    link.allow(held)
    with suppress(GpuError):  # a machine with little RAM pins less: slow, but not wrong
        link.wait_for(
            lambda: link.state is not None and link.state.arena_bytes >= held, "to pin memory",
            min(PINNED_WITHIN_S, run.ends_s - time.monotonic()),
        )  # fmt: skip
    for _ in range(ROUND_TRIPS):
        out, back = run.move(PagerAction.PAGE_OUT), run.move(PagerAction.PAGE_IN)
        out_speed, in_speed = (done.bytes * 1e9 / max(done.elapsed_ns, 1) for done in (out, back))
        run.out_bytes_per_s = max(run.out_bytes_per_s, out_speed)
        run.in_bytes_per_s = max(run.in_bytes_per_s, in_speed)
    if not program.ask("intact", STEP_S):
        raise GpuError(WRONG, f"{size} bytes came back with other contents.")


@contextmanager
def _nvml_meanwhile(uuid: str) -> Iterator[None]:
    """Read NVML all the time, as monitors do. Raise if a reading fails."""
    over, failed = threading.Event(), list[KiwiError]()

    def read() -> None:
        try:
            while not over.wait(NVML_EVERY_S):
                nvml.memory(uuid)
                nvml.processes(uuid)
        except KiwiError as error:
            failed.append(error)

    reader = threading.Thread(target=read, name="nvml", daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join(STEP_S)
    if failed:
        raise failed[0]
    if reader.is_alive():
        raise GpuError(UNCLEAR, "NVML did not answer while memory was moved.")


class Leash:
    """Ends this process at once, and its program, when standard input ends: the daemon needs the
    GPU, or is gone. Likewise when the whole takes too long."""

    def __init__(self) -> None:
        self._program: BenchWorker | None = None
        self._directory: Path | None = None
        for wait in (sys.stdin.buffer.read, lambda: time.sleep(HANGS_S)):
            threading.Thread(target=self._end_after, args=(wait,), daemon=True).start()

    def began(self, program: BenchWorker, directory: Path) -> None:
        self._program, self._directory = program, directory

    def _end_after(self, wait: Callable[[], object]) -> None:
        wait()
        if self._program is not None:
            self._program.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(STOPPED)


def main(uuid: str) -> int:
    """Prove one GPU and keep the result, for a daemon that watches this process."""
    os.nice(5)
    try:
        ready.ensure()  # a compiler is not stopped, and takes as long as it takes
        leash = Leash()
        gpu = next(gpu for gpu in nvml.gpus() if gpu.uuid == uuid)
        with proofs.one_at_a_time():
            if proofs.load(*proofs.kind_of(gpu)) is None:
                proofs.save(prove(gpu, lambda _name: None, leash.began))
    except (KiwiError, preload.Unavailable, OSError, StopIteration) as error:
        sys.stderr.write(f"{error}\n")
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
