"""Reads the sharing part of the configuration file of NVIDIA's device plugin, as it is.

    version: v1
    sharing:
      timeSlicing:
        renameByDefault: false
        failRequestsGreaterThanOne: true
        resources:
        - name: nvidia.com/gpu
          replicas: 8

The rules are those of ``api/config/v1`` in NVIDIA/k8s-device-plugin, which also ignores ``rename``
and ``devices`` and says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from kiwi_core.errors import CallerError
from kiwi_kubernetes import REPLICAS_MAX

if TYPE_CHECKING:
    from pathlib import Path

_VENDOR: Final = "nvidia.com/"
"""What NVIDIA puts before a name that does not begin with it."""

_SHARED: Final = ".shared"
"""What NVIDIA appends where ``renameByDefault`` is set."""

_MIG: Final = re.compile(r"(?:^|/)mig-|^MIG-|^\d+:\d+$")
"""A MIG resource, a MIG device's UUID, or its index."""

_EXAMPLE: Final = (
    'An example: {"version": "v1", "sharing": {"timeSlicing": {"resources": '
    '[{"name": "nvidia.com/gpu", "replicas": 8}]}}}'
)

_WHOLE_GPUS: Final = "Kiwi shares whole GPUs: the driver cannot move programs on MIG slices."

_Count = Annotated[int, Meta(ge=1)]


class _Resource(Struct, frozen=True, rename="camel", kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    replicas: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
    rename: str = ""
    devices: str | _Count | list[str | Annotated[int, Meta(ge=0)]] = "all"


class _TimeSlicing(Struct, frozen=True, rename="camel", kw_only=True):
    resources: Annotated[list[_Resource], Meta(min_length=1)]
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False


class _Sharing(Struct, frozen=True, rename="camel", kw_only=True):
    time_slicing: _TimeSlicing | None = None
    mps: Any = None


class _Flags(Struct, frozen=True, rename="camel", kw_only=True):
    mig_strategy: str | None = None


class _File(Struct, frozen=True, rename="camel", kw_only=True):
    version: str = "v1"
    flags: _Flags | None = None
    sharing: _Sharing | None = None


@dataclass(frozen=True)
class Sharing:
    """The sharing part of the file. ``ignored`` are its keys that mean nothing here."""

    resource: str
    replicas: int
    one_only: bool
    ignored: tuple[str, ...] = ()


def read(path: Path) -> Sharing | None:
    """Read the file (YAML, or JSON, which is YAML, too). Return ``None`` if it says nothing about
    sharing. Raises ``CallerError`` with the file, the key, and what to do."""
    try:
        data = msgspec.yaml.decode(path.read_bytes())
        file = msgspec.convert(data, _File)
    except OSError as error:
        raise CallerError(
            "bad-config", f"{path} cannot be read: {error.strerror}.", "Name another with --config."
        ) from error
    except msgspec.ValidationError as error:
        text, _, key = str(error).partition(" - at `$.")
        raise _wrong(path, key.rstrip("`"), f"{text}.") from error
    except msgspec.DecodeError as error:
        raise _wrong(path, "", f"this is neither YAML nor JSON ({error}).") from error
    slicing = _checked(path, file)
    if slicing is None:
        return None
    (resource,) = slicing.resources
    name = resource.name if "/" in resource.name else _VENDOR + resource.name
    return Sharing(
        resource=name + _SHARED if slicing.rename_by_default else name,
        replicas=resource.replicas,
        one_only=slicing.fail_requests_greater_than_one,
        ignored=(*_unknown(data), *_ignored(resource)),
    )


def _checked(path: Path, file: _File) -> _TimeSlicing | None:
    if file.version != "v1":
        raise _wrong(path, "version", f"{file.version!r} is not known.", "Write v1.")
    strategy = file.flags.mig_strategy if file.flags is not None else None
    if strategy not in (None, "", "none"):
        raise _wrong(path, "flags.migStrategy", f"{strategy!r}: {_WHOLE_GPUS}", "Write none.")
    if file.sharing is None:
        return None
    if file.sharing.mps is not None:
        raise _wrong(
            path,
            "sharing.mps",
            "the driver cannot move the programs of NVIDIA's Multi-Process Service (MPS), so Kiwi "
            "cannot share a GPU beside it.",
            "Write the same resources under sharing.timeSlicing.",
        )
    if file.sharing.time_slicing is not None:
        _check_resources(path, file.sharing.time_slicing.resources)
    return file.sharing.time_slicing


def _check_resources(path: Path, resources: list[_Resource]) -> None:
    key = "sharing.timeSlicing.resources"
    for number, one in enumerate(resources):
        devices = one.devices if isinstance(one.devices, list) else []
        if isinstance(one.devices, str) and one.devices != "all":
            raise _wrong(path, f"{key}[{number}].devices", f"{one.devices!r} is not known.")
        slices = [text for text in (one.name, *map(str, devices)) if _MIG.search(text)]
        if slices:
            remedy = "Remove this entry, and switch MIG off (nvidia-smi -mig 0)."
            raise _wrong(path, f"{key}[{number}]", f"{slices[0]!r} is MIG. {_WHOLE_GPUS}", remedy)
    if len(resources) > 1:
        names = ", ".join(one.name for one in resources)
        remedy = "Keep one entry for all GPUs of a node."
        raise _wrong(path, key, f"there are several ({names}); Kiwi offers one.", remedy)


def _unknown(data: Any) -> list[str]:
    """Return the keys beside those that are read."""
    sharing, flags = data.get("sharing") or {}, data.get("flags") or {}
    found = [key for key in data if key not in ("version", "flags", "sharing")]
    found += [f"flags.{key}" for key in flags if key != "migStrategy"]
    return found + [f"sharing.{key}" for key in sharing if key not in ("timeSlicing", "mps")]


def _ignored(resource: _Resource) -> list[str]:
    found = ["rename"] if resource.rename else []
    found += ["devices"] if resource.devices != "all" else []
    return [f"sharing.timeSlicing.resources.{key}" for key in found]


def _wrong(path: Path, key: str, text: str, remedy: str = _EXAMPLE) -> CallerError:
    return CallerError("bad-config", f"{path}: {key}: {text}" if key else f"{path}: {text}", remedy)
