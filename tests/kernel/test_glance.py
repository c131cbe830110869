"""Tests of the verdict from a cell's words alone, and of the later analysis of such a cell."""

from __future__ import annotations

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kiwi_jupyter.kernel.analysis import Analyzer, Libraries
from kiwi_jupyter.kernel.analysis.glance import LENGTH_MAX, Glance
from kiwi_jupyter.kernel.decision import AT_A_GLANCE, Decider

CPU = (
    "x = 1",
    "import math\nprint(math.sqrt(2))",
    "import numpy as np, json\nimport os.path",
    "from collections import (\n    Counter,\n)",
    "from collections import Counter, deque",
    "def f(a):\n    import csv\n    return a",
    "rows = [r for r in open('data.csv')]",
)

READ = (
    "get_ipython().run_line_magic('matplotlib', 'inline')",
    "exec('x = 1')",
    "x = 1\n" * LENGTH_MAX,
)

NO_CPU_NOTEBOOK = (
    "import torch",
    "def train():\n    import torch",
    "from numba import cuda",
    "model = cupy.zeros(3)",
    "from . import mine",
    "import math, mine",
    "x = 1; import mine",
    "import a_module_that_nobody_knows as m",
)


@pytest.mark.parametrize("text", CPU)
def test_a_glance_suffices_for(text: str) -> None:
    assert Glance(Libraries()).suffices(text)


@pytest.mark.parametrize("text", READ)
def test_a_cell_that_must_be_read(text: str) -> None:
    glance = Glance(Libraries())
    assert not glance.suffices(text)
    assert glance.suffices("x = 1"), "that says nothing about later cells"


@pytest.mark.parametrize("text", NO_CPU_NOTEBOOK)
def test_a_cell_after_which_every_cell_is_read(text: str) -> None:
    """A later cell may use what this one defines or imports without naming a GPU."""
    glance = Glance(Libraries())
    assert not glance.suffices(text)
    assert not glance.suffices("x = 1")


def test_a_library_for_gpus_that_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    glance = Glance(Libraries(gpu=frozenset({"kiwi_gpu_library"})))
    assert glance.suffices("x = 1")
    monkeypatch.setitem(sys.modules, "kiwi_gpu_library", ModuleType("kiwi_gpu_library"))
    assert not glance.suffices("x = 1")
    monkeypatch.delitem(sys.modules, "kiwi_gpu_library")
    assert not glance.suffices("x = 1"), "objects of it may be left"


def judged(analyzer: Analyzer, code: str, space: dict[str, Any]) -> bool:
    return analyzer.analyse(ast.parse(code), space, (code, 0)).gpu


def test_what_a_cell_that_was_put_off_did_is_known_later() -> None:
    """It has changed a class of a library, so nothing about that attribute is proved afterwards."""
    space: dict[str, Any] = {}
    code = "import fractions\nfractions.Fraction.limit = print"
    exec("import fractions", space)
    plain, late = Analyzer(), Analyzer()
    for analyzer in (plain, late):
        analyzer.taint("the second proof is to be tried")
        analyzer.put_off(("y = 1", 0))
    late.put_off((code, 0))
    assert not judged(plain, "y.limit", space)
    assert judged(late, "y.limit", space)


def test_a_cell_that_cannot_be_read_again_is_not_forgotten() -> None:
    analyzer = Analyzer()
    analyzer.put_off(("this is no Python", 0))
    assert not judged(analyzer, "x = 1", {})
    assert analyzer.tainted


def test_too_many_cells_that_were_put_off() -> None:
    analyzer = Analyzer()
    for number in range(600):
        analyzer.put_off((f"x = {number}", 0))
    assert analyzer.tainted


@pytest.mark.parametrize("untouched", [True, False])
def test_only_a_process_without_the_driver_is_glanced_at(untouched: bool) -> None:
    analyzer = Analyzer()
    driver_gate: Any = SimpleNamespace(untouched=lambda: untouched, in_front=True)
    session: Any = SimpleNamespace(connected_client=None)
    decider = Decider(SimpleNamespace(user_ns={}), session, analyzer, driver_gate)
    code = "x = 1"
    decision = decider.decide(ast.parse(code), None, (code, 0))
    assert (decision.verdict.why == AT_A_GLANCE) == untouched
    forced = decider.decide(ast.parse(code), "gpu", (code, 0))
    assert forced.verdict.gpu
