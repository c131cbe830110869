"""A fake GPU library that records every use, for tests of the analysis."""

from __future__ import annotations

import ast
import sys
import types
from typing import Any

from kiwi_jupyter.kernel.analysis import Analyzer, Libraries, Verdict

NAME = "tripgpu"

SOURCE = '''
touches = []
def touch(*args, **kwargs):
    touches.append(1)
    return 1
class Tensor:
    """Everything that one can do with it touches the GPU."""
    def __init__(self, *args): touch()
    def __getattr__(self, name):
        if name.startswith("__") or name.startswith("_ipython") or name.startswith("_repr"):
            raise AttributeError(name)
        touch()
        return 1
    def __call__(self, *args, **kwargs): return touch()
    def __del__(self): touch()
    def __enter__(self): touch(); return self
    def __exit__(self, *args): touch()
    def __iter__(self): touch(); return iter([1])
    def __await__(self): touch(); return iter([])
    def __class_getitem__(cls, item): touch(); return cls
for _name in """repr str bytes len bool int float index hash format add radd sub mul matmul eq lt
    getitem setitem contains iadd neg invert abs next reversed""".split():
    def _make(name):
        good = {"repr": "t", "str": "t", "bytes": b"", "len": 1, "bool": True, "int": 1,
                "float": 1.0, "index": 1, "hash": 1, "format": "t", "contains": True}
        def method(self, *args):
            touch()
            if name == "next": raise StopIteration
            if name == "reversed": return iter([1])
            return good.get(name, self)
        return method
    setattr(Tensor, f"__{_name}__", _make(_name))
class Module:
    def __init_subclass__(cls): touch()
class Quiet:
    def __init__(self): touch()
gpu_function = touch
constant = 3
'''


def make_library() -> types.ModuleType:
    module = types.ModuleType(NAME)
    exec(compile(SOURCE, "tripgpu.py", "exec"), module.__dict__)
    return module


class Notebook:
    """A namespace in which cells are judged and then run statement by statement."""

    def __init__(self, analyzer: Analyzer | None = None) -> None:
        self.analyzer = analyzer or Analyzer(Libraries(gpu=frozenset({NAME})))
        main = types.ModuleType("__main__")
        self.space: dict[str, Any] = main.__dict__
        self.space["__builtins__"] = __builtins__
        self.library = sys.modules.get(NAME)

    def judge(self, code: str) -> Verdict:
        """Judge a cell as the cell hook does."""
        self.analyzer._reading.steps(ast.parse(code), (code, 0))
        return self.analyzer.analyse(ast.parse(code), self.space, (code, 0))

    def run(self, code: str) -> Verdict:
        """Judge the code, run it, and raise what it raises."""
        verdict = self.judge(code)
        exec(compile(code, "<cell>", "exec"), self.space)
        return verdict

    def statement_that_touches(self, code: str) -> int | None:
        """Run ``code``; return the index of the first top-level statement that used the library."""
        assert self.library is not None
        touches: list[int] = self.library.touches
        for index, statement in enumerate(ast.parse(code).body):
            before = len(touches)
            try:
                module = ast.Module([statement], [])
                exec(compile(module, "<cell>", "exec"), self.space)
            except Exception:  # noqa: BLE001 - what generated code raises is not the question
                return index if len(touches) > before else None
            if len(touches) > before:
                return index
        return None
