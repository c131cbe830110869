"""Decide whether a value stays on the CPU, whatever is done with it.

``Judge.value`` answers with ``None`` (it does) or with the reason why that cannot be proved, as the
end of a sentence about it: "it is a torch.nn.Linear". It looks at exact types and at the contents
of ``__dict__``. It never calls, compares or prints a value.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis import data
from kiwi_jupyter.kernel.analysis.from_code import needs_of_code
from kiwi_jupyter.kernel.analysis.holdings import Holdings
from kiwi_jupyter.kernel.analysis.libraries import SAFE_BUILTINS, Libraries
from kiwi_jupyter.kernel.analysis.names import FunctionNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_jupyter.kernel.analysis.check import Checker

STEPS_MAX: Final = 4_000
"""Most values checked for one cell: keeps the decision to a few milliseconds."""

ORIGINAL_BUILTINS: Final = dict(vars(builtins))
"""The builtins as they were when Kiwi was loaded, before the user's first cell."""

ASKS: Final = frozenset({"raw_input", "getpass"})
"""The kernel's methods that replace ``input`` and ``getpass`` in ipykernel."""

_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MAPPINGS: Final = (dict, OrderedDict, Counter, defaultdict, types.MappingProxyType)
_DESCRIPTORS: Final = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_MISSING: Final = object()


_CYTHON_FUNCTION: Final = "cython_function_or_method"


class Judge:
    """Judges values for one cell, in their current state. Not thread-safe."""

    def __init__(
        self, libraries: Libraries, checker: Checker, *, clean: bool, callbacks: bool = False
    ) -> None:
        self._libraries = libraries
        self._checker = checker
        self._clean = clean
        self._holdings = Holdings(libraries, self.value, callbacks=callbacks)
        self._known: dict[int, str | None] = {}
        self._keep: list[object] = []
        self._depth = 0
        self._steps = 0

    def forget(self) -> None:
        """Drop all references to the objects that were checked."""
        self._known.clear()
        self._keep.clear()

    def value(self, value: object) -> str | None:
        """Return why ``value`` may lead to a GPU; ``None`` if it cannot."""
        kind = type(value)
        if kind in data.LEAVES:
            return None
        key = id(value)
        if key in self._known:
            return self._known[key]
        self._steps += 1
        if self._steps > STEPS_MAX:
            return "it leads to too many objects to look at"
        if self._depth == 0:
            return self._outermost(value, kind)
        return self._nested(value, kind)

    def _outermost(self, value: object, kind: type) -> str | None:
        """Judge a value that may be part of a cycle. It counts as harmless until the end. If it is
        not harmless, forget all values that were found harmless because of it.
        """
        before = set(self._known)
        try:
            why = self._nested(value, kind)
        except RecursionError:
            why = "it is nested too deeply"
        if why is not None:
            for key in self._known.keys() - before:
                del self._known[key]
        return why

    def _nested(self, value: object, kind: type) -> str | None:
        self._known[id(value)] = None
        self._keep.append(value)
        self._depth += 1
        try:
            why = self._look(value, kind)
        finally:
            self._depth -= 1
        self._known[id(value)] = why
        return why

    def _look(self, value: Any, kind: type) -> str | None:
        if kind is types.ModuleType:
            return "it is a module passed around as a value"
        if issubclass(kind, type):
            return self._class(value)
        looker = _LOOKERS.get(kind)
        if looker is not None:
            return looker(self, value)
        if self._clean or data.is_plain(kind):
            return None
        return self._library_data(value, kind)

    def _library_data(self, value: Any, kind: type) -> str | None:
        module = kind.__module__ if isinstance(kind.__module__, str) else ""
        name = f"{module}.{kind.__qualname__}"
        if self._libraries.is_gpu(module):
            return f"it is a {name}, which may use the GPU"
        # Not by its __module__: in Cython 3.1 (numpy 2.2) that is the attribute of its instances.
        if type.__repr__(kind).startswith("<class '_cython") and kind.__name__ == _CYTHON_FUNCTION:
            return self._compiled(value)
        if not self._libraries.is_trusted(module):
            return self._instance(value, kind)
        top = sys.modules.get(module.partition(".")[0])
        space = top.__dict__ if top is not None else {}
        try:
            if name == "numpy.ndarray" and space.get("ndarray") is kind:
                return data.why_not_array(value, self.value)
            if name == "numpy.ufunc" and space.get(value.__name__) is value:
                return None
            if module.partition(".")[0] == "pandas":
                return self._pandas(value, kind, space)
        except Exception as error:  # noqa: BLE001 - a half-built frame may raise anything
            return f"looking at it failed ({type(error).__name__})"
        return self._holdings.why_not(value)

    def _compiled(self, function: Any) -> str | None:
        """Check a function compiled by Cython, which is as trusted as the library that it is
        from.
        """
        module = function.__module__
        if isinstance(module, str) and self._libraries.is_trusted(module):
            return self._trusted_origin(module, function.__name__)
        return f"it is a function of {module}, which is not known to stay on the CPU"

    def _pandas(self, value: Any, kind: type, space: dict[str, Any]) -> str | None:
        if kind in (space.get("DataFrame"), space.get("Series")):
            return data.why_not_frame(value, self.value)
        if kind in (space.get("Index"), space.get("MultiIndex"), space.get("CategoricalIndex")):
            return data.why_not_index(value, self.value)
        return self._holdings.why_not(value)

    # --- containers and wrappers

    def _sequence(self, value: Any) -> str | None:
        return data.why_not_elements(value, len(value), self.value)

    def _mapping(self, value: Any) -> str | None:
        if type(value) is defaultdict and value.default_factory is not None:
            why = self.value(value.default_factory)
            if why is not None:
                return why
        count = len(value)
        keys = data.why_not_elements(list(value.keys()), count, self.value)
        if keys is not None:
            return keys
        return data.why_not_elements(list(value.values()), count, self.value)

    def _all(self, *values: object) -> str | None:
        for value in values:
            why = self.value(value)
            if why is not None:
                return why
        return None

    def _slice(self, value: slice) -> str | None:
        return self._all(value.start, value.stop, value.step)

    def _partial(self, value: Any) -> str | None:
        return self._all(value.func, value.args, value.keywords, value.__dict__)

    def _method(self, value: Any) -> str | None:
        if value.__func__.__module__ == "ipykernel.kernelbase" and value.__name__ in ASKS:
            return None
        return self._all(value.__func__, value.__self__)

    def _property(self, value: Any) -> str | None:
        return self._all(value.fget, value.fset, value.fdel)

    def _wrapper(self, value: Any) -> str | None:
        return self._all(value.__func__)

    # --- functions

    def _function(self, function: Any) -> str | None:
        space = function.__globals__
        module = space.get("__name__")
        if isinstance(module, str):
            loaded = sys.modules.get(module)
            if self._libraries.is_gpu(module):
                return f"it is a function of {module}, which may use the GPU"
            if self._libraries.is_other_stdlib(module):
                return f"it is a function of {module}, which can lead anywhere"
            if self._libraries.is_trusted(module) and loaded and loaded.__dict__ is space:
                why = self._trusted_origin(module, function.__name__)
                made_there = self._clean or self._is_where_it_says(function, function.__module__)
                return why or (None if made_there else self._holdings.why_not(function))
        if self._clean:
            return None
        names = FunctionNames(space, function)
        fault = self._checker.check(needs_of_code(function.__code__), names)
        if fault is not None:
            return f"it is a function that reaches `{fault.subject}`, and {fault.why}"
        return self._all(function.__defaults__, function.__kwdefaults__, function.__dict__)

    def _trusted_origin(self, module: str, name: str) -> str | None:
        if self._libraries.allows_origin(module, name):
            return None
        return f"{module}.{name} can lead anywhere"

    def _builtin(self, function: Any) -> str | None:
        owner = function.__self__
        name = function.__name__
        if owner is builtins or (owner is None and function.__module__ == "builtins"):
            if ORIGINAL_BUILTINS.get(name) is function and name in SAFE_BUILTINS:
                return self._print() if name == "print" else None
            return f"the builtin {name} can lead anywhere"
        if type(owner) is types.ModuleType or owner is None:
            module = owner.__name__ if owner is not None else function.__module__
            if isinstance(module, str) and self._libraries.is_trusted(module):
                return self._trusted_origin(module, name)
            return f"it is a function of {module}, which is not known to stay on the CPU"
        if issubclass(type(owner), type):
            return self._class(owner)
        return self.value(owner)

    def _print(self) -> str | None:
        stream = type(sys.stdout)
        module = stream.__module__.partition(".")[0]
        if module in ("ipykernel", "IPython", "_io", "io", "prompt_toolkit", "_pytest"):
            return None
        return f"sys.stdout is a {stream.__module__}.{stream.__qualname__}"

    def _descriptor(self, value: Any) -> str | None:
        return self._class(value.__objclass__)

    # --- classes and their instances

    def _class(self, cls: type) -> str | None:
        module = cls.__module__ if isinstance(cls.__module__, str) else ""
        if module == "builtins" and ORIGINAL_BUILTINS.get(cls.__name__) is cls:
            return None
        if cls is types.ModuleType or cls in _BUILTIN_KINDS:
            return None if cls is not types.FunctionType else "it makes functions out of code"
        if self._libraries.is_gpu(module):
            return f"it is the class {module}.{cls.__qualname__}, which may use the GPU"
        if self._libraries.is_trusted(module) and self._is_where_it_says(cls, module):
            return self._trusted_origin(module, cls.__qualname__.partition(".")[0])
        if self._libraries.is_other_stdlib(module):
            return f"it is the class {module}.{cls.__qualname__}, which can lead anywhere"
        if self._clean:
            return None
        return self._checker.classes.why_not_class(cls, self)

    def _is_where_it_says(self, made: Any, module: object) -> bool:
        """Return whether a class or function is the library's own, and not one that the library
        made for its caller (as a decorator does).
        """
        if not isinstance(module, str) or not self._libraries.is_trusted(module):
            return False
        found: object = sys.modules.get(module)
        for part in made.__qualname__.split("."):
            space = getattr(found, "__dict__", {})
            found = space.get(part, _MISSING)
        return getattr(found, "__func__", found) is made

    def _instance(self, value: Any, kind: type) -> str | None:
        return self._checker.classes.why_not_instance(value, kind, self)


_BUILTIN_KINDS: Final = frozenset(
    {types.FunctionType, types.MethodType, types.GenericAlias, types.SimpleNamespace}
    | {type(None), type(...), type(NotImplemented), types.UnionType}
)

_LOOKERS: Final[dict[type, Callable[[Judge, Any], str | None]]] = {
    **dict.fromkeys(_SEQUENCES, Judge._sequence),
    **dict.fromkeys(_MAPPINGS, Judge._mapping),
    **dict.fromkeys(_DESCRIPTORS, Judge._descriptor),
    slice: Judge._slice,
    functools.partial: Judge._partial,
    types.MethodType: Judge._method,
    property: Judge._property,
    staticmethod: Judge._wrapper,
    classmethod: Judge._wrapper,
    types.FunctionType: Judge._function,
    types.BuiltinFunctionType: Judge._builtin,
    types.MethodWrapperType: lambda judge, value: judge.value(value.__self__),
    types.SimpleNamespace: lambda judge, value: judge.value(value.__dict__),
}
