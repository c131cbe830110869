"""How fast the system gives a page-out its new host memory, by threads and by size of pages.

The first page-out of a program may come before memory is pinned for it. The library then takes new
memory, whose pages the system clears when they are touched. A C program with the library's own code
does so in each way, in turns, each time in a process of its own; the yardstick is one thread that
touches small pages, and for the copies one thread that copies into memory that nobody has touched.
There is no GPU here: a processor copies instead of the bus, and needs a core for it.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, machine, report, table

from kiwi_core import compiled
from kiwi_core.preload import _build

MIB = 1 << 20
WAYS = {
    "touch-small": "one thread touches small pages",
    "touch-huge": "one thread touches, huge pages",
    "populate-small": "one call, small pages",
    "populate-huge": "one call, huge pages",
    "threads-small": "the library's threads, small pages",
    "threads-huge": "the library's threads, huge pages",
}
COPIES = {
    "copy-small": "copied into small pages as they come",
    "copy-huge": "copied into huge pages as they come",
    "ahead-small": "copied behind the library's threads, small pages",
    "ahead-huge": "copied behind the library's threads, huge pages",
}
"""Each group's first way is its yardstick."""
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def program(directory: Path) -> Path:
    built = directory / "new_pages"
    sources = [Path(__file__).with_name("new_pages.c"), _build.SOURCES / "owner" / "pages.c"]
    includes = ["-iquote", str(_build.SOURCES), "-isystem", str(_build.find_header().parent)]
    command = [*compiled.find_compiler(), "-std=gnu11", "-O2", "-pthread", *includes]
    subprocess.run([*command, "-o", str(built), *map(str, sources)], check=True)
    return built


def measure(built: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, in the order of the rounds; a round shifts the order."""
    names = [*WAYS, *COPIES]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round warms up
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            done = subprocess.run(
                [str(built), name, str(size)], capture_output=True, text=True, check=True
            )
            if number >= 0:
                found[name].append(float(done.stdout))
    return found


def compared(found: dict[str, list[float]], ways: dict[str, str], size: int) -> dict[str, Any]:
    """Return each way's speed, and how many times as fast as its yardstick it is."""
    yardstick = found[next(iter(ways))]
    rows = {}
    for name in ways:
        ratios = [base / one for base, one in zip(yardstick, found[name], strict=True)]
        rows[name] = {
            "gb_s": round(size / statistics.median(found[name]) / 1e9, 2),
            "times": round(statistics.median(ratios), 2),
            "times_least": round(min(ratios), 2),
            "times_most": round(max(ratios), 2),
        }
    return rows


def main() -> None:
    args = arguments(__doc__)
    where = machine()
    size, rounds = (64 * MIB, 2) if args.quick else (1024 * MIB, 9)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(program(Path(directory)), size, rounds)
    results: dict[str, Any] = {
        "machine": where,
        "huge_pages": THP.read_text().strip() if THP.exists() else "not known",
        "bytes": size,
        "rounds": rounds,
        "ways": compared(found, WAYS, size),
        "copies": compared(found, COPIES, size),
    }
    for ways, rows in ((WAYS, results["ways"]), (COPIES, results["copies"])):
        head = ("", "GB/s", "times as fast", "least", "most")
        table(head, [(ways[name], *rows[name].values()) for name in ways])
    print(f"transparent huge pages: {results['huge_pages']}")
    report("new_pages", results, args)


if __name__ == "__main__":
    main()
