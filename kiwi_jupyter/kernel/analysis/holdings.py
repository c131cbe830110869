"""Find what objects of libraries on the CPU list hold: figures, estimators, progress bars.

The code of such an object stays on the CPU, so it leads to a GPU only by what it holds. That is
followed with ``gc.get_referents``, which runs no code, one layer of objects at a time. The walk
ends at modules, classes and functions of trusted libraries, whose state is trusted. The ``Judge``
decides about objects that are not from a library.
"""

from __future__ import annotations

import _thread
import functools
import gc
import logging
import re
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis import data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_jupyter.kernel.analysis.libraries import Libraries

OBJECTS_MAX: Final = 20_000
"""Most objects checked for one cell, at a microsecond each. A figure with two histograms holds
8,000.
"""

_PASSIVE: Final = frozenset(
    {object, types.CodeType, logging.Logger, logging.RootLogger, logging.Manager, re.Pattern}
    | {_thread.LockType, _thread.RLock, types.GetSetDescriptorType, types.MemberDescriptorType}
    | {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType}
)
"""Objects that lead nowhere. A logger leads to the handlers of the whole process, which are
trusted.
"""

_CONTAINERS: Final = frozenset(
    {list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict, slice, property}
    | {types.MappingProxyType, types.CellType, types.MethodType, types.MethodWrapperType}
    | {types.SimpleNamespace, types.GenericAlias, functools.partial, staticmethod, classmethod}
    | {type(iter([])), type(iter(())), type(iter({})), type({}.keys()), type({}.values())}
    | {type({}.items()), zip, map, filter, enumerate, reversed, functools.cached_property}
)

_QUIET_MODULES: Final = (
    "weakref", "_weakrefset", "threading", "_thread", "inspect", "contextvars", "_contextvars",
    "multiprocessing.synchronize", "multiprocessing.context", "_multiprocessing", "types", "abc",
    "encodings", "codecs", "ipykernel.iostream",
)  # fmt: skip
"""Modules of classes whose objects only hold data and show it."""

_ENDS: Final = frozenset({"ipykernel.iostream.OutStream", "IPython.utils.capture.CapturedIO"})
"""Objects that hold the kernel, with everything in it, but only write."""

_KERNELS: Final = ("IPython.", "ipykernel.")
"""Modules whose functions write or display, although they hold the kernel with everything in it."""

_OPAQUE: Final = ("pyarrow", "tokenizers", "h5py", "lxml", "PIL._", "zmq")
"""Modules whose objects hold what Python cannot see: memory of other libraries, callbacks."""

CALLBACKS: Final = frozenset(
    """
    create_function create_aggregate create_window_function create_collation set_authorizer
    set_progress_handler set_trace_callback register_adapter register_converter
    """.split()
)
"""Methods that give a function to an object that does not show it (SQLite's)."""

_REFUSED: Final = frozenset(
    {types.FrameType, types.TracebackType, types.GeneratorType, types.CoroutineType}
    | {types.AsyncGeneratorType}
)

_FOLLOW, _END, _ASK = "follow", "end", "ask"


class Holdings:
    """The walk for one cell. ``value`` judges objects that are not from a library. ``callbacks``:
    some code may have given functions to objects that do not show them (``CALLBACKS``).
    """

    def __init__(
        self,
        libraries: Libraries,
        value: Callable[[object], str | None],
        *,
        callbacks: bool = False,
    ) -> None:
        self._callbacks = callbacks
        self._libraries = libraries
        self._value = value
        self._kinds: dict[type, str] = {}
        self._looked_at = 0
        self._root: object = None
        self._seen: set[int] = set()
        """Objects that are harmless if the object under test is."""

    def why_not(self, value: object) -> str | None:
        """Return why ``value`` may lead to a GPU; ``None`` if it cannot."""
        outer, self._root = self._root, value
        try:
            return self._walk(value)
        finally:
            self._root = outer

    def _walk(self, value: object) -> str | None:
        seen = self._seen
        seen.add(id(value))
        layer: list[Any] = [value]
        while layer:
            self._looked_at += len(layer)
            behind, why = self._behind(layer)
            if self._looked_at > OBJECTS_MAX:
                why = "it leads to too many objects to look at"
            if why is not None:
                seen.clear()  # the objects on this path are not known to be harmless
                return f"it is a {data.name_of(type(value))}, and it holds something: {why}"
            layer = []
            for item in behind:
                if type(item) not in data.LEAVES and id(item) not in seen:
                    seen.add(id(item))
                    layer.append(item)
        return None

    def _behind(self, layer: list[Any]) -> tuple[Iterable[Any], str | None]:
        """Return what the objects of one layer hold."""
        follow: list[Any] = []
        more: list[Any] = []
        for item in layer:
            kind = type(item)
            how = self._kinds.get(kind)
            if how is None:
                how = self._kinds[kind] = self._how(kind)
            if how is _FOLLOW:
                follow.append(item)
                if weakref.getweakrefcount(item):
                    more += end_callbacks(item)
            elif how is _ASK:
                held, why = self._ask(item, kind)
                if why is not None:
                    return (), why
                more += held
        return gc.get_referents(*follow) + more, None

    def _how(self, kind: type) -> str:
        if kind in _PASSIVE or data.is_plain(kind) or data.name_of(kind) in _ENDS:
            return _END
        if kind in _CONTAINERS:
            return _FOLLOW
        if kind in _REFUSED or issubclass(kind, (type, types.ModuleType, weakref.ref)):
            return _ASK
        module = kind.__module__ if isinstance(kind.__module__, str) else ""
        if kind.__flags__ & _HAS_REFERENTS == 0 or self._has_its_own_way(module, kind):
            return _ASK
        if module == "sqlite3" and self._callbacks:
            return _ASK
        trusted = module.startswith(_QUIET_MODULES) or self._is_allowed(module, kind)
        return _FOLLOW if trusted else _ASK

    def _is_allowed(self, module: str, kind: type) -> bool:
        if not self._libraries.is_trusted(module):
            return False
        return self._libraries.allows_origin(module, kind.__qualname__.partition(".")[0])

    @staticmethod
    def _has_its_own_way(module: str, kind: type) -> bool:
        """Return the objects that the judge knows, and those that nobody can inspect."""
        if kind in (types.FunctionType, types.BuiltinFunctionType) or _is_opaque(kind):
            return True
        return kind.__name__ in _JUDGED and module.partition(".")[0] in ("numpy", "pandas")

    def _ask(self, item: Any, kind: type) -> tuple[list[Any], str | None]:
        """Return what an object of an unknown kind holds, and why it may itself lead to a GPU."""
        if issubclass(kind, weakref.ref):
            return [weakref.ref.__call__(item)], None
        if issubclass(kind, types.ModuleType):
            return [], self._module(vars(item).get("__name__"))
        if issubclass(kind, type):
            return self._class(item)
        if kind in (types.FunctionType, types.BuiltinFunctionType):
            return self._function(item, kind)
        if kind.__name__ == "ndarray" and item.dtype.kind == "O":
            return item.ravel().tolist(), None
        if kind.__name__ == "NpzFile":
            why = "a file that is unpickled when it is read" if item.allow_pickle else None
            return gc.get_referents(item), why
        return [], self._other(item, kind)

    def _function(self, function: Any, kind: type) -> tuple[list[Any], str | None]:
        if kind is types.BuiltinFunctionType:
            if _is_of_module(function):
                return [], self._module(function.__module__)
            return [function.__self__], None
        if not self._of_library(function):
            return [], self._value(function)
        if isinstance(function.__module__, str) and function.__module__.startswith(_KERNELS):
            return [], None
        parts = (function.__closure__, function.__defaults__, function.__kwdefaults__)
        return [part for part in (*parts, function.__dict__) if part], None

    def _other(self, item: Any, kind: type) -> str | None:
        if kind in _REFUSED:
            return f"a running {kind.__name__}"
        if kind.__module__ == "sqlite3" or _is_opaque(kind):
            return f"it is a {data.name_of(kind)}, and nobody can see what that holds"
        if self._is_bare(kind):
            return None
        if item is self._root:  # the judge called this, so it cannot be called again
            return f"it is a {data.name_of(kind)}, which may hold anything"
        return self._value(item)

    def _is_bare(self, kind: type) -> bool:
        """Return whether it is an object of a library that cannot hold others."""
        module = kind.__module__
        bare = kind.__flags__ & _HAS_REFERENTS == 0 and not self._has_its_own_way(module, kind)
        return bare and kind.__name__ != "void" and self._is_allowed(module, kind)

    def _module(self, name: object) -> str | None:
        if isinstance(name, str) and (_is_stdlib(name) or self._libraries.is_trusted(name)):
            return None
        return f"the module {name}"

    def _class(self, cls: Any) -> tuple[list[Any], str | None]:
        """Return the class of ``value``. A class that a library creates on the fly is not found
        under its own name.
        """
        if _is_stdlib(cls.__module__) and cls.__module__ != "builtins":
            return [], None
        why = self._value(cls)
        if why is None or not self._libraries.is_trusted(cls.__module__):
            return [], why
        return [*vars(cls).values(), *cls.__bases__], None

    def _of_library(self, function: Any) -> bool:
        module = function.__globals__.get("__name__")
        loaded = sys.modules.get(module) if isinstance(module, str) else None
        if loaded is None or vars(loaded) is not function.__globals__:
            return False
        if _is_stdlib(module) or module.startswith(_QUIET_MODULES):
            return True
        return self._libraries.is_trusted(module)


_HAS_REFERENTS: Final = 1 << 14
"""``Py_TPFLAGS_HAVE_GC``: the type reports what its objects hold."""

_JUDGED: Final = frozenset(
    "ndarray ufunc DataFrame Series Index MultiIndex CategoricalIndex NpzFile memmap".split()
)


def end_callbacks(value: object) -> list[Any]:
    """Return the functions that are called when ``value`` is freed."""
    called: list[Any] = []
    for reference in weakref.getweakrefs(value):
        callback = getattr(reference, "__callback__", None)
        if type(callback) is weakref.finalize:
            called += (callback.peek() or ())[1:]
        elif callback is not None:
            called.append(callback)
    return called


def _is_opaque(kind: type) -> bool:
    return isinstance(kind.__module__, str) and kind.__module__.startswith(_OPAQUE)


def _is_stdlib(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _is_of_module(function: Any) -> bool:
    return function.__self__ is None or type(function.__self__) is types.ModuleType
