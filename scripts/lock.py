#!/usr/bin/env python3
"""lock PYTHON NAME: write what the environment of PYTHON holds to requirements/NAME-pyX.Y.txt, as
constraints for pip.

Beside each version stands the Python that the package asks for, so that a test can read there
that the lock holds for its whole minor version: a distribution's Python is often one of the first
patch releases (Debian 12: 3.11.2), and pip refuses a package that asks for a later one. Run it
with an environment that has ``packaging`` (make lock does).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet

HEAD = "# The versions that the tests passed with; written by: make lock\n"
_TOOLS = ("pip", "setuptools", "wheel")
"""What an environment has before anything is installed in it."""

_LINE = re.compile(r"^(\S+)==(\S+?)(?:  # Python (\S+))?$", re.MULTILINE)
_READ = """
import json
from importlib import metadata
import sys
print("%d.%d" % sys.version_info[:2])
print(json.dumps([
    (one.name, one.version, (one.metadata.get("Requires-Python") or "").replace(" ", ""))
    for one in metadata.distributions()
    if not (one.read_text("direct_url.json") or "").count('"editable": true')
]))
"""


def too_new(minor: str, text: str) -> list[str]:
    """Return the packages of a lock's ``text`` that Python ``minor``.0 cannot install."""
    return [
        f"{name} {version} needs Python {wanted}"
        for name, version, wanted in _LINE.findall(text)
        if wanted and f"{minor}.0" not in SpecifierSet(wanted)
    ]


def main(python: str, name: str) -> int:
    done = subprocess.run([python, "-c", _READ], stdout=subprocess.PIPE, text=True, check=True)
    minor, _, packages = done.stdout.partition("\n")
    lock = Path(f"requirements/{name}-py{minor}.txt")
    lines = [
        f"{name}=={version}" + f"  # Python {wanted}" * bool(wanted)
        for name, version, wanted in sorted(json.loads(packages), key=lambda one: one[0].lower())
        if name not in _TOOLS
    ]
    text = HEAD + "\n".join(lines) + "\n"
    refused = too_new(minor, text)
    for one in refused:
        name, version, *_ = one.split()
        print(
            f"kiwi: {one}: {lock} would not hold for the first releases of this Python,"
            f" and is left as it was.\n      Install an older one, then run make lock again:\n"
            f"      {sys.executable} -m pip --python {python} install '{name}<{version}'",
            file=sys.stderr,
        )
    if not refused:
        lock.write_text(text)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
