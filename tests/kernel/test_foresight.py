"""Tests of the forecast whether a cell goes for the GPU.

PyTorch, JAX and their like are too large to install here. Stand-ins have what the forecast looks
at: the names of modules, classes and functions, and where a tensor is.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from kiwi_jupyter.kernel.foresight import Forecaster, Foreseen, Libraries
from kiwi_jupyter.kernel.foresight.forecast import NO_TIME, NOTHING, WITHIN_NS
from kiwi_jupyter.kernel.foresight.plain import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_NS = 10**11
"""So that a busy machine changes no forecast of a test."""

TORCH = """
class Tensor:
    def __init__(self, on_gpu=False): self._on_gpu = on_gpu
    is_cuda = property(lambda self: self._on_gpu)
class device:
    def __init__(self, type): self.type = type
class dtype: pass
float16 = dtype()
def randn(*shape, device=None): return Tensor()
def manual_seed(seed): pass
"""

NN = """
class Module:
    def __init__(self): self._parameters, self._buffers, self._modules = {}, {}, {}
    def to(self, device): return self
    def __call__(self, *args): return self.forward(*args)
class Linear(Module):
    def __init__(self, n=1):
        super().__init__()
        import torch
        self._parameters["weight"] = torch.Tensor(n < 0)
"""

CUDA = "def is_available(): return True\ndef synchronize(): pass\n"

LIBRARIES = {
    "torch": TORCH,
    "torch.nn": NN,
    "torch.cuda": CUDA,
    "torch.optim": "class Optimizer: pass",
    "jax": "def jit(f): return f\ndef device_put(x): return x\n",
    "jax.numpy": "def ones(n): return Array()\nclass Array: pass\n",
    "cupy": "def zeros(n): return ndarray()\nclass ndarray: pass\nfloat32 = float\n",
    "numba": "",
    "numba.cuda": "def jit(f): return f\ndef to_device(x): return x\n",
    "transformers": "class Trainer:\n    def train(self): pass\ndef pipeline(task): pass\n",
}

SETUP = """
import torch, jax, cupy as cp, numpy as np, functools
import jax.numpy as jnp
from torch import nn
from numba import cuda
from transformers import Trainer, pipeline
device, host = torch.device("cuda"), torch.device("cpu")
here, there = torch.Tensor(False), torch.Tensor(True)
net, moved = nn.Linear(1), nn.Linear(-1)
nested = nn.Module()
nested._modules["a"] = moved
a = cp.ndarray()
numbers, names, batch = [1, 2], {"a": "b"}, [there, there]
trainer = Trainer()
class Box:
    def __init__(self, what): self.what, self.steps = what, 1
    def go(self): return self.what.cuda()
    def rest(self): return 1
    def twice(self): return [self.go(), self.go()]
full, empty = Box(there), Box(here)
class Job(Trainer): pass
job = Job()
def moves(x): return x.to(device)
def says(): return torch.randn(2, device="cuda")
def calls(): return moves(here)
def counts(): return cp.zeros(3)
def host_only(x): return x.to(host)
def looks(): return "cuda" if torch.cuda.is_available() else "cpu"
def pure(x): return x + 1
def with_device(x, device): return x.to(device)
later = functools.partial(says)
"""


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, source in LIBRARIES.items():
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, vars(module))
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, found)
    return found


def foresee(
    code: str,
    space: dict[str, Any],
    *,
    within_ns: int = LONG_NS,
    libraries: Libraries | None = None,
) -> Foreseen:
    transform = TransformerManager().transform_cell
    text = transform(code)
    forecaster = Forecaster(libraries, transform=transform, within_ns=within_ns)
    return forecaster.foresee(ast.parse(text), space, text)


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        "import torch",
        "import cudf, cuml",
        "torch.manual_seed(0)",
        "len(batch)",
        "torch.nn.Linear",
        "net2 = nn.Linear(2)",
        "torch.randn(3)",
        "torch.randn(3, device='cpu')",
        "torch.cuda.is_available()",
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "here.to('cpu')",
        "here.to(host)",
        "net.to(torch.float16)",
        "net(here)",
        "dev = 'cpu'\nnet.to(dev)",
        "there.shape, there.dtype, moved.training",
        "other = there",
        "there is None",
        "isinstance(there, torch.Tensor)",
        "@jax.jit\ndef f(x): return x",
        "jax.jit(pure)",
        "@cuda.jit\ndef kernel(a): pass",
        "def f(): return there.cuda()",
        "f = lambda x: x.cuda()",
        "class A(nn.Module):\n    def forward(self, x): return x.cuda()",
        "host_only(here)",
        "looks()",
        "pure(1)",
        "empty.rest()",
        "full.steps",
        "numbers, names",
        "x: torch.Tensor = here",
        "cp.float32",
        "!python train.py --device cuda",
        "%matplotlib inline",
        "%%bash\nnvidia-smi",
        "del there",
        "[i for i in range(3)]",
        "import torch.nn.functional as F",
        "names.get('to')",
        "sum(there for there in range(3))",
        "for there in range(3): print(there)",
        "there, y = 1, 2\nprint(there + y)",
        "if 1:\n    there = 3\nprint(there)",
        "with open('f') as there: there.read()",
        "try: 1 / 0\nexcept ZeroDivisionError as there: print(there)",
        "there: int = 3\nprint(there)",
        "def f(there): return there + 1\nf(2)",
        "batch.append(1)",
        "names['x'] = 1",
        "batch[0] = 1",
        "here.to('meter')",
        "here.to(numbers)",
        "here.to(here.device)",
    ],
)
def test_cells_that_run_at_once(code: str, space: dict[str, Any]) -> None:
    found = foresee(code, space)
    assert (found.gpu, found.why) == (False, NOTHING)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("net.to(device)", "line 1: `.to(device)`"),
        ("net.to('cuda:0')", "line 1: `.to('cuda:0')`"),
        ("x = 1\nnet.cuda()", "line 2: `.cuda(`"),
        ("torch.randn(3, device='cuda')", "line 1: `device='cuda'`"),
        ("torch.cuda.synchronize()", "line 1: `torch.cuda.synchronize(`"),
        ("there + 1", "line 1: `there`: it is a tensor on the GPU"),
        ("there", "line 1: `there`: it is a tensor on the GPU"),
        ("print(f'{there}')", "line 1: `there`: it is a tensor on the GPU"),
        ("batch[0]", "line 1: `batch`: it is a tensor on the GPU"),
        ("moved(here)", "line 1: `moved(`: its parameters are on the GPU"),
        ("nested(here)", "line 1: `nested(`: its parameters are on the GPU"),
        ("full.what", "line 1: `full.what`: it is a tensor on the GPU"),
        ("jnp.ones(3)", "line 1: `jnp.ones(`"),
        ("import jax.numpy as j\nj.ones(3)", "line 2: `j.ones(`"),
        ("from jax.numpy import ones\nones(3)", "line 2: `ones(`"),
        ("cp.zeros(3)", "line 1: `cp.zeros(`"),
        ("a.sum()", "line 1: `a.sum(`: it is a cupy.ndarray"),
        ("cuda.to_device([1])", "line 1: `cuda.to_device(`"),
        ("pipeline('summarization')", "line 1: `pipeline(`"),
        (
            "trainer.train()",
            "it is a transformers.Trainer, which works on the GPU",
        ),
        ("job.train()", "line 1: `job.train(`: it is a __main__.Job, which works on the GPU"),
        ("moves(here)", "line 1: `moves(` says `.to(device)`"),
        ("says()", 'line 1: `says(` says `"cuda"`'),
        ("later()", 'line 1: `later(` says `"cuda"`'),
        ("calls()", "line 1: `calls(` reaches"),
        ("counts()", "line 1: `counts(` reaches `cp`"),
        ("full.go()", "line 1: `full.go(`: it is a tensor on the GPU"),
        ("empty.twice()", "line 1: `empty.twice(` reaches `go(` says `cuda`"),
        ("empty.go()", "line 1: `empty.go(` says `cuda`"),
        ("with_device(here, device)", "line 1: `with_device(` says"),
        ("def f(): return here.cuda()\nf()", "line 1: `f(` reaches `.cuda(`"),
        ("f = lambda: here.cuda()\nf()", "line 1: `f(` reaches `.cuda(`"),
        ("if True:\n    for i in range(2):\n        net.to(device)", "line 3: `.to(device)`"),
        ("%time net.to(device)", "line 1: `.to(device)`"),
        ("%%time\nnet.to(device)", "`.to(device)`"),
        ("%%timeit -n 3 x = 1\nnet.to(device)", "`.to(device)`"),
        ("with torch.no_grad():\n    moved(here)", "line 2: `moved(`"),
        ("there += 1", "line 1: `there`: it is a tensor on the GPU"),
        ("m = moved\nm(here)", "line 2: `m(`: its parameters are on the GPU"),
        (
            "if torch.cuda.is_available(): dev = 'cuda'\nelse: dev = 'cpu'\nnet.to(dev)",
            "line 3: `.to(dev)`",
        ),
        ("def load(): moved = 1; return moved\nload(); moved(3)", "line 2: `moved(`"),
        ("net.to(0)", "line 1: `.to(0)`"),
        ("for dev in ['cpu', 'cuda']: net.to(dev)", "`.to(dev)`"),
        ("dev = 'cuda'\nnet.to(dev)", "line 2: `.to(dev)`"),
    ],
)
def test_cells_that_go_for_the_gpu(code: str, why: str, space: dict[str, Any]) -> None:
    found = foresee(code, space)
    assert found.gpu, found.why
    assert why in found.why


def test_the_wait_comes_before_the_statement_that_needs_it(space: dict[str, Any]) -> None:
    found = foresee("x = 1\ny = 2\nnet.cuda()\nthere + 1", space)
    assert (found.gpu, found.first_statement) == (True, 2)


def test_a_script_is_looked_at(space: dict[str, Any], tmp_path: Any) -> None:
    script = tmp_path / "a.py"
    script.write_text("import cupy\ncupy.zeros(3)\n")
    assert "cupy.zeros(" in foresee(f"%run {script}", space).why
    script.write_text("x = 1\n")
    assert not foresee(f"%run {script}", space).gpu
    assert not foresee("%run /nowhere/a.py", space).gpu


def test_a_users_lists(space: dict[str, Any]) -> None:
    assert not foresee("cp.zeros(3)", space, libraries=Libraries(cpu=frozenset({"cupy"}))).gpu
    mine = Libraries(gpu=frozenset({"mine"}))
    assert foresee("import mine\nmine.run()", space, libraries=mine).gpu


class Link:
    """A linked list."""

    def __init__(self, after: Link | None) -> None:
        self.after = after


def chain(length: int) -> Link | None:
    found = None
    for _ in range(length):
        found = Link(found)
    return found


@functools.cache
def cached(n: int) -> int:
    return n


class Raises:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain(5_000),
        lambda: list(range(1_000_000)),
        lambda: {i: {j: [j] for j in range(100)} for i in range(1_000)},
        lambda: [cached, *map(cached, range(20_000))][0],
        Raises,
        type("NoDict", (), {"__dict__": property(lambda _self: 1 / 0)}),
    ],
    ids=["linked-list", "long-list", "nested-dicts", "cache", "raises", "no-dict"],
)
def test_no_object_breaks_a_forecast(make: Callable[[], Any], space: dict[str, Any]) -> None:
    space["value"] = make()
    for code in ("value", "value.x", "value(1)", "print(value)"):
        assert not foresee(code, space, within_ns=WITHIN_NS).gpu


class Meta(type):
    """Runs code of its user's when its classes are compared or read."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(cls) -> int:
        raise AssertionError("hashed")

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(name)


def lazy_module() -> ModuleType:
    spec = importlib.util.find_spec("this")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "make", [lazy_module, lambda: Meta("A", (), {}), lambda: type.__call__(Meta("A", (), {}))]
)
def test_nothing_of_the_users_runs(make: Callable[[], Any], space: dict[str, Any]) -> None:
    value = space["value"] = make()
    for code in ("value", "value.x", "value(1)", "value.x.y(1)", "f = lambda: value\nf()"):
        assert not foresee(code, space).gpu
    assert is_plain(ast.parse("value"), space, Libraries()) in (True, False)
    if make is lazy_module:
        assert type(value) is not ModuleType, "it has not been loaded"


@pytest.mark.parametrize(
    "code",
    ["f(" * 90 + ")" * 90, "x = " + "1 + " * 500 + "1", "\n".join(["y = pure(1)"] * 4_000)],
    ids=["nested-calls", "long-sum", "long-cell"],
)
def test_no_cell_breaks_a_forecast(code: str, space: dict[str, Any]) -> None:
    assert not foresee(code, space, within_ns=WITHIN_NS).gpu


def test_what_is_not_known_in_time_is_not_foreseen(space: dict[str, Any]) -> None:
    found = foresee("net.to(device)", space, within_ns=-1)
    assert (found.gpu, found.why) == (False, NO_TIME)


PLAIN_WORK = """
import math
def total(pairs): return sum(second for _, second in pairs)
rows, rest = [(1, 2.0), (3, 4.0)], [here]
def reaches(x): return full.what
def other_reaches(x): return total(x) + reaches(x)
def kept(x, y=there): return y
"""


@pytest.mark.parametrize(
    ("code", "enough"),
    [
        ("print(total(rows), math.sqrt(2))\nrows[-1]", True),
        ("total(rest)", False),
        ("reaches(1)", False),
        ("other_reaches(1)", False),
        ("kept(1)", False),
    ],
)
def test_a_glance_is_enough_for_plain_work(code: str, enough: bool, space: dict[str, Any]) -> None:
    """Beside a GPU, too. (There is no time for more than a glance here.)"""
    exec(PLAIN_WORK, space)
    assert foresee(code, space, within_ns=0).why == (NOTHING if enough else NO_TIME)


def test_a_look_keeps_nothing(space: dict[str, Any]) -> None:
    counts = sys.getrefcount(space["there"]), sys.getrefcount(space)
    foresee("x = there\nprint(there)", space)
    foresee("pure(there)", space)
    assert (sys.getrefcount(space["there"]), sys.getrefcount(space)) == counts


def test_without_a_library_for_gpus_no_cell_is_looked_at() -> None:
    """So nothing of it is read: not even the namespace."""
    text = "print(anything + 1)"
    if not Libraries().any_loaded():
        assert Forecaster().foresee(ast.parse(text), None, text).why == NOTHING  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "plain"),
    [
        ("import numpy as np\nnp.zeros(3)", True),
        ("x = 1\nprint(numbers, names)", True),
        ("np.zeros(2) + 1", True),
        ("import some_unknown_library", False),
        ("import torch", False),
        ("pure(1)", False),
        ("there", False),
        ("full", False),
        ("exec('x')", False),
        ("import subprocess", False),
        ("from . import x", False),
        ("get_ipython().system('ls')", False),
        ("\n".join(["x = 1"] * 2_000), False),
    ],
)
def test_plain_data_work(code: str, plain: bool, space: dict[str, Any]) -> None:
    assert is_plain(ast.parse(code), space, Libraries()) is plain
