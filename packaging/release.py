"""Build a release twice, compare both builds byte for byte, and check what came out.

``make release`` runs this in an environment with the tools (dependency group ``release``). It
clones the last commit to two folders. The first build makes the wheels from the clone, the second
one from the source distribution that its clone made. The release is put into ``dist/``: the source
distribution, a wheel for any machine, one each with the C libraries for x86_64 and aarch64, the
Helm chart, a bill of materials (CycloneDX) and the checksums.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from datetime import datetime, timezone
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MACHINES = ("x86_64", "aarch64")
CHART = Path("integrations/kubernetes/kiwi")

MOST_SDIST_BYTES = 5 << 20
"""It has sources and the built labextension: 1 MB. PyPI takes 100 MB, and node_modules is more."""

BUILD_TIMEOUT_S = 1800
"""npm fetches 600 packages, and the first cross compilation builds a C library's stubs."""

NAME = "kiwi-jupyter"
RSPACK = "@rspack/core"
TOOLS = ("hatchling", "ziglang", "nvidia-cuda-runtime")


class ReleaseError(Exception):
    """The release is not fit; the message says why and what to do."""


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="kiwi-release-") as work:
            _release(Path(work))
    except ReleaseError as error:
        print(f"kiwi: {error}", file=sys.stderr)
        return 1
    return 0


def _release(work: Path) -> None:
    if _run("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT):
        raise ReleaseError("There are changes that are not committed. A release is of a commit.")
    epoch = int(_run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    first = _build(work / "one", epoch, from_sdist=False)
    second = _build(work / "another and longer" / "place", epoch, from_sdist=True)
    _compare(first, second)
    files = sorted(first.iterdir())
    _check(files)
    (first / f"kiwi_jupyter-{_version()}.cdx.json").write_text(_bill(files, epoch), "utf-8")
    sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(first.iterdir())]
    (first / "SHA256SUMS").write_text("".join(sums))
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.copytree(first, DIST)
    print("".join(sums), end="")


def _version() -> str:
    (found,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def _run(*command: str, cwd: Path, **settings: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


# --- building -----------------------------------------------------------------------------------


def _build(place: Path, epoch: int, from_sdist: bool) -> Path:
    """Return the folder with what was built."""
    clone, out = place / "kiwi", place / "out"
    out.mkdir(parents=True)
    _run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone), cwd=place)
    # The compiler, too, is to begin anew: it would take the first build's objects from its cache.
    settings = {"SOURCE_DATE_EPOCH": str(epoch), "ZIG_GLOBAL_CACHE_DIR": str(place / "zig")}
    _hatch(clone, "sdist", out, settings)
    source = clone
    if from_sdist:
        (archive,) = out.glob("*.tar.gz")
        (place / "unpacked").mkdir()
        _run("tar", "xzf", str(archive), "-C", str(place / "unpacked"), cwd=place)
        (source,) = (place / "unpacked").iterdir()
    for machine in ("", *MACHINES):
        _hatch(source, "wheel", out, settings | {"KIWI_WHEEL_MACHINE": machine})
    _chart(clone / CHART, out, epoch)
    return out


def _hatch(source: Path, target: str, out: Path, settings: dict[str, str]) -> None:
    print(
        f"   builds the {target} {settings.get('KIWI_WHEEL_MACHINE', '')} in {source}", flush=True
    )
    command = (sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out))
    _run(*command, cwd=source, **settings)


def _chart(chart: Path, out: Path, epoch: int) -> None:
    """Write the chart as ``helm package`` does, with the commit's time instead of the present."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
        entry.mode = 0o644
        return entry

    with (
        (out / f"kiwi-{_version()}.tgz").open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(path for path in chart.rglob("*") if path.is_file()):
            archive.add(path, f"kiwi/{path.relative_to(chart)}", filter=plain)


# --- checking -----------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compare(first: Path, second: Path) -> None:
    sums = [{path.name: _sha256(path) for path in out.iterdir()} for out in (first, second)]
    differ = sorted(name for name in sums[0] | sums[1] if sums[0].get(name) != sums[1].get(name))
    if differ:
        kept = ROOT / "build/release"
        shutil.rmtree(kept, ignore_errors=True)
        for out, name in ((first, "first"), (second, "second")):
            shutil.copytree(out, kept / name)
        raise ReleaseError(
            f"Two builds of one commit differ: {', '.join(differ)}. They are in {kept}: unpack and"
            " compare them (diff -r). Something in them depends on time, folder or order."
        )


def _check(files: Sequence[Path]) -> None:
    wheels = [path for path in files if path.suffix == ".whl"]
    (sdist,) = (path for path in files if path.name.endswith(".tar.gz"))
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    if sdist.stat().st_size > MOST_SDIST_BYTES or any("node_modules" in name for name in names):
        raise ReleaseError(
            f"{sdist.name} has {sdist.stat().st_size:,} bytes and {len(names)} files: more than the"
            " sources. pyproject.toml names what belongs in it ([tool.hatch.build.targets.sdist])."
        )
    tools = Path(sys.executable).parent
    _run(str(tools / "twine"), "check", "--strict", *map(str, [sdist, *wheels]), cwd=ROOT)
    contents = ("--toplevel", "kiwi_core,kiwi_jupyter", *map(str, wheels))
    _run(str(tools / "check-wheel-contents"), "--no-config", *contents, cwd=ROOT)
    for machine in MACHINES:
        (wheel,) = (path for path in wheels if path.name.endswith(f"_{machine}.whl"))
        # abi3audit has nothing to look at: the libraries are no extension modules of Python.
        said = _run(str(tools / "auditwheel"), "show", str(wheel), cwd=ROOT)
        if f"manylinux_2_17_{machine}" not in said:
            raise ReleaseError(
                f"{wheel.name} needs more than glibc 2.17, which its name says:\n{said}"
            )
    for wheel in wheels:
        _check_notice(wheel)
    _check_recipe()


def _check_notice(wheel: Path) -> None:
    notice = _member(wheel, ".dist-info/licenses/NOTICE").decode()
    unnamed = [each["name"] for each in _bundled(wheel) if f"  {each['name']} " not in notice]
    if unnamed:
        raise ReleaseError(
            f"{wheel.name} contains JavaScript of {', '.join(unnamed)}, which NOTICE does not name."
            " Add it there, with its license."
        )


def _check_recipe() -> None:
    """Render the conda recipe. A build of it takes packages from a channel."""
    from rattler_build import (
        PlatformConfig,
        RattlerBuildError,
        RenderConfig,
        Stage0Recipe,
        VariantConfig,
    )

    try:
        recipe = Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml")
        for platform in ("linux-64", "linux-aarch64"):
            recipe.render(VariantConfig(), RenderConfig(PlatformConfig(target_platform=platform)))
    except RattlerBuildError as error:
        raise ReleaseError(
            f"rattler-build does not take packaging/conda/recipe.yaml: {error}"
        ) from error


def _member(wheel: Path, suffix: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(suffix))
        return archive.read(name)


# --- bill of materials --------------------------------------------------------------------------


def _bundled(wheel: Path) -> list[dict[str, str]]:
    """Return the JavaScript packages in the wheel: the bundler's list, and its own loader."""
    listed = json.loads(_member(wheel, "/third-party-licenses.json"))["packages"]
    lock = json.loads((ROOT / "labextension/package-lock.json").read_text("utf-8"))
    rspack = lock["packages"][f"node_modules/{RSPACK}"]["version"]
    found = [
        {"name": each["name"], "version": each["versionInfo"], "license": each["licenseId"]}
        for each in listed
    ]
    return [*found, {"name": RSPACK, "version": rspack, "license": "MIT"}]


def _bill(files: Sequence[Path], epoch: int) -> str:
    """Return the CycloneDX bill of what the wheels contain, and of what they require."""
    (wheel,) = (path for path in files if path.name.endswith("-none-any.whl"))
    metadata = message_from_bytes(_member(wheel, ".dist-info/METADATA"))
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    root = f"pkg:pypi/{NAME}@{_version()}"
    parts = [
        {
            "type": "library",
            "bom-ref": (purl := f"pkg:npm/{each['name'].replace('@', '%40')}@{each['version']}"),
            "name": each["name"],
            "version": each["version"],
            "licenses": [{"license": {"id": each["license"]}}],
            "purl": purl,
            "properties": [{"name": "kiwi:part", "value": "in the wheel"}],
        }
        for each in _bundled(wheel)
    ]
    for requirement in required:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        parts.append(
            {
                "type": "library",
                "bom-ref": (purl := f"pkg:pypi/{name}"),
                "name": name,
                "purl": purl,
                "properties": [{"name": "kiwi:requirement", "value": requirement}],
            }
        )
    bill: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).isoformat(),
            "tools": {
                "components": [
                    {"type": "application", "name": tool, "version": version(tool)}
                    for tool in TOOLS
                ]
            },
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": NAME,
                "version": _version(),
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": root,
            },
        },
        "components": parts,
        "dependencies": [{"ref": root, "dependsOn": sorted(each["bom-ref"] for each in parts)}],
    }
    text = json.dumps(bill, indent=2) + "\n"
    _validate(text)
    return text


def _validate(bill: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill):
        raise ReleaseError(f"The bill of materials does not follow CycloneDX 1.6: {error}")


if __name__ == "__main__":
    sys.exit(main())
