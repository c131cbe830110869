"""Tests of cells in a kernel without a GPU library: no cell can use a GPU until code loads one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from kiwi_jupyter.kernel.analysis import Analyzer, Libraries
from tests.kernel.tripwire import NAME, Notebook, make_library

if TYPE_CHECKING:
    from pathlib import Path

transform = TransformerManager().transform_cell


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """Hide the libraries that other tests have loaded into this process from the analyzer."""
    libraries = Libraries(gpu=frozenset({NAME}))
    for module in list(sys.modules):
        if not libraries.loaded_without_harm(module):
            monkeypatch.delitem(sys.modules, module)
    notebook = Notebook(Analyzer(libraries, transform))
    assert notebook.analyzer.tainted is None
    return notebook


@pytest.mark.parametrize(
    "code",
    [
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1])",
        "import io\nf = io.StringIO()\nf.write('x')",
        "class A(dict):\n    def __missing__(self, k): return k\nA()['x']",
        "g = (i for i in range(3))\nnext(g)",
        "import re\nre.compile('a').match('a')",
        "import functools\n@functools.lru_cache\ndef f(n): return n\nf(1)",
    ],
)
def test_objects_need_no_look(notebook: Notebook, code: str) -> None:
    assert not notebook.run(code).gpu
    assert notebook.analyzer.tainted is None


@pytest.mark.parametrize(
    ("code", "index"),
    [
        ("import torch", 0),
        ("x = 1\nimport some_unknown_library", 1),
        ("def f():\n    import torch", None),
        ("x = 1\ndef f():\n    return eval('1')\nf()", 2),
        ("import sys\nsys.modules", 1),
        ("import os\nm = os", 1),
        ("import marshal", None),
        ("class A:\n    def m(self):\n        from cupy import zeros", None),
        ("f = lambda: __import__('torch')", None),
        ("().__class__.__base__.__subclasses__()", 0),
        ("from os import *", 0),
        ("import os\nos.system('x')", 1),
    ],
)
def test_code_that_may_import_a_gpu_library_taints_the_notebook(
    notebook: Notebook, code: str, index: int | None
) -> None:
    verdict = notebook.judge(code)
    assert (verdict.first_statement if verdict.gpu else None) == index, verdict.why
    assert notebook.analyzer.tainted


def test_after_that_objects_are_looked_at(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("g = (i for i in range(3))")
    assert not notebook.judge("next(g)").gpu
    monkeypatch.setitem(sys.modules, NAME, make_library())
    assert notebook.judge("next(g)").gpu
    assert "tripgpu is loaded" in str(notebook.analyzer.tainted)


def test_a_preview_changes_nothing(notebook: Notebook) -> None:
    import ast

    verdict = notebook.analyzer.preview(ast.parse("import torch"), notebook.space)
    assert verdict.gpu
    assert notebook.analyzer.tainted is None


def test_a_file_beside_the_notebook_is_not_the_library(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "colorsys.py").write_text("import torch")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert not notebook.judge("import colorsys").gpu
    monkeypatch.syspath_prepend(str(tmp_path))
    assert notebook.judge("import colorsys").gpu


def test_settings_extend_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, make_library())
    libraries = Libraries(cpu=frozenset({"my_tools"}), gpu=frozenset({NAME, "scipy"}))
    notebook = Notebook(Analyzer(libraries))
    assert not notebook.judge("import my_tools").gpu
    assert notebook.judge("import scipy.linalg").gpu


MAGICS: list[tuple[str, bool]] = [
    ("!ls -l", False),
    ("!ls | wc -l && pwd", False),
    ("!pip install torch", False),
    ("%pip install torch", False),
    ("!nvidia-smi", False),
    ("!git log > out.txt 2>&1", False),
    ("!python train.py", True),
    ("!ls; python train.py", True),
    ("!ls $(python train.py)", True),
    ("!ls `python train.py`", True),
    ("!find . -exec python {} +", True),
    ("!ls | xargs python", True),
    ("!./train.sh", True),
    ("!kiwi run -- python train.py", False),
    ("x = !cat a.txt", False),
    ("x = !python a.py", True),
    ("!echo {x}", False),
    ("!echo $x", False),
    ("!echo {t}", True),
    ("!echo $t", True),
    ("%time x", False),
    ("%time t()", True),
    ("y = %time t()", True),
    ("%timeit -n 10 -r 2 sum([x])", False),
    ("%timeit -n 10 t()", True),
    ("%%time\nx\nt()", True),
    ("%%timeit x\nt()", True),
    ("%%timeit t\nx", True),
    ("%%capture out\nprint(x)", False),
    ("%%capture out\nt()", True),
    ("%%time\n%time t()", True),
    ("%%time\n!ls", False),
    ("%%bash\nls\npwd", False),
    ("%%bash\nls\npython train.py", True),
    ("%%sh\nnohup ./x &", True),
    ("%%python\nprint(1)", True),
    ("%%html\n<b>t()</b>", False),
    ("%%writefile a.py\nt()", False),
    ("%%javascript\nt()", False),
    ("%%unknown_magic\nx", True),
    ("%unknown_magic", True),
    ("%matplotlib inline", False),
    ("%load_ext autoreload\n%autoreload 2", False),
    ("%load_ext cupyx", True),
    ("%whos", True),
    ("%who", False),
    ("%store x", False),
    ("%store t", True),
    ("%store -r x", True),
    ("!python cpu_script.py", False),
    ("!python3 -u cpu_script.py --flag 3", False),
    ("!python -c 'print(1)'", False),
    ("!python -c 'import torch'", True),
    ("!python gpu_script.py", True),
    ("!python missing.py", True),
    ("!python -m module", True),
    ("!python cpu_script.py | python gpu_script.py", True),
    ("!python cpu_script.py; ./train.sh", True),
    ("!python cpu_script.py > out.txt", True),
    ("!python $x", True),
    ("!python $(cat x).py", True),
    ("!KIND=gpu python cpu_script.py", True),
    ("%reset -f", True),
    ("%cd /tmp", False),
    ("%env A=1", False),
    ("%history", False),
    ("?len", False),
    ("t?", True),
    ("x??", False),
    ("%kiwi status", False),
    ("%run cpu_script.py", False),
    ("%run gpu_script.py", True),
    ("%run missing.py", True),
    ("%run -m module", True),
    ("%run cpu_script", False),
    ("%run rebinds_t.py", True),
    ("%run -i gpu_by_name.py", True),
    ("get_ipython().run_cell('x')", True),
    ("get_ipython().user_ns['t']", True),
    ("get_ipython().run_line_magic('pwd', '')", False),
    ("for i in range(2):\n    !ls\n    %time x", False),
    ("for i in range(2):\n    %time t()", True),
]


@pytest.mark.parametrize(("cell", "gpu"), MAGICS)
def test_magics(cell: str, gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ast

    monkeypatch.setitem(sys.modules, NAME, make_library())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu_script.py").write_text("import math\nprint(math.sin(1))\n")
    (tmp_path / "gpu_script.py").write_text("def f():\n    import torch\nf()\n")
    (tmp_path / "gpu_by_name.py").write_text("t()\n")
    (tmp_path / "rebinds_t.py").write_text("t = 1\n")
    notebook = Notebook(Analyzer(Libraries(gpu=frozenset({NAME})), transform))
    notebook.run("import tripgpu\nt = tripgpu.Tensor()\nx = 3")
    verdict = notebook.analyzer.analyse(ast.parse(transform(cell)), notebook.space)
    assert verdict.gpu is gpu, verdict.why


def test_the_analysis_keeps_nothing_of_the_users_alive(notebook: Notebook) -> None:
    import ast
    import gc
    import weakref

    notebook.analyzer.taint("this test says so")  # from here on objects are examined
    notebook.space["Object"] = type("Object", (), {})
    gc.disable()
    try:
        notebook.run("held = Object()\nalias = held")
        gone = weakref.ref(notebook.space["held"])
        for code in ("other = held\nother", "str(held)"):
            notebook.judge(code)
            notebook.analyzer.plainly(ast.parse(code), notebook.space)
        notebook.judge("del held")
        del notebook.space["held"], notebook.space["alias"]
        assert gone() is None
    finally:
        gc.enable()
