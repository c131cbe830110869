"""What a page-out of an idle program costs whose memory was copied ahead, beside one that copies.

A program under the preloaded library owns 128 MiB on an emulated GPU whose bus carries 256 MiB/s:
on a real one the copies take as large a part of a page-out of some GiB. It has no lease. In turns,
its memory is moved out with and without copies that were made ahead, and back in. The ratio is
what is left: settling, unmapping, and giving the memory back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, Samples, arguments, machine, report, samples_table, target
from preload_world import World
from tested_library import tested_library

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from cuda_processes import Worker

MIB = 1 << 20
OWNED = 128 * MIB
BUS_BYTES_PER_S = 256 * MIB
LIMIT = 0.01

SETUP = f"""
import time
from owner_calls import *
prepare()
held = [make({OWNED // 4}, seed) for seed in range(4)]
until(lambda: arena()['pinned'] >= {OWNED}, 'nothing was pinned')

def out_ns():
    began_ns = time.perf_counter_ns()
    assert out() == 'moved'
    return time.perf_counter_ns() - began_ns
"""


def measure(program: Worker, copied_ahead: bool) -> int:
    """Return the time of a page-out in nanoseconds, and bring the memory back."""
    program.do("disarm(); arm()")  # the copies of the last round are void
    if copied_ahead:
        assert program.get("ahead()")
    took_ns = int(program.get("out_ns()"))
    program.do("assert back() == 'moved'")
    return took_ns


def main() -> None:
    args = arguments(__doc__)
    results: dict[str, Any] = {"machine": machine("emulated")}
    samples = {"copied at the page-out": Samples(), "copied ahead": Samples()}
    with tempfile.TemporaryDirectory() as scratch:
        world = World(Path(scratch), tested_library())
        try:
            program = world.worker("init()", PYTHONPATH=str(ROOT / "tests" / "support"))
            program.do(SETUP)
            emulator.set_copy_bandwidth(world.state, BUS_BYTES_PER_S)
            for _ in range(3 if args.quick else 25):
                for copied_ahead, sample in enumerate(samples.values()):
                    sample.add(measure(program, bool(copied_ahead)))
            emulator.set_copy_bandwidth(world.state, 0)
            program.do("disarm(); same(*held); check()")
        finally:
            world.close()
    samples_table(samples)
    copied, ahead = (sample.median_ns for sample in samples.values())
    results["samples"] = {name: sample.summary() for name, sample in samples.items()}
    results["targets"] = [target("page-out after copies ahead / a copy", ahead / copied, LIMIT)]
    report("copies_ahead", results, args)


if __name__ == "__main__":
    main()
