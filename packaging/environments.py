"""Resolve environments with and without Kiwi, and compare: Kiwi may change no version in them.

    environments.py [--first N] [--result FILE]

``environments.txt`` names them. pip resolves each in a dry run, together with JupyterLab: that
reads the index for minutes and installs nothing. Fails if a version differs, if there is no
solution with Kiwi, or none at all, since nothing was compared then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = "jupyterlab"
WITHIN_S = 400.0
"""pip took at most 100 s for each of these environments; a backtracking one may take hours."""

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class Unresolved(Exception):  # noqa: N818 (a state of the index, not a mistake)
    """pip found no solution; the text is its last line."""


def named() -> dict[str, list[str]]:
    lines = (ROOT / "packaging/environments.txt").read_text().splitlines()
    pairs = (line.partition(":")[::2] for line in lines if not line.startswith("#"))
    return {name: wanted.split() for name, wanted in pairs}


def wheel(directory: str) -> str:
    environment = {**os.environ, "KIWI_SKIP_LABEXTENSION": "1"}
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    (found,) = Path(directory).glob("kiwi_jupyter-*.whl")
    return str(found)


def resolved(wanted: list[str]) -> dict[str, str]:
    """Return the versions that pip would install into an empty environment, by name."""
    command = [*PIP, "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
    with tempfile.NamedTemporaryFile() as report:
        try:
            done = subprocess.run(
                [*command, "--only-binary=:all:", "--report", report.name, *wanted],
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            raise Unresolved(f"pip took longer than {WITHIN_S:.0f} s") from None
        if done.returncode:
            raise Unresolved((done.stderr.strip() or "pip failed").splitlines()[-1])
        packages = json.loads(Path(report.name).read_bytes())["install"]
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in packages}


def compared(wanted: list[str], kiwi: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        without = resolved([BESIDE, *wanted])
    except Unresolved as why:
        return {"unresolved": str(why)}
    took_s = time.monotonic() - began
    try:
        beside = resolved([BESIDE, *wanted, kiwi])
    except Unresolved as why:
        return {"differs": {"(no solution with Kiwi)": str(why)}}
    differs = {
        name: f"{version} without Kiwi, {beside.get(name, 'none')} with it"
        for name, version in without.items()
        if beside.get(name) != version
    }
    asked = [one.partition("[")[0].partition("=")[0].lower() for one in wanted]
    return {
        "versions": {name: without[name] for name in (*asked, "cuda-bindings") if name in without},
        "packages": len(without),
        "added": sorted(set(beside) - set(without)),
        "differs": differs,
        "seconds_without": round(took_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, metavar="N", help="only the first N")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("names", nargs="*", help="only these")
    args = parser.parse_args()
    table = {n: w for n, w in named().items() if not args.names or n in args.names}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        kiwi = wheel(directory)
        for name in list(table)[: args.first]:
            found[name] = one = {"asked": table[name], **compared(table[name], kiwi)}
            good = not one.get("differs") and "unresolved" not in one
            words = one.get("unresolved") or one["differs"] or f"{one['packages']} versions equal"
            print(f"{'ok  ' if good else 'FAIL'}  {name}: {words}", flush=True)
    if args.result:
        head = {
            "python": platform.python_version(),
            "day": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        args.result.write_text(json.dumps({**head, "environments": found}, indent=1) + "\n")
    return 1 if any(one.get("differs") or "unresolved" in one for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
