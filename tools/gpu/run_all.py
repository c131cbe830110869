"""Run everything that needs a real GPU, without wasting the minutes of a borrowed machine.

    python tools/gpu/run_all.py FOLDER --set first       # safe: nothing that could hurt
    python tools/gpu/run_all.py FOLDER --set second      # sharing and speed
    python tools/gpu/run_all.py FOLDER --set third       # notebooks; then what may break
    python tools/gpu/run_all.py FOLDER --set fourth      # kills, and the project's tests
    python tools/gpu/run_all.py FOLDER --set fifth       # the library as the default pager
    python tools/gpu/run_all.py FOLDER --only probe checkpoint

Run it with the machine's own Python (the one with PyTorch) from a checkout. Nothing has to be
installed; the packages that it reports as missing must be on ``PYTHONPATH``. Each part runs in a
process group of its own, which is ended at a limit; each answer rewrites ``results.json`` and
``summary.md``. The script changes no setting of the GPU. ``--emulated-selftest`` runs the same,
small, on the emulated driver, to show that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "benchmarks"),
    str(ROOT / "tests/support"),
    str(Path(__file__).parent),
]

import summary  # noqa: E402
from conductor import Run  # noqa: E402
from plan import FACTS, PARTS, SETS, Part  # noqa: E402
from stage import Skipped, Stage  # noqa: E402

BUDGET_S = 570.0
"""Time limit of a run: a command on the borrowed machine may take ten minutes."""

NEEDED = ("cuda.bindings", "cuda.core", "pynvml", "psutil", "msgspec", "structlog")
"""Packages without which nothing runs. cuda-bindings before 13.5.0 crash when a captured host
function is launched for the second time, and cuda-core before 1.0 has no ``checkpoint``."""
AT_LEAST = {"cuda-bindings": (13, 5), "cuda-core": (1, 0)}


def main() -> int:
    args = _arguments()
    if args.part:
        return _one_part(args)
    if args.merge:
        return _merge(args.folder, args.merge)
    args.folder.mkdir(parents=True, exist_ok=True)
    _paths(args.library)
    missing = _missing()
    if missing:
        print(f"missing in {sys.executable}: {', '.join(missing)}", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="kw-"))
    try:
        return _whole(args, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _whole(args: argparse.Namespace, work: Path) -> int:
    chosen = [PARTS[name] for name in args.only] or [
        part for name in args.set or SETS for part in SETS[name]
    ]
    settings = {"emulated": args.emulated_selftest, "fault": args.fault, "job_s": args.job_seconds}
    if args.emulated_selftest:
        import selftest

        selftest.prepare(work, args.fault)
    results = {"emulated": args.emulated_selftest, "began": time.strftime("%Y-%m-%d %H:%M:%S")}
    ends_s = time.monotonic() + args.budget_seconds
    run = Run(args.folder, work, ends_s, args.part_seconds, results | {"facts": {}, "parts": {}})
    (work / "settings.json").write_text(json.dumps(settings))
    run.part(FACTS)
    run.results["facts"] = _facts(work)
    for part in chosen:
        if part is not FACTS:
            run.part(part)
    run.save()
    counts = summary.verdicts(run.results)
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    return 0


def _paths(library: Path | None) -> None:
    # Programs start in any directory, in environments without an installed Kiwi.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), str(ROOT / "emulator"), *map(os.path.abspath, given)])
    )
    if library:
        os.environ["KIWI_PRELOAD_LIBRARY"] = str(library.resolve())


def _missing() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    wrong = [name for name in NEEDED if not _importable(name)]
    for name, least in AT_LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # reported as missing above, or installed without metadata
        if tuple(int(word) for word in found.split(".")[: len(least)]) < least:
            wrong.append(f"{name} {'.'.join(map(str, least))} or newer (here is {found})")
    return wrong


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _facts(work: Path) -> dict[str, Any]:
    file = work / "facts.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return facts


# --- inside a part's process ----------------------------------------------------------------------


def _one_part(args: argparse.Namespace) -> int:
    part, work = PARTS[args.part], args.work
    # SIGTERM comes at the limit: the ``finally`` blocks of the part end its programs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings, facts = json.loads((work / "settings.json").read_text()), _facts(work)
    stage = Stage(
        part.name, args.folder.absolute(), work, settings["emulated"], args.ends,
        uuid=facts.get("uuid", ""), total_bytes=facts.get("total_bytes", 0),
        ram_bytes=facts.get("ram_bytes", 0), fault=settings["fault"], job_s=settings["job_s"],
    )  # fmt: skip
    if settings["emulated"]:
        import selftest

        selftest.enter(work, stage)
    if stage.uuid:
        stage.env["CUDA_VISIBLE_DEVICES"] = stage.uuid
    try:
        _can_run(part, stage)
        module, function = part.function.split(":")
        getattr(importlib.import_module(module), function)(stage)
    except Skipped as why:
        stage.row("this part", f"left out: {why}")
    except Exception as error:
        stage.row("this part", f"failed: {type(error).__name__}: {error}"[:600], passed=False)
        raise
    return 0


def _can_run(part: Part, stage: Stage) -> None:
    if part is not FACTS and not stage.uuid:
        raise Skipped("the GPU could not be asked what it is; see the part machine")
    if part.libraries and stage.emulated:
        return  # the part has a stand-in that runs on the emulated driver
    missing = [name for name in part.libraries if not _importable(name)]
    if missing:
        raise Skipped(f"{', '.join(missing)} is not installed in this Python")


def _merge(folder: Path, others: list[Path]) -> int:
    """Join the results of several calls."""
    folder.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {}
    for file in others:
        one = json.loads(file.read_text())
        parts = whole.get("parts", {}) | one["parts"]
        whole = one | whole | {"parts": parts}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "summary.md").write_text(summary.text(whole))
    return 0


def _names(parts: tuple[Part, ...]) -> str:
    return ", ".join(part.name for part in parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="parts: " + "; ".join(f"{name}: {_names(parts)}" for name, parts in SETS.items()),
    )
    parser.add_argument("folder", type=Path, help="where results.json, summary.md and the logs go")
    parser.add_argument("--set", nargs="+", choices=SETS, help="which parts (default: all)")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=PARTS, metavar="PART", help="only these parts"
    )
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S, help="for the whole call")
    parser.add_argument("--part-seconds", type=float, help="a shorter limit for each part")
    parser.add_argument(
        "--job-seconds", type=float, default=32.0, help="how long a job of a pair takes by itself"
    )
    parser.add_argument(
        "--library", type=Path, metavar="FILE",
        help="libkiwi_preload.so, where the machine has no C compiler (make wheels builds it)",
    )  # fmt: skip
    parser.add_argument(
        "--emulated-selftest", action="store_true",
        help="the same logic on the emulated driver; the figures mean nothing",
    )  # fmt: skip
    parser.add_argument(
        "--fault", default="",
        help="of the self-test: stopped-job, dying-job, slow-test, or hang:CALL (lock, checkpoint, "
        "restore, unlock, get_state, or a driver function's name)",
    )  # fmt: skip
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="RESULTS",
        help="run nothing: join these results.json files of several calls in the folder",
    )  # fmt: skip
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
