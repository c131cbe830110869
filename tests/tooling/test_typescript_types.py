"""Tests that the labextension has the types and the words of Python."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect
import pytest
from kernels import ROOT

from kiwi_core import terms

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def script_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"packaging/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_of("typescript_types")


@pytest.mark.parametrize("name", ["typescript_types", "typescript_terms"])
def test_the_file_is_what_python_says(name: str) -> None:
    script = script_of(name)
    command = f".venv/bin/python packaging/{name}.py"
    assert script.FILE.read_text() == script.written(), f"run: {command}"


SENTENCES = [term for term in vars(terms).values() if type(term) is str and " " in term]


@pytest.mark.parametrize(
    "path", [*(ROOT / "labextension/src").rglob("*.ts*")], ids=lambda p: p.name
)
def test_no_other_file_has_a_term_of_its_own(path: Path) -> None:
    """A surface that writes the words itself would keep them when the others change."""
    source = path.read_text()
    own = [term for term in SENTENCES if f"'{re.sub('{.*?}', '%1', term)}'" in source]
    assert not own or path.name == "terms.ts"


class Inner(msgspec.Struct, kw_only=True):
    """A struct that is reached only through ``Outer``."""

    free_bytes: int
    """Bytes that are free; ``None`` is not among them."""


class Outer(Inner, kw_only=True):
    ratio: float | None = None
    inner: list[Inner] = []
    by_name: dict[str, bool] = {}


class Change(msgspec.Struct, tag_field="type", tag="change", omit_defaults=True):
    outer: Outer | None = None


def test_each_kind_of_field_has_its_type(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WITH_DEFAULTS", ("IOuter",))
    found: dict[str, str] = {}
    script._reach(msgspec.inspect.type_info(Change), found)
    assert found == {
        "Inner": (
            "/** A struct that is reached only through `Outer`. */\n"
            "export interface IInner {\n"
            "  /** Bytes that are free; null is not among them. */\n"
            "  readonly free_bytes: number;\n"
            "}\n"
        ),
        "Outer": (
            "export interface IOuter {\n"
            "  /** Bytes that are free; null is not among them. */\n"
            "  readonly free_bytes: number;\n"
            "  readonly ratio: number | null;\n"
            "  readonly inner: readonly IInner[];\n"
            "  readonly by_name: Readonly<Record<string, boolean>>;\n"
            "}\n"
            "\n"
            "export const OUTER_DEFAULTS = {\n"
            "  ratio: null,\n"
            "  inner: [],\n"
            "  by_name: {}\n"
            "} as const;\n"
        ),
        "Change": (
            "export interface IChange {\n"
            "  readonly type: 'change';\n"
            "  readonly outer?: IOuter;\n"
            "}\n"
        ),
    }


def test_a_type_that_typescript_would_not_know_is_an_error(script: ModuleType) -> None:
    class Odd(msgspec.Struct):
        anything: Any

    with pytest.raises(KeyError):
        script._reach(msgspec.inspect.type_info(Odd), {})
