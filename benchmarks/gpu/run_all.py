"""Everything that needs a real GPU: conformance, tests marked ``gpu``, and the figures of paging.

    python benchmarks/gpu/run_all.py RESULTS_FOLDER

Run it with the machine's own Python (with PyTorch, if there is one) from a checkout; nothing has to
be installed, but the packages that it names as missing must be on ``PYTHONPATH``. After each part
``results.json`` is written anew, so that a run that is cut off yields what it has. A part whose
library is missing, or for which no time is left, says so and is left out. It never resets the GPU
nor changes its settings. ``--emulated-selftest`` runs the same logic, small, on the emulated
driver: that shows that this script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(Path(__file__).parent)]

import pairs  # noqa: E402
import parts  # noqa: E402
from stage import Bench  # noqa: E402

BUDGET_S = 520.0
"""For everything; the machine may be lent for ten minutes."""


def main() -> int:
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    # Programs are started from anywhere, in environments that Kiwi is not installed in.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(os.path.abspath, given)])
    if args.library:
        os.environ["KIWI_PRELOAD_LIBRARY"] = str(args.library.resolve())
    emulated = args.emulated_selftest
    work = Path(tempfile.mkdtemp(prefix="kw-"))
    job_s = args.job_seconds or (3.0 if emulated else 60.0)
    ends_s = time.monotonic() + args.budget_seconds
    bench = Bench(args.folder, emulated, ends_s, work, job_s, only=tuple(args.only))
    try:
        bench.part("machine", 1, 120, parts.machine)
        if not bench.uuid:
            print("there is no GPU that could be measured; see results.json", file=sys.stderr)
            return 1
        _measure(bench, tests=not args.skip_tests)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _measure(bench: Bench, *, tests: bool) -> None:
    """What is worth most comes first: time may run out."""
    job_s, gpu = bench.job_s, not bench.emulated
    bench.part("limits", 125, 180, parts.limits)
    if tests and gpu:
        bench.part(
            "conformance", 60, 180, parts.tests("conformance", "-m", "gpu", "tests/conformance")
        )
    if tests and not gpu:
        few = ("-m", "not gpu", "tests/conformance/test_own_gpu.py")
        bench.part("conformance", 30, 120, parts.tests("conformance", *few))
    bench.part("paging", 40, 120, parts.paging)
    bench.part("training", 60 if gpu else 1, 150, parts.training)
    bench.part(
        "two_that_do_not_fit", 4 * job_s + 15, 8 * job_s + 60, pairs.not_fitting(parts.PAGERS)
    )
    bench.part("two_that_fit", 2 * job_s + 15, 4 * job_s + 60, pairs.fitting)
    bench.part("libraries", 20, 90, parts.libraries)
    if tests and gpu:
        words = ("-m", "gpu", *parts.GPU_TESTS, f"--ignore={parts.INPROCESS}")
        bench.part("gpu_tests", 60, 240, parts.tests("gpu_tests", *words))
        # Only a run of its own (--only inprocess) has time for all of it.
        inprocess = parts.tests("inprocess", "-m", "gpu", parts.INPROCESS)
        bench.part("inprocess", 90, BUDGET_S, inprocess)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where results.json and the logs go")
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
        help="only these parts, by their names in results.json, for another run of ten minutes",
    )  # fmt: skip
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument(
        "--library", type=Path, metavar="FILE",
        help="libkiwi_preload.so, where the machine has no C compiler (make wheels builds it)",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
