"""The first part: facts for the other parts, asked so that a driver that hangs costs little
time."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage import Skipped

if TYPE_CHECKING:
    from stage import Stage

ASK_S = 18.0
"""Time limit of one way to ask; ``cuInit`` takes up to 3 s on big machines."""

NVML = """
import json
from kiwi_core.gpu import nvml
one = nvml.gpus()[0]
print(json.dumps({"uuid": one.uuid, "total_bytes": one.total_bytes, "gpu": one.name,
                  "driver": one.driver_version, "mig": one.mig, "persistence": one.persistence}))
"""
CUDA = """
import json
from cuda.bindings import driver as cu
def ck(r):
    assert int(r[0]) == 0, r
    return r[1]
assert int(cu.cuInit(0)[0]) == 0
device = ck(cu.cuDeviceGet(0))
u = bytes(ck(cu.cuDeviceGetUuid(device)).bytes).hex()
print(json.dumps({"uuid": f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}",
                  "total_bytes": int(ck(cu.cuDeviceTotalMem(device))),
                  "gpu": ck(cu.cuDeviceGetName(256, device)).split(b"\\0")[0].decode()}))
"""
PACKAGES = (
    "torch", "cupy-cuda13x", "jax", "triton", "cuda-bindings", "cuda-core", "nvidia-ml-py",
    "pytest", "pytest-timeout", "hypothesis", "ipykernel", "jupyter-client",
)  # fmt: skip


def facts(stage: Stage) -> None:
    """Ask NVML, then the driver, then nvidia-smi; write facts.json for the other parts."""
    from kiwi_core.gpu.host import host_memory

    found: dict[str, Any] = {"ram_bytes": host_memory().available_bytes}
    for way, ask in (("NVML", _nvml), ("the driver", _cuda), ("nvidia-smi", _smi)):
        answer = ask()
        if isinstance(answer, str):
            stage.row(f"asked {way}", answer, passed=False)
            continue
        found |= answer
        break
    found["versions"] = {name: _version(name) for name in PACKAGES}
    (stage.work / "facts.json").write_text(json.dumps(found))
    if "uuid" not in found:
        raise Skipped("nothing tells which GPU this is")
    for name, value in found.items():
        stage.row(name, value)


def _nvml() -> dict[str, Any] | str:
    return _said([sys.executable, "-c", NVML])


def _cuda() -> dict[str, Any] | str:
    return _said([sys.executable, "-c", CUDA])


def _smi() -> dict[str, Any] | str:
    query = "--query-gpu=uuid,memory.total,name,driver_version"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"])
    words = [word.strip() for word in text.split(",")]
    if len(words) != 4 or not words[0].startswith("GPU-"):
        return text[-300:]
    return {
        "uuid": words[0], "total_bytes": int(words[1]) << 20, "gpu": words[2], "driver": words[3],
    }  # fmt: skip


def _said(command: list[str]) -> dict[str, Any] | str:
    text = _output(command)
    try:
        said: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return text[-300:] or "no answer"
    return said


def _output(command: list[str]) -> str:
    """Run a command for a limited time; return its output, or why there is none."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {ASK_S:.0f} s"
    except OSError as error:
        return str(error)
    return done.stdout if done.returncode == 0 else done.stderr[-300:]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def module_text() -> str:
    """Return the version text of the kernel module, "" if there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
