"""Tests that the interface matches its description.

schemathesis sends a running server what the description allows and what it forbids, with all of its
checks.
"""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from daemon import running_daemon
from hypothesis import HealthCheck, given, settings
from lab import TOKEN, running_lab
from schemathesis import GenerationMode
from session_program import SessionProgram

from kiwi_jupyter.server_ext.openapi import description
from kiwi_jupyter.server_ext.routes import REST

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADERS = {"Authorization": f"token {TOKEN}"}
OPERATIONS = [
    "status", "openapi", "set", "setSession", "release", "bringBack", "story", "usage",
]  # fmt: skip


OPTIONS = (
    "--ServerApp.base_url=/base/", "--ServerApp.jpserver_extensions={'kiwi_jupyter': True}",
)  # fmt: skip


def get(url: str, path: str) -> Any:
    request = urllib.request.Request(f"{url}/kiwi/api/{path}", headers=HEADERS)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, dict[str, str]]]:
    """Return a server's URL, and the ids of an existing GPU and session."""
    with running_daemon("1x256MiB") as daemon:
        program = SessionProgram(daemon, 16, name="a.ipynb")
        try:
            with running_lab(daemon.env, app="server", options=OPTIONS) as server:
                (gpu,) = get(server.url, "status")["gpus"]
                (session,) = gpu["sessions"]
                yield server.url, {"uuid": gpu["uuid"], "session": session["id"]}
                assert "Traceback" not in server.log(), server.log()
        finally:
            program.close()


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
TRIED = [
    ("status", POSITIVE, "anywhere"),
    ("status", NEGATIVE, "anywhere"),
    ("openapi", POSITIVE, "anywhere"),
    ("usage", POSITIVE, "anywhere"),
    ("usage", NEGATIVE, "anywhere"),
    *[
        (name, mode, where)
        for name in ("set", "setSession")
        for mode in (POSITIVE, NEGATIVE)
        for where in ("there", "anywhere")
    ],
    *[
        (name, mode, where)
        for name in ("release", "bringBack", "story")
        for mode, where in ((POSITIVE, "there"), (POSITIVE, "anywhere"), (NEGATIVE, "anywhere"))
    ],
]
"""Operations with valid or invalid data, for a GPU and session that may or may not exist. An
operation without parameters has valid data only."""


@pytest.mark.parametrize(
    ("name", "mode", "where"), TRIED, ids=[f"{a}-{b.value}-{c}" for a, b, c in TRIED]
)
@pytest.mark.timeout(300)
def test_what_is_described_is_what_is_done(
    place: tuple[str, dict[str, str]], name: str, mode: GenerationMode, where: str
) -> None:
    url, names = place
    schema = schemathesis.openapi.from_url(f"{url}/kiwi/api/openapi.json", headers=HEADERS)
    operation = schema.find_operation_by_id(name)
    wanted = {parameter.name for parameter in operation.path_parameters}
    there = where == "there"
    fixed = {key: names[key] for key in wanted} if there else None

    @settings(
        max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode, path_parameters=fixed))
    def try_it(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=url, headers=HEADERS)

    try_it()


def test_every_route_is_described() -> None:
    paths = description("/")["paths"]
    assert {operation["operationId"] for path in paths.values() for operation in path.values()
            if isinstance(operation, dict)} == set(OPERATIONS)  # fmt: skip
    assert len(paths) == len(REST)
    methods = {name for path in paths.values() for name in path} - {"parameters"}
    assert methods == {"get", "patch", "post"}


def test_the_schemas_are_whole() -> None:
    text = json.dumps(description("/base/"))
    schemas = json.loads(text)["components"]["schemas"]
    for name in ("State", "Snapshot", "Delta", "Heartbeat", "Gpu", "Session", "History", "Problem"):
        assert schemas[name]["properties"], name
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in schemas
