"""Tests that the cell hook comes before the first use of the GPU library, whatever a cell does."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernel.tripwire import NAME, Notebook, make_library

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ["a", "b", "c", "f", "g", "k", "t", "x"]
ATTRIBUTES = [
    "real",
    "append",
    "v",
    "touch",
    "Tensor",
    "get",
    "items",
    "__class__",
    "copy",
    "__len__",
]

name = st.sampled_from(NAMES)
atom = st.one_of(
    name,
    name,
    st.sampled_from(
        "1 's' [] {} None tripgpu lib.touch tripgpu.Tensor() len print str map sorted getattr"
        " math math.sin functools.partial globals()".split()
    ),
)


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} == {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"[{p[0]}, {p[1]}]"),
        st.tuples(inner, inner).map(lambda p: f"{{'k': {p[0]}, 'l': {p[1]}}}"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}[{p[1]}]"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}({p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"functools.partial({p[0]}, {p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} if {p[1]} else 0)"),
        st.tuples(inner, inner).map(lambda p: f"list(map({p[0]}, [{p[1]}]))"),
        st.tuples(inner, inner).map(lambda p: f"sorted([{p[0]}, 1], key={p[1]})"),
        st.tuples(inner, name).map(lambda p: f"[{p[0]} for {p[1]} in range(2)]"),
        st.tuples(inner, name).map(lambda p: f"({p[0]} for {p[1]} in [1])"),
        st.tuples(inner, name).map(lambda p: f"(lambda {p[1]}=1: {p[0]})"),
        st.tuples(inner, name).map(lambda p: f"({p[1]} := {p[0]})"),
        st.tuples(inner, st.sampled_from(ATTRIBUTES)).map(lambda p: f"{p[0]}.{p[1]}"),
        inner.map(lambda e: f"f'{{{e}}}'"),
        inner.map(lambda e: f"{e}()"),
        inner.map(lambda e: f"str({e})"),
        inner.map(lambda e: f"next(iter({e}))"),
        inner.map(lambda e: f"'{{}}'.format({e})"),
    )


expression = st.recursive(atom, _compound, max_leaves=5)


def _indent(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for text in lines for line in text.split("\n") if line)


def _blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=2).map(_indent)
    return st.one_of(
        st.tuples(expression, body).map(lambda p: f"if {p[0]}:\n{p[1]}"),
        st.tuples(name, body).map(lambda p: f"for {p[0]} in range(2):\n{p[1]}"),
        st.tuples(name, body).map(lambda p: f"def {p[0]}(*args):\n{p[1]}    return 1\n"),
        st.tuples(name, name, body).map(lambda p: f"def {p[0]}({p[1]}=0):\n    global x\n{p[2]}"),
        st.tuples(name, body).map(lambda p: f"class {p[0]}:\n{p[1]}"),
        st.tuples(name, name, body).map(
            lambda p: f"class {p[0]}:\n    def __call__(self, *{p[1]}):\n{_indent([p[2]])}"
        ),
        st.tuples(body, body).map(lambda p: f"try:\n{p[0]}except Exception as e:\n{p[1]}"),
        st.tuples(expression, name, body).map(lambda p: f"with {p[0]} as {p[1]}:\n{p[2]}"),
    )


simple = st.one_of(
    expression,
    st.tuples(name, expression).map(lambda p: f"{p[0]} = {p[1]}"),
    st.tuples(name, expression).map(lambda p: f"{p[0]} = {p[1]}"),
    st.tuples(name, expression).map(lambda p: f"{p[0]} += {p[1]}"),
    st.tuples(name, expression).map(lambda p: f"{p[0]}.v = {p[1]}"),
    st.tuples(name, expression).map(lambda p: f"{p[0]}[0] = {p[1]}"),
    st.tuples(name, expression).map(lambda p: f"{p[0]}.append({p[1]})"),
    name.map(lambda n: f"del {n}"),
    name.map(lambda n: f"import tripgpu as {n}"),
    name.map(lambda n: f"import math as {n}"),
    name.map(lambda n: f"from tripgpu import touch as {n}"),
    name.map(lambda n: f"from functools import partial as {n}"),
    name.map(lambda n: f"from os import path as {n}"),
)
statement = st.recursive(simple, _blocks, max_leaves=4)
cell = st.lists(statement, min_size=1, max_size=4).map("\n".join)


def _parses(code: str) -> bool:
    try:
        compile(code, "<cell>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    sys.modules[NAME] = make_library()
    gc.disable()  # GcGuard decides what the collector frees, and when
    yield
    gc.enable()
    del sys.modules[NAME]
    gc.collect()


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(cells=st.lists(cell.filter(_parses), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("_part", range(3))  # `make test` runs the first one
def test_no_touch_without_the_gate(_part: int, cells: list[str]) -> None:
    notebook = Notebook()
    notebook.run("import tripgpu, math, functools\nfrom tripgpu import touch as k\nx = 1\nb = [2]")
    notebook.run("lib = tripgpu\nt = tripgpu.Tensor()")
    for code in cells:
        verdict = notebook.judge(code)
        touched = notebook.statement_that_touches(code)
        if touched is not None:
            assert verdict.gpu, f"{code}\n# statement {touched} touched; {verdict.why}"
            assert verdict.first_statement <= touched, f"{code}\n# {verdict.why}"
