"""How long a program waits whose memory is out while an idle one's memory is in its way, beside the
copy of its own memory into a GPU that is free.

Two programs that ask for nothing, each with 144 MiB, and a daemon on an emulated GPU of 256 MiB
whose bus carries 128 MiB/s: 16 GiB at 14 GiB/s take about as long. The idle one has been idle long
enough for its library to have copied its memory ahead. From the first call to its return: settling,
the page-out of the one, the page-in of the other, and all that Kiwi does about it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, machine, report, samples_table, target
from daemon import running_daemon
from pagers import DEFAULT
from preloaded_program import PreloadedProgram

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from daemon import Daemon

GPU = "1x256MiB"
MIB = 1 << 20
SIZE_MIB = 144
BUS_BYTES_PER_S = 128 * MIB
AHEAD_S = 2.0 * SIZE_MIB * MIB / BUS_BYTES_PER_S + 4.0
"""Time for all copies ahead, and for the turn of the idle one to be over."""
LIMIT = 1.15

CALL = (
    "def first_call():\n"
    "    began = time.perf_counter_ns()\n"
    "    digest(p, 4096)\n"
    "    return time.perf_counter_ns() - began\n"
    "import time"
)


def out(daemon: Daemon, program: PreloadedProgram) -> None:
    """Move the memory of an idle program out, and wait for that."""
    daemon.wait_state(program.pid, "idle", "paged-out")
    with daemon.client() as client:
        session = daemon.session(program.pid)
        assert session is not None
        if session.state.value != "paged-out":
            client.release(session.id)
    daemon.wait_state(program.pid, "paged-out")


def main() -> None:
    args = arguments(__doc__)
    results: dict[str, Any] = {"machine": machine("emulated")}
    samples = {"the GPU is free": Samples(), "an idle one is in the way": Samples()}
    alone, beside = samples.values()
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(GPU, "--idle-after", "0.2", pager=DEFAULT))
        programs = []
        for seed in (1, 2):
            one = PreloadedProgram(daemon, KIWI_PRELOAD_OWN="auto")
            stack.callback(one.close)
            one.take(SIZE_MIB, seed)
            one.do(CALL)
            programs.append(one)
        emulator.set_copy_bandwidth(daemon.state_path, BUS_BYTES_PER_S)
        idle, comes = programs
        for _ in range(2 if args.quick else 9):
            for one in programs:
                out(daemon, one)
            alone.add(comes.get("first_call()"))
            comes, idle = idle, comes
            time.sleep(AHEAD_S)
            beside.add(comes.get("first_call()"))
            time.sleep(AHEAD_S)
        emulator.set_copy_bandwidth(daemon.state_path, 0)
        assert all(one.intact() for one in programs)
    samples_table(samples)
    results["samples"] = {name: sample.summary() for name, sample in samples.items()}
    ratio = beside.median_ns / alone.median_ns
    results["targets"] = [target("first call beside an idle one / alone", ratio, LIMIT)]
    report("idle_victim", results, args)


if __name__ == "__main__":
    main()
