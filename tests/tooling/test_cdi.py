"""Tests of the CDI device that ``kiwi doctor --print cdi`` prints.

It is checked against the rules of the Container Device Interface 0.5.0 (SPEC.md of
cncf-tags/container-device-interface), as far as the file uses them. ``make cluster`` gives it to a
real container engine.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

FILE = Path(__file__).parents[2] / "integrations/kubernetes/kiwi-cdi.json"

NAME = r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
ABSOLUTE = {"type": "string", "pattern": "^/"}


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object that has nothing else."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


MOUNT = closed(
    {"hostPath": ABSOLUTE, "containerPath": ABSOLUTE}, {"options": some({"type": "string"})}
)
# A device that edits nothing is refused.
EDITS = {
    **closed({}, {"env": some({"type": "string", "pattern": "^[^=]+="}), "mounts": some(MOUNT)}),
    "minProperties": 1,
}
DEVICE = closed({"name": {"type": "string", "pattern": "^[A-Za-z0-9]"}, "containerEdits": EDITS})
SPEC = closed(
    {
        "cdiVersion": {"enum": ["0.5.0"]},
        "kind": {"type": "string", "pattern": f"^{NAME}/{NAME}$"},
        "devices": some(DEVICE),
    }
)


def spec() -> Any:
    return json.loads(FILE.read_text())


def test_the_file_keeps_the_rules() -> None:
    jsonschema.validate(spec(), SPEC)


def test_the_directory_is_mounted_read_only_and_named() -> None:
    (device,) = spec()["devices"]
    (mount,) = device["containerEdits"]["mounts"]
    assert {"ro", "rbind", "nosuid", "nodev"} <= set(mount["options"])
    assert device["containerEdits"]["env"] == [f"KIWI_SOCKET_DIR={mount['containerPath']}"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "no-class"),
        (("devices",), []),
        (("devices", 0, "containerEdits"), {}),
        (("devices", 0, "containerEdits", "mounts", 0, "hostPath"), "run/kiwi"),
        (("devices", 0, "containerEdits", "env", 0), "KIWI_SOCKET_DIR"),
        (("unknown",), 1),
    ],
)
def test_the_rules_refuse_what_is_wrong(path: tuple[Any, ...], value: Any) -> None:
    wrong = copy.deepcopy(spec())
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SPEC)
