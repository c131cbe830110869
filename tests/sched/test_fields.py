"""Each field of ``Session`` and ``State`` is written in one module, so that a reader knows where to
look: a field of a part (``Mode`` ...) in the module of the part. The exceptions are listed; the
list may only get shorter."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import pytest

from kiwi_core import sched
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.model.state import State

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(sched.__file__).parent

EXCEPTIONS: dict[type, list[str]] = {Session: [], State: ["actions"]}
"""Every rule adds to the actions, in the order in which they are to be performed."""

MAKERS = {"__init__", "__post_init__"}

MADE_IN = {"forecast/state_copy.py"}
"""Modules that only make copies."""


def module_of(part: type) -> str:
    return str(Path(sys.modules[part.__module__].__file__ or "").relative_to(FOLDER))


def parts_of(whole: type) -> list[type]:
    """Return the classes that declare the fields of ``whole``, itself included."""
    return [part for part in whole.__mro__ if is_dataclass(part)]


def own_fields(part: type) -> set[str]:
    return set(part.__annotations__) & {one.name for one in fields(part)}


def methods(part: type) -> set[str]:
    own = vars(part).items()
    found = {name for name, value in own if isinstance(value, (FunctionType, property))}
    return {name for name in found if not name.startswith("__")}  # those are made by dataclass


CHANGES = {"add", "append", "clear", "discard", "pop", "popitem", "popleft", "remove", "setdefault"}
"""Methods that change a collection."""


COLLECTIONS = ("OrderedDict[", "deque[", "dict[", "list[", "set[")


def changed(node: ast.AST, collections: set[str]) -> ast.Attribute | None:
    """Return the field that the node assigns, or the collection that it changes."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if called and node.func.attr in CHANGES:
        what = node.func.value
        return what if isinstance(what, ast.Attribute) and what.attr in collections else None
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        what = node.value if isinstance(node, ast.Subscript) else node
        return what if isinstance(what, ast.Attribute) else None
    return None


def assigned(tree: ast.AST, collections: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the object and the attribute of each change, except where objects are made."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in MAKERS:
            continue
        for node in ast.walk(function):
            if (what := changed(node, collections)) is not None:
                yield ast.unparse(what.value), what.attr


@cache
def writes(whole: type) -> dict[str, set[str]]:
    """Return the modules that assign each field, or change the collection in it."""
    own = {one.name for one in fields(whole)}
    collections = {one.name for one in fields(whole) if str(one.type).startswith(COLLECTIONS)}
    names = {part.__name__: module_of(part) for part in parts_of(whole)}
    found: dict[str, set[str]] = defaultdict(set)
    for path in FOLDER.rglob("*.py"):
        module = str(path.relative_to(FOLDER))
        if module in MADE_IN:
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            is_part = isinstance(node, ast.ClassDef) and names.get(node.name) == module
            for name, attribute in assigned(node, collections):
                if name == "self":
                    counts = is_part
                elif whole is State:
                    counts = name in ("st", "self._st")
                else:
                    counts = name != "st"
                if counts and attribute in own:
                    found[attribute].add(module)
    return found


@pytest.mark.parametrize("whole", [Session, State])
def test_each_field_is_written_in_one_module(whole: type) -> None:
    several = sorted(name for name, modules in writes(whole).items() if len(modules) > 1)
    assert several == EXCEPTIONS[whole]


@pytest.mark.parametrize("whole", [Session, State])
def test_a_field_of_a_part_is_written_in_the_module_of_the_part(whole: type) -> None:
    found = writes(whole)
    for part in parts_of(whole)[1:]:
        for name in own_fields(part):
            assert found.get(name, set()) <= {module_of(part)}, name


@pytest.mark.parametrize("whole", [Session, State])
def test_no_two_parts_use_the_same_name(whole: type) -> None:
    """A method of one part would replace that of the other one without a word."""
    used = Counter(name for part in parts_of(whole) for name in own_fields(part) | methods(part))
    assert [name for name, count in used.items() if count > 1] == []


def test_the_writes_are_found() -> None:
    assert writes(Session)["blocked"] == {"model/turn.py"}
    assert writes(State)["outside_bytes"] == {"model/readings.py"}
    assert writes(State)["outgrown"] == {"model/mode.py"}
    assert writes(State)["idle"] == {"model/derived.py"}
    assert "rules/orders.py" in writes(State)["actions"]
