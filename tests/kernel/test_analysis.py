# ruff: noqa: E501 - a table of cells
"""Tests of the verdict on cells in a kernel that has loaded a GPU library.

Each case has the cells before, the cell, and the index of the first statement that may use the GPU
(``CPU`` if none may). Some cases say GPU although they do not use it, because no proof is possible;
they keep the verdict from changing unnoticed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.kernel.tripwire import NAME, Notebook, make_library

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = None

SETUP = """
import tripgpu
t = tripgpu.Tensor()
x = 3
xs = [1, 2.5, 'three', None, (4, {5: b'6'})]
"""

FUNCTIONS = """
def cpu(a=1, *rest, b=2):
    total = 0
    for i in range(10):
        total += i * a
    return [total, sorted(rest, key=lambda r: -r)]
def gpu(a=1):
    return tripgpu.touch()
def calls_gpu(a=1):
    return [gpu() for _ in range(2)]
def calls_cpu():
    return cpu(cpu()[0])
def even(n):
    return True if n == 0 else odd(n - 1)
def odd(n):
    return False if n == 0 else even(n - 1)
def even_gpu(n):
    return True if n == 0 else odd_gpu(n - 1)
def odd_gpu(n):
    return gpu() if n == 0 else even_gpu(n - 1)
class Point:
    def __init__(self, a, b):
        self.a, self.b = a, b
    def length(self):
        return (self.a ** 2 + self.b ** 2) ** 0.5
    @property
    def first(self):
        return self.a
class GpuPoint(Point):
    @property
    def second(self):
        return gpu()
"""

CASES: list[tuple[str, str, int | None]] = [
    # --- plain Python
    ("", "1 + 1", CPU),
    ("", "y = x * 2\nprint(y)", CPU),
    ("", "xs", CPU),
    ("", "print(xs, x)", CPU),
    ("", "[i * x for i in xs if i]", CPU),
    ("", "{k: v for k, v in zip(xs, range(3))}", CPU),
    ("", "sum(i for i in range(10))", CPU),
    ("", "f'{x:>10} {xs!r}'", CPU),
    ("", "for i in range(3):\n    print(i)\nelse:\n    y = 1", CPU),
    ("", "while x > 5:\n    x -= 1", CPU),
    ("", "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(e)", CPU),
    ("", "with open('/dev/null') as f:\n    f.read()", CPU),
    ("", "assert x, 'no'", CPU),
    ("", "a, *b = xs\na, b", CPU),
    ("", "if (n := len(xs)) > 3:\n    print(n)", CPU),
    ("", "match x:\n    case int(real=r):\n        print(r)\n    case [a, *b]:\n        print(b)", CPU),
    ("", "lambda: x", CPU),
    ("", "undefined_name + 1", CPU),
    ("", "global x\nx = 4", CPU),
    ("", "'a {}'.format(x)", CPU),
    ("", "'%s' % x", CPU),
    ("", "sorted(xs, key=str)", CPU),
    ("", "getattr(x, 'real')", CPU),
    ("", "'''only text'''", CPU),
    ("", "from __future__ import annotations", CPU),
    ("", "x.__class__.__name__", CPU),
    ("", "print(*xs, sep=', ')", CPU),
    ("", "del x", CPU),
    ("", "raise ValueError(x)", CPU),
    # --- libraries that stay on the CPU
    ("", "import math\nmath.sqrt(2)", CPU),
    ("", "import json, re\njson.dumps(xs[:2])", CPU),
    ("", "from pathlib import Path\nPath('.').exists()", CPU),
    ("", "import os\nos.path.join('a', 'b'), os.getcwd()", CPU),
    ("", "import os.path as p\np.exists('a')", CPU),
    ("", "from os import path, listdir\npath.exists('.'), listdir('.')", CPU),
    ("", "import sys\nprint(sys.version, sys.argv)", CPU),
    ("", "import numpy as np\nnp.linalg.norm(np.zeros(3))", CPU),
    ("import numpy as np\na = np.arange(5)", "a.mean() + np.float32(3)\na", CPU),
    ("import numpy as np\na = np.arange(5)", "np.random.rand(3), np.r_[1:3], np.pi", CPU),
    ("import numpy as np\nd = {'a': np.ones(2)}", "d['a'][0] = 5", CPU),
    ("import pandas as pd\nd = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})",
     "d.groupby('b').a.mean()\nd.head()", CPU),
    ("import pandas as pd\nd = pd.DataFrame({'a': [1, 2]})", "d.query('a > 1')", CPU),
    ("import pandas as pd\ns = pd.Series([1, 2])", "s.apply(lambda v: v + 1)", CPU),
    ("", "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2])", CPU),
    ("import datetime", "datetime.datetime.now() - datetime.timedelta(days=1)", CPU),
    ("from collections import Counter, defaultdict\nc = Counter('aab'); d = defaultdict(list)",
     "c.most_common(1), d['x']", CPU),
    ("from functools import partial\np = partial(max, 3)", "p(4)", CPU),
    ("import random", "random.shuffle([1, 2])", CPU),
    ("", "import time\ntime.sleep(0)", CPU),
    ("", "import torch_is_not_installed", 0),
    ("", "import logging\nlogging.getLogger('a').debug('x')", CPU),
    ("", "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int = 1\nA(2)", CPU),
    ("", "import asyncio\nasyncio.sleep(0).close()", CPU),
    # --- functions and classes of the user's
    (FUNCTIONS, "cpu(3)", CPU),
    (FUNCTIONS, "calls_cpu()", CPU),
    (FUNCTIONS, "even(4)", CPU),
    (FUNCTIONS, "Point(3, 4).length()", CPU),
    (FUNCTIONS, "list(map(cpu, range(3)))", CPU),
    (FUNCTIONS + "p = Point(1, 2)", "p.first, p", CPU),
    (FUNCTIONS + "ps = [Point(1, 2), Point(3, 4)]", "sorted(ps, key=lambda p: p.a)", CPU),
    (FUNCTIONS, "def later():\n    return gpu()", CPU),
    (FUNCTIONS, "later = lambda: gpu()", CPU),
    ("", "def typed(a: tripgpu.Tensor | None, b: 'x' = 1) -> list[tripgpu.Tensor]:\n    pass", CPU),
    ("", "class Net(tripgpu.Quiet):\n    def forward(self):\n        return tripgpu.touch()", CPU),
    ("", "class Plain:\n    y = 3\n    z = y + x\n    def m(self):\n        return tripgpu.touch()", CPU),
    ("from enum import Enum\nclass Color(Enum):\n    RED = 1", "Color.RED, Color(1)", CPU),
    ("from typing import NamedTuple\nclass P(NamedTuple):\n    a: int = 1\np = P()", "p.a, P(2)", CPU),
    ("def outer():\n    k = [0]\n    def inner():\n        k[0] += 1\n        return k\n    return inner\nf = outer()",
     "f()", CPU),
    ("@property\ndef q(self): return 1", "q", CPU),
    ("def g():\n    import os\n    return os.getcwd()", "g()", CPU),
    ("def g():\n    from math import sin as s\n    return s(1)", "g()", CPU),
    ("def g(v):\n    return '{}'.format(v)", "g(1)", CPU),
    # --- bindings in the cell
    ("", "t2 = 1\nt2 + 1", CPU),
    ("", "import tripgpu as again", CPU),
    ("", "from tripgpu import touch", CPU),
    ("", "x = 5\nfor x in range(3): pass\nprint(x)", CPU),
    ("", "def f(t):\n    return t + 1\nf(3)", CPU),
    ("", "[t for t in range(3)]", CPU),
    ("", "(lambda t: t + 1)(3)", CPU),
    ("", "def f():\n    t = 1\n    return t\nf()", CPU),
    # --- plain uses of the GPU
    ("", "t", 0),
    ("", "print(t)", 0),
    ("", "t + 1", 0),
    ("", "y = 1\nprint(y)\nt()", 2),
    ("", "tripgpu.touch()", 0),
    ("", "tripgpu.constant", 0),
    ("", "f'{t}'", 0),
    ("", "'{}'.format(t)", 0),
    ("", "str(t)", 0),
    ("", "del t", 0),
    ("", "t = 1", 0),
    ("", "for t in range(3): pass", 0),
    ("", "for i in t: pass", 0),
    ("", "import math as t", 0),
    ("", "def t(): pass", 0),
    ("", "with open('/dev/null') as t: pass", 0),
    ("", "if x > 100:\n    t.foo", 0),
    ("", "[t]", 0),
    ("", "y = [t]\nlen(y)", 0),
    ("", "y = {'a': t}", 0),
    ("", "with t: pass", 0),
    ("", "x in t", 0),
    ("", "t[0] = 1", 0),
    ("", "xs[0] = t", 0),
    ("", "x.real if t else 0", 0),
    ("", "assert t", 0),
    ("", "print(x, end=t)", 0),
    ("", "y = (z := t)", 0),
    ("", "match t:\n    case 1: pass", 0),
    ("", "x = 1\nif True:\n    x = t\nprint(x)", 1),
    ("", "await_ = 1\nasync def f():\n    await t\nf().close()", 2),
    ("", "def f(a=t): pass", 0),
    ("", "def f(a: t[0]): pass", 0),
    ("", "@t\ndef f(): pass", 0),
    ("", "class A(tripgpu.Module): pass", 0),
    ("", "class A(tripgpu.Quiet): pass\nA()", 1),
    ("", "class A:\n    y = tripgpu.touch()", 0),
    ("", "class A(metaclass=t): pass", 0),
    ("", "global t\nt.y", 1),
    ("", "import tripgpu as g\ng.touch()", 1),
    ("", "from tripgpu import touch\ntouch()", 1),
    ("", "import tripgpu.sub", 0),
    ("", "from tripgpu import *", 0),
    ("", "x: tripgpu.Tensor = 3", CPU),
    ("", "x: t[1] = 3", 0),
    (FUNCTIONS, "gpu()", 0),
    (FUNCTIONS, "calls_gpu()", 0),
    (FUNCTIONS, "even_gpu(3)", 0),
    (FUNCTIONS, "y = 1\ny = gpu()", 1),
    (FUNCTIONS, "GpuPoint(1, 2).second", 0),
    (FUNCTIONS + "p = GpuPoint(1, 2)", "p.second", 0),
    (FUNCTIONS, "def f(): return gpu()\nprint(1)\nf()", 2),
    (FUNCTIONS, "f = lambda: gpu()\nf()", 1),
    (FUNCTIONS, "def f(): return g()\ndef g(): return gpu()\nf()", 2),
    (FUNCTIONS, "class A:\n    def m(self): return gpu()\na = A()", 1),
    # --- hidden uses
    (FUNCTIONS + "fs = [cpu, gpu]", "fs[0]()", 0),
    (FUNCTIONS + "d = {'f': gpu}", "d['f']()", 0),
    (FUNCTIONS, "list(map(gpu, range(3)))", 0),
    (FUNCTIONS, "sorted(range(3), key=gpu)", 0),
    (FUNCTIONS, "any(gpu() for _ in range(2))", 0),
    (FUNCTIONS + "m = GpuPoint(1, 2).length", "m()", 0),
    (FUNCTIONS + "class H:\n    def m(self): return gpu()\nh = H().m", "h()", 0),
    ("from functools import partial\np = partial(tripgpu.touch, 1)", "p()", 0),
    ("from functools import partial\np = partial(print, t)", "p()", 0),
    ("g = (tripgpu.touch() for _ in range(3))", "next(g)", 0),
    ("it = iter([t])", "next(it)", 0),
    ("it = map(tripgpu.touch, [1])", "list(it)", 0),
    ("", "globals()['t']", 0),
    ("", "locals()", 0),
    ("", "vars()", 0),
    ("", "eval('t')", 0),
    ("", "exec('t()')", 0),
    ("", "__import__('tripgpu').touch()", 0),
    ("", "import importlib\nimportlib.import_module('tripgpu')", 1),
    ("", "import sys\nsys.modules['tripgpu'].touch()", 1),
    ("", "from sys import modules\nmodules['tripgpu']", 1),
    ("", "import sys as s\nk = s\nk.modules", 1),
    ("", "import os\nos.system('true')", 1),
    ("", "from os import system\nsystem('true')", 1),
    ("", "import os\ng = os\ng.system('true')", 1),
    ("", "import numpy as np\nnp.os.system('true')", 1),
    ("", "import logging\nlogging.sys.modules", 1),
    ("", "import subprocess\nsubprocess.run(['true'])", 1),
    ("", "import ctypes\nctypes.CDLL(None)", 1),
    ("", "import pickle\npickle.loads(b'')", 1),
    ("", "import gc\ngc.get_objects()", 1),
    ("", "import inspect\ninspect.currentframe()", 1),
    ("import multiprocessing", "multiprocessing.Pool", 0),
    ("", "import atexit\natexit._run_exitfuncs()", 1),
    ("", "import builtins\nbuiltins.exec('t()')", 1),
    ("", "import weakref\nweakref.ref(x)", 1),
    ("", "(lambda: 0).__globals__['t']", 0),
    ("", "cpu = 1\n().__class__.__base__.__subclasses__()", 1),
    ("", "'{0.__globals__}'.format(lambda: 0)", 0),
    ("fmt = '{0.__globals__}'\ndef f(): pass", "fmt.format(f)", 0),
    ("", "getattr(x, 're' + 'al')", 0),
    ("", "import os\ngetattr(os, 'system')('true')", 1),
    ("g = getattr", "g(x, 'real')", 0),
    ("print = tripgpu.touch", "print(1)", 0),
    ("class print:\n    def __init__(self, *a): tripgpu.touch()", "print(1)", 0),
    ("len = lambda v: tripgpu.touch()", "len([])", 0),
    ("def getattr(a, b): return tripgpu.touch()", "getattr(x, 'real')", 0),
    ("class L(list):\n    def __len__(self): return tripgpu.touch()\nl = L()", "len(l)", 0),
    ("class I(int):\n    def __add__(self, o): return tripgpu.touch()\ni = I(3)", "i + 1", 0),
    ("class S(str):\n    def __str__(self): tripgpu.touch(); return ''\ns = S()", "print(s)", 0),
    ("class D:\n    def __del__(self): tripgpu.touch()\nd = D()", "d = 1", 0),
    ("class A:\n    def __getattr__(self, n): return tripgpu.touch()\na = A()", "a.y", 0),
    ("class A:\n    def __eq__(self, o): return tripgpu.touch()\na = A()", "a == 1", 0),
    ("class A:\n    __slots__ = ('v',)\na = A()\na.v = t", "print(a.v)", 0),
    ("class A: pass\na = A()\na.v = t", "a.v", 0),
    ("class A: v = t", "A.v", 0),
    ("class M(type):\n    def __call__(cls): return tripgpu.touch()\nclass A(metaclass=M): pass", "A()", 0),
    ("class A:\n    @property\n    def p(self): return tripgpu.touch()\na = A()", "a.p", 0),
    ("class A:\n    @staticmethod\n    def s(): return tripgpu.touch()", "A.s()", 0),
    ("class A:\n    @classmethod\n    def c(cls): return tripgpu.touch()", "A.c()", 0),
    ("class Desc:\n    def __get__(self, i, o): return tripgpu.touch()\nclass A: d = Desc()\na = A()", "a.d", 0),
    ("class E(Exception):\n    def __str__(self): tripgpu.touch(); return ''\ne = E()", "print(e)", 0),
    ("e = ValueError(t)", "print(e)", 0),
    ("def outer(v):\n    def inner(): return v\n    return inner\nf = outer(t)", "f()", 0),
    ("def f(v=t): return v", "f()", 0),
    ("def f(*, v=t): return v", "f()", 0),
    ("def f(): return 1\nf.extra = t", "f.extra", 0),
    ("import numpy as np\nu = np.frompyfunc(tripgpu.touch, 1, 1)", "u(3)", 0),
    ("import numpy as np\nu = np.vectorize(tripgpu.touch)", "u(3)", 0),
    ("import numpy as np\na = np.empty(1, object)\na[0] = t", "print(a)", 0),
    ("import numpy as np\nclass N(np.ndarray):\n    def sum(self): return tripgpu.touch()\na = np.ones(2).view(N)", "a.sum()", 0),
    ("import numpy as np\nold = np.mean\nnp.mean = tripgpu.touch", "np.mean([1])", 0),
    ("import json\njson.loads = lambda s: tripgpu.touch()", "json.loads('1')", 0),
    ("import pandas as pd\nd = pd.DataFrame({'a': [None]})\nd.at[0, 'a'] = t", "d.head()", 0),
    ("import pandas as pd\nd = pd.DataFrame({'a': [1]})", "d.query('a > @t')", 0),
    ("import pandas as pd\nd = pd.DataFrame({'a': [1]})\nd.attrs['t'] = t", "d.attrs", 0),
    ("import pandas as pd", "pd.read_pickle('x')", 0),
    ("import numpy as np", "np.load('x', allow_pickle=True)", 0),
    ("from collections import defaultdict\nd = defaultdict(tripgpu.touch)", "d['new']", 0),
    ("from collections import deque\nq = deque([t])", "q[0]", 0),
    ("from types import SimpleNamespace as N\nn = N(v=t)", "n.v", 0),
    ("import types\nn = types.MappingProxyType({'v': t})", "n['v']", 0),
    ("import contextvars\nv = contextvars.ContextVar('v')\nv.set(t)", "v.get()", 0),
    ("import operator\ng = operator.attrgetter('__globals__')", "g(lambda: 0)", 0),
    ("import threading\nth = threading.Thread(target=tripgpu.touch)", "th.run()", 0),
    ("", "import threading\nthreading.Thread(target=tripgpu.touch).run()", 1),
    ("import functools\n@functools.lru_cache\ndef f(): return tripgpu.touch()", "f()", 0),
    ("import functools\n@functools.wraps(print)\ndef f(*a): return tripgpu.touch()", "f(1)", 0),
    ("def f(): return tripgpu.touch()\nf.__module__ = 'numpy'", "f()", 0),
    ("def f():\n    import tripgpu as k\n    return k.touch()", "f()", 0),
    ("def f():\n    from tripgpu import touch as k\n    return k()", "f()", 0),
    ("def f():\n    import os\n    return os.system('true')", "f()", 0),
    ("def f():\n    import os as o\n    import json as o\n    return o.system", "f()", 0),
    ("def f():\n    import os\n    m = os\n    return m.system('true')", "f()", 0),
    ("def f():\n    import os\n    def g():\n        return os.system('true')\n    return g()", "f()", 0),
    ("def f():\n    return eval('t')", "f()", 0),
    ("def f(n):\n    return getattr(x, n)", "f('real')", 0),
    ("def f():\n    class A:\n        y = t\n    return A", "f()", 0),
    ("def f():\n    return [t for _ in range(1)]", "f()", 0),
    ("def f():\n    global t\n    t = 1", "f()", 0),
    ("def f():\n    try:\n        1 / 0\n    except Exception as e:\n        return e.__traceback__.tb_frame.f_globals", "f()", 0),
    ("async def f():\n    return t", "f().close()", 0),
    ("def f():\n    yield t", "list(f())", 0),
    ("f = tripgpu.Tensor.__len__", "f", 0),
    ("import sys\nclass Out:\n    def write(self, s): tripgpu.touch()\n    def flush(self): pass\nsys.stdout = Out()", "print(1)", 0),
    ("import tripgpu as np2\nmods = [np2]", "mods[0].touch()", 0),
    ("import types\nfake = types.ModuleType('math')\nfake.sin = tripgpu.touch", "fake.sin(1)", 0),
    ("import sys, types\nlazy = types.ModuleType('lazy')\nlazy.__getattr__ = lambda n: tripgpu.touch()\nsys.modules['lazy'] = lazy", "lazy.anything", 0),
    ("import pandas as pd\nd = pd.DataFrame({'a': [1]})\npd.DataFrame.mean = lambda self: tripgpu.touch()", "d.mean()", 0),
    ("import pandas as pd\nsetattr(pd.DataFrame, 'mean', lambda self: tripgpu.touch())\nd = pd.DataFrame({'a': [1]})", "d.mean()", 0),
    ("import pandas as pd\nC = pd.DataFrame\nC.sum = lambda self: tripgpu.touch()\nd = pd.DataFrame({'a': [1]})", "d.sum()", 0),
    ("___ = t\ndel t", "1 + 1", 0),
    ("___ = t\nOut = {1: t}\ndel t", "1 + 1", CPU),
    ("Out = {1: t}", "Out[1]", 0),
    ("_ = t", "_", 0),
    # --- out of reach of the proof, or of the budget: the GPU it is
    ("big = [[i] for i in range(200_000)]", "big[0]", 0),
    ("import io\nf = io.StringIO()", "f.getvalue()", CPU),
    ("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()", "ax.plot([1])", CPU),
    ("import re\np = re.compile('a')", "p.match('a')", CPU),
]  # fmt: skip


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setitem(sys.modules, NAME, make_library())
    stdout = sys.stdout
    notebook = Notebook()
    yield notebook
    sys.stdout = stdout
    sys.modules.pop("lazy", None)
    for module, name, value in _LIBRARY_STATE:
        setattr(module, name, value)


def _library_state() -> list[tuple[object, str, object]]:
    import json

    import numpy as np
    import pandas as pd

    return [
        (np, "mean", np.mean),
        (json, "loads", json.loads),
        (pd.DataFrame, "mean", pd.DataFrame.mean),
        (pd.DataFrame, "sum", pd.DataFrame.sum),
    ]


_LIBRARY_STATE = _library_state()


@pytest.mark.parametrize(("before", "code", "expected"), CASES)
def test_verdict(notebook: Notebook, before: str, code: str, expected: int | None) -> None:
    notebook.run(SETUP)
    if before:
        notebook.run(before)
    verdict = notebook.judge(code)
    found = verdict.first_statement if verdict.gpu else CPU
    assert found == expected, verdict.why
    assert verdict.why


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 150
