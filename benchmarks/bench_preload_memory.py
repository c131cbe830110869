"""The cost of owning memory: GPU memory that nobody asked for, host memory, and instructions.

A program under the preloaded library allocates mixes of sizes on the emulated driver; the library's
books show the cost. The driver's own rounding is not the library's cost: a real driver rounds to
2 MiB, the emulated one to 4 KiB. With valgrind, also the instructions of an allocation and its free
in the library. Nothing here says anything about speed on a GPU.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, arguments, machine, report, table

import kiwi_emulator as emulator
from kiwi_core import compiled, preload
from tests.support.instructions import costs
from tests.support.preload_world import World
from tests.support.tested_library import tested_library

KIB, MIB = 1 << 10, 1 << 20
SUPPORT = ROOT / "tests" / "support"
PROGRAM = ROOT / "native/tests/owner" / "allocations.c"
SEED = 1


def mixes() -> dict[str, list[int]]:
    """Return mixes of sizes in bytes; each mix fits 512 MiB."""
    rng = random.Random(SEED)
    return {
        "a framework's blocks: 2 and 20 MiB, some of odd sizes": [2 * MIB] * 40
        + [20 * MIB] * 12
        + [rng.randrange(10 * MIB, 40 * MIB) for _ in range(5)],
        "2000 of 256 bytes": [256] * 2000,
        "2000 from 1 byte to 64 KiB": [rng.randrange(1, 64 * KIB) for _ in range(2000)],
        "300 from 64 KiB to 1 MiB": [rng.randrange(64 * KIB, MIB) for _ in range(300)],
        "100 from 1 to 4 MiB": [rng.randrange(MIB, 4 * MIB) for _ in range(100)],
        "one of 100 bytes": [100],
    }


def memory(directory: Path) -> list[dict[str, Any]]:
    rows = []
    world = World(directory, tested_library(), "1x512MiB")
    program = world.worker("init(); from owner_calls import *", PYTHONPATH=str(SUPPORT))
    try:
        for name, sizes in mixes().items():
            program.do(f"held = [ck(driver.cuMemAlloc(n)) for n in {sizes}]")
            books = program.get("books()")
            program.do("check()\nfor p in held: ck(driver.cuMemFree(p))")
            asked = sum(sizes)
            assert books["owned"] - books["overhead"] == asked
            kept = {key: books[key] for key in ("owned", "overhead")}
            share = round(books["overhead"] / asked, 4)
            rows.append({"mix": name, "asked_bytes": asked, **kept, "overhead_share": share})
    finally:
        world.close()
    return rows


def instructions(directory: Path, size: int, count: int) -> float:
    """Return the library's instructions for one allocation and its free."""
    program = directory / "allocations"
    command = [*compiled.find_compiler(), "-O2", "-o", str(program), str(PROGRAM), "-ldl"]
    subprocess.run(command, check=True)
    emulator.create_state(directory / "gpus", emulator.parse_gpus("1x512MiB"))
    plain = dict(os.environ) | emulator.environment(directory / "gpus", emulator.build())
    plain |= {"KIWI_SOCKET_DIR": str(directory / "no-daemon")}
    loaded = plain | preload.environment(preload.library(), before=plain)
    few, many = (
        sum(
            cost
            for name, cost in costs(
                [str(program), str(size), str(n)], loaded, directory / f"callgrind-{n}"
            ).items()
            if name.endswith(preload.NAME)
        )
        for n in (count, 3 * count)
    )
    return (many - few) / (2 * count)


def main() -> None:
    args = arguments(__doc__)
    results: dict[str, Any] = {"machine": machine("emulated")}

    def room() -> Path:
        return Path(tempfile.mkdtemp(dir=scratch))

    with tempfile.TemporaryDirectory() as scratch:
        results["memory"] = memory(room())
        if shutil.which("valgrind"):
            count = 20 if args.quick else 40
            results["instructions"] = {
                "256 bytes": round(instructions(room(), 256, 25 * count), 1),
                "3 MiB": round(instructions(room(), 3 * MIB, count), 1),
            }
    rows = [
        (one["mix"], one["asked_bytes"] >> 10, one["overhead"] >> 10, one["overhead_share"])
        for one in results["memory"]
    ]
    table(("", "asked KiB", "overhead KiB", "share"), rows)
    for name, value in results.get("instructions", {}).items():
        print(f"{name}: {value}")
    report("preload_memory", results, args, gpu="emulated")


if __name__ == "__main__":
    main()
