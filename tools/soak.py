"""Hours of everything at once: bursts, restarts, interrupts, killed programs, killed daemons.

    python tools/soak.py --hours 24 [--seed 7]

Each of two emulated GPUs has two notebooks (one that the driver moves and one that its library
moves, by default on a machine that has proven itself) and programs under ``kiwi run``.
The daemon of GPU 0 is killed each minute. That of GPU 1 lives from the beginning to the end, loses
one of its movers four times a minute, and must not grow. Each program must read back what it wrote.
At the end the GPUs are empty and nothing is left. The seed decides who does what in which order,
not when.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1] / "tests"
    sys.path[1:1] = [str(TESTS / "blackbox"), str(TESTS / "support")]

import gpu_cells
import psutil
import pytest
from daemon_box import KIWI, DaemonBox, running_daemon
from kernels import running_kernel
from leftovers import nothing_left
from patience import die_with_the_test, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels import Cell, Kernel

MIB = 1 << 20
GPUS = "2x128MiB"
SIZES_MIB = (40, 56, 72)
"""Sizes of programs: two of the smallest fit with their contexts, others do not."""

LATE_MAX_S = 120.0
KILL_EVERY_S = 60.0
REPORT_EVERY_S = 60.0
LOOK_EVERY_S = 1.0
PATIENT = "c.Kiwi.daemon_grace_s = 600.0"
CELL_WITHIN_S = 300.0
"""A cell waits for the turns of five others and for a daemon that restarts: half a minute on a busy
machine. A cell that takes ten times as long hangs."""

GROWTH_BYTES = 24 * MIB
"""The daemon that lives throughout may grow by this from its first minutes to its end, for its
history, its sums and the allocator's pools."""
MORE_DESCRIPTORS = 4
MORE_THREADS = 8
"""It may have this many more threads than at the beginning, because pools keep their largest
size."""

PROGRAM = f"""{gpu_cells.PRELUDE}
memory = Memory(int(sys.argv[1]), int(sys.argv[2]))
memory.work(steps=int(sys.argv[3]), write=True, pause=0.002)
assert memory.intact(), "DAMAGED"
print("INTACT")
"""


@dataclass(frozen=True)
class Plan:
    hours: float
    seed: int

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def kill_every_s(self) -> float:
        return min(KILL_EVERY_S, self.seconds / 4)

    @property
    def report_every_s(self) -> float:
        return min(REPORT_EVERY_S, self.seconds / 4)


class Run:
    """The state that all actors share: the end, the counts, and the first fault."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.began_s = time.monotonic()
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    @property
    def over(self) -> bool:
        """Return whether the time is up. A short run on a busy machine goes on until each of the
        actors has done something."""
        late_s = self.elapsed_s - self.plan.seconds
        return self.stop.is_set() or late_s > (0.0 if self._has_all() else LATE_MAX_S)

    def _has_all(self) -> bool:
        return all(self.counts[what] for what in ("bursts", "killed daemons", "killed movers"))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def rest(self, seconds: float) -> None:
        self.stop.wait(seconds)

    def failed(self, who: str, why: str) -> None:
        self.failures.append(f"{who} after {self.elapsed_s:.0f} s: {why}")
        self.stop.set()

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - told in the verdict
                self.failed(name, traceback.format_exc())

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


class NotebookActor:
    """A user of a notebook: works, thinks, interrupts, restarts the kernel."""

    ACTIONS = ("burst", "burst", "burst", "think", "check", "interrupt", "restart")

    def __init__(self, run: Run, name: str, env: dict[str, str]) -> None:
        self._run, self._name, self._env = run, name, env
        self._chance = random.Random(f"{run.plan.seed} {name}")
        self._kernel: Kernel

    def __call__(self) -> None:
        with running_kernel(self._env, config=PATIENT) as self._kernel:
            self._take()
            while not self._run.over:
                getattr(self, f"_{self._chance.choice(self.ACTIONS)}")()
            self._check()

    def _take(self) -> None:
        self._ok(gpu_cells.PRELUDE)
        size_mib, seed = self._chance.choice(SIZES_MIB), self._chance.randrange(1 << 30)
        self._ok(gpu_cells.take(size_mib, seed))

    def _ok(self, code: str) -> str:
        cell = self._kernel.run(code, CELL_WITHIN_S)
        assert cell.status == "ok", f"{code[-200:]!r}: {cell.traceback}\n{self._kernel.log()}"
        return cell.text

    def _burst(self) -> None:
        steps = self._chance.randrange(1, 60)
        self._ok(gpu_cells.work(steps=steps, write=True))
        self._run.counts["bursts"] += 1

    def _think(self) -> None:
        self._run.rest(self._chance.uniform(0, 2))

    def _check(self) -> None:
        assert self._ok(gpu_cells.INTACT) == "INTACT\n", "bytes are damaged"
        self._run.counts["checks"] += 1

    def _interrupt(self) -> None:
        """Interrupt a cell that only reads, at any point."""
        cell: Cell = self._kernel.send(gpu_cells.work(30.0))
        self._run.rest(self._chance.uniform(0.05, 1.5))
        if not cell.done:
            self._kernel.interrupt()
        self._kernel.finish(cell, CELL_WITHIN_S)
        if cell.error not in ("", "KeyboardInterrupt"):
            raise AssertionError(f"an interrupted cell says {cell.traceback}")
        self._run.counts["interrupts"] += 1

    def _restart(self) -> None:
        self._kernel.restart(now=self._chance.random() < 0.7)
        self._take()
        self._run.counts["restarts"] += 1


class ProgramActor:
    """A user who runs one program after the other under ``kiwi run``, and kills some of them."""

    NO_DAEMON = "No Kiwi daemon"

    def __init__(self, run: Run, name: str, env: dict[str, str]) -> None:
        self._run, self._name, self._env = run, name, env
        self._chance = random.Random(f"{run.plan.seed} {name}")

    def __call__(self) -> None:
        while not self._run.over:
            self._one_program()
            self._run.rest(self._chance.uniform(0, 2))

    def _one_program(self) -> None:
        pager = self._chance.choice(("checkpoint", "inprocess", "auto"))
        size_mib, seed = self._chance.choice(SIZES_MIB), self._chance.randrange(1 << 30)
        steps = self._chance.randrange(1, 200)
        fate = self._chance.choice((None, None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
        process = subprocess.Popen(
            [str(KIWI), "run", "--require", "--pager", pager, "--",
             sys.executable, "-c", PROGRAM, str(size_mib), str(seed), str(steps)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **self._env}, start_new_session=True,
            preexec_fn=die_with_the_test,
        )  # fmt: skip
        if fate is not None:
            self._run.rest(self._chance.uniform(0.1, 4.0))
            os.killpg(process.pid, fate)  # a terminal or a batch system kills the whole group
        out, err = process.communicate(timeout=CELL_WITHIN_S)
        self._judge(process.returncode, out, err, fate)

    def _judge(self, code: int, out: str, err: str, fate: signal.Signals | None) -> None:
        if code == 1 and self.NO_DAEMON in err:
            self._run.counts["found no daemon"] += 1  # the daemon of GPU 0 restarts at this moment
            return
        ended_well = (code, out) == (0, "INTACT\n")
        if not ended_well and (fate is None or "DAMAGED" in err or "damaged" in err):
            raise AssertionError(f"kiwi run ended with {code} ({fate}):\n{out}\n{err}")
        self._run.counts["programs" if fate is None else "killed programs"] += 1


class Killer:
    """Kills the daemon of GPU 0 again and again."""

    def __init__(self, run: Run, box: DaemonBox) -> None:
        self._run, self._box = run, box

    def __call__(self) -> None:
        while not self._run.over:
            self._run.rest(self._run.plan.kill_every_s)
            if self._run.over:
                return
            old = self._box.pid()
            os.kill(old, signal.SIGKILL)
            self._box.wait_answer(other_than=old)
            self._run.counts["killed daemons"] += 1


class MoverKiller:
    """Kills one of the movers of GPU 1 again and again; its daemon lives on."""

    def __init__(self, run: Run, box: DaemonBox) -> None:
        self._run, self._box = run, box
        self._chance = random.Random(f"{run.plan.seed} movers")

    def __call__(self) -> None:
        while not self._run.over:
            self._run.rest(self._run.plan.kill_every_s / 4)
            movers = self._box.movers()
            if movers and not self._run.over:
                self._chance.choice(movers).kill()
                self._run.counts["killed movers"] += 1


@dataclass(frozen=True)
class Size:
    """What a process takes of the machine."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = psutil.Process(pid)
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        mib = self.resident_bytes // MIB
        return f"{mib} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Watch:
    """Watches the processes that live throughout: the supervisor, and the daemon of GPU 1."""

    def __init__(self, box: DaemonBox) -> None:
        assert box.process is not None
        self.pids = {"supervisor": box.process.pid, "daemon": box.pid()}
        self.empty = self.sizes()
        self._warm: dict[str, Size] = {}

    def sizes(self) -> dict[str, Size]:
        return {name: Size.of(pid) for name, pid in self.pids.items()}

    def look(self, run: Run) -> None:
        """Record the sizes for comparison once warm: after a tenth of the time, at most an hour."""
        if not self._warm and run.elapsed_s > min(run.plan.seconds / 10, 3600):
            self._warm = self.sizes()

    def grown(self) -> str:
        """Return what has grown at the end, when no client is connected; "" if nothing has."""
        wrong = []
        for name, now in self.sizes().items():
            before, warm = self.empty[name], self._warm.get(name, self.empty[name])
            if (
                now.resident_bytes > warm.resident_bytes + GROWTH_BYTES
                or now.descriptors > before.descriptors + MORE_DESCRIPTORS
                or now.threads > before.threads + MORE_THREADS
            ):
                wrong.append(f"the {name} has grown: empty {before}; warm {warm}; now {now}")
        return "; ".join(wrong)


def say(text: str) -> None:
    print(f"soak: {text}", flush=True)


def actors(run: Run, box: DaemonBox) -> list[threading.Thread]:
    threads = []
    for gpu in ("0", "1"):
        env = {**box.env, "KIWI_GPU": gpu}
        checkpoint = {**env, "KIWI_PAGER": "checkpoint"}
        crew = {
            f"checkpoint notebook {gpu}": NotebookActor(run, f"checkpoint {gpu}", checkpoint),
            f"notebook {gpu}": NotebookActor(run, f"library {gpu}", env),
            f"programs {gpu}": ProgramActor(run, f"programs {gpu}", env),
        }
        threads += [run.start(name, act) for name, act in crew.items()]
    return threads


def watch_over(run: Run, watch: Watch) -> None:
    while not run.over:
        left_s = run.plan.seconds - run.elapsed_s
        run.rest(min(run.plan.report_every_s, max(left_s, LOOK_EVERY_S)))
        watch.look(run)
        done = ", ".join(f"{count} {what}" for what, count in sorted(run.counts.items()))
        say(f"{run.elapsed_s:.0f} s: {done}; the daemon has {watch.sizes()['daemon']}")


def soak(plan: Plan) -> list[str]:
    """Run the soak, and return what went wrong."""
    with ExitStack() as stack:
        stack.enter_context(nothing_left(stack.enter_context(pytest.MonkeyPatch.context())))
        subprocess.run([str(KIWI), "doctor", "--prove", "--emulate", "1x128MiB"], check=True)
        box = stack.enter_context(running_daemon(GPUS, "--tq", "1"))
        steady = stack.enter_context(box.beside(1))
        watch = Watch(steady)
        run = Run(plan)
        killers = {"killer": Killer(run, box), "mover killer": MoverKiller(run, steady)}
        threads = actors(run, box)
        threads += [run.start(name, kill) for name, kill in killers.items()]
        watch_over(run, watch)
        for thread in threads:
            thread.join(2 * CELL_WITHIN_S)
            if thread.is_alive():
                run.failed(thread.name, "does not end")
        if not run.failures:
            run.failures += balance(box, steady, watch)
        return [*run.failures, *([box.log()[-20_000:]] if run.failures else [])]


def balance(box: DaemonBox, steady: DaemonBox, watch: Watch) -> list[str]:
    """Check that the GPUs are empty, the daemons are as small as before, and they end in order."""
    wrong: list[str] = []

    def check(what: str, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            wrong.append(str(error))

    check("the GPUs are empty", lambda: not any(box.gpu.used_bytes().values()))
    check("no session is left", lambda: not box.status()["sessions"] + steady.status()["sessions"])
    check("it is flat", lambda: not watch.grown())
    wrong += [grown] if (grown := watch.grown()) else []
    if (code := box.leave()) != 0:
        wrong.append(f"the daemon ended with {code}")
    wrong += [f"the daemon's log has {word!r}" for word in COMPLAINTS if word in box.log()]
    return wrong


COMPLAINTS = ("daemon crashed", "message not handled", "operation raised", "Traceback")
"""What a daemon logs after a fault of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Everything at once, for hours.")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args(arguments)
    say(f"{options.hours:g} hours, --seed {options.seed}")
    try:
        wrong = soak(Plan(options.hours, options.seed))
    except AssertionError as error:
        wrong = [str(error)]
    for line in wrong:
        say(line)
    say("FAILED" if wrong else "passed: every byte is right, and nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
