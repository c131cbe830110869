"""Rehearse run_all.py on the emulated driver with a fault in each run: a fault may cost one part.

    python tools/gpu/rehearse.py FOLDER --python PYTHON --site SITE [--fault FAULT …]

PYTHON is one like the GPU machine's (its packages, without Kiwi), SITE the folder of carried
packages. The run has an empty HOME, no network where the system allows that, and none of this
shell's environment. Prints a line for each run and exits with 1 if a part did not run, did not end
within its limit, or left a process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import conductor  # noqa: E402
from plan import PARTS  # noqa: E402
from selftest import CHECKPOINT_CALLS  # noqa: E402

NVML_CALLS = (
    "nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses",
)  # fmt: skip
PROGRAM_CALLS = ("cuInit", "cuMemAlloc", "cuMemcpyDtoH", "cuCtxSynchronize")
FAULTS = (
    "",
    *(f"hang:{call}" for call in (*CHECKPOINT_CALLS, *NVML_CALLS, *PROGRAM_CALLS)),
    "stopped-job",
    "dying-job",
    "slow-test",
)
PART_S = 32.0
"""Limit of each part when calls hang: long enough for a part that is well, on a busy machine."""
LATE_S = 3.0
"""Time by which a part may exceed its limit, because the machine that rehearses is busy."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--fault", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--only", nargs="+", default=[], choices=PARTS, metavar="PART")
    parser.add_argument("--part-seconds", type=float, default=PART_S)
    args = parser.parse_args()
    bad = 0
    for fault in args.fault:
        wrong = _rehearsed(args, fault)
        bad += bool(wrong)
        print(f"{fault or 'no fault'}: {'; '.join(wrong) or 'well'}", flush=True)
    return 1 if bad else 0


def _rehearsed(args: argparse.Namespace, fault: str) -> list[str]:
    """Return what went wrong in one run."""
    folder = args.folder.absolute() / (fault.replace(":", "-") or "none")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [args.python, str(HERE / "run_all.py"), str(folder), "--emulated-selftest"]
    command += ["--budget-seconds", "3600", "--job-seconds", "2"]
    if fault:
        command += ["--fault", fault, "--part-seconds", str(args.part_seconds)]
    if args.only:
        command += ["--only", *args.only]
    with tempfile.TemporaryDirectory() as home:
        mark = f"rehearsal-{os.getpid()}-{time.monotonic_ns()}"
        with (folder / "run.out").open("w") as out:
            done = subprocess.run(
                [*_without_network(), *command], env=_environment(home, args.site, mark),
                cwd=home, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False,
            )  # fmt: skip
    wrong = [] if done.returncode == 0 else [f"exit status {done.returncode}"]
    return wrong + _judged(folder, args.only or list(PARTS), well=not fault) + _left(mark)


def _environment(home: str, site: Path | None, mark: str) -> dict[str, str]:
    env = {"HOME": home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "KIWI_REHEARSAL": mark}
    if site:
        env["PYTHONPATH"] = str(site.absolute())
    return env


def _without_network() -> list[str]:
    unshare = ["unshare", "--net"]
    try:
        done = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return unshare if done.returncode == 0 else []


def _judged(folder: Path, parts: list[str], *, well: bool) -> list[str]:
    file = folder / "results.json"
    if not file.exists():
        return ["there is no results.json"]
    results: dict[str, Any] = json.loads(file.read_text())
    wrong = []
    for name in parts:
        part = results["parts"].get(name)
        if part is None or "took_s" not in part:
            wrong.append(f"{name} did not run")
        elif part["took_s"] > part["limit_s"] + LATE_S:
            wrong.append(f"{name} took {part['took_s']} s of {part['limit_s']} s")
        elif not part["rows"]:
            wrong.append(f"{name} has no row")
        elif well and part["status"] != "done":
            wrong.append(f"{name}: {part['status']}")
    if not (folder / "summary.md").exists():
        wrong.append("there is no summary.md")
    return wrong


def _left(mark: str) -> list[str]:
    wanted = f"KIWI_REHEARSAL={mark}".encode()
    left = [pid for pid in conductor.processes() if wanted in conductor.environment_of(pid)]
    return [f"processes are left: {left}"] if left else []


if __name__ == "__main__":
    sys.exit(main())
