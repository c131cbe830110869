"""Whether an object holds GPU memory, or leads to code that goes for the GPU.

Nothing of the user's runs: no property, no ``__getattr__`` of a lazy module, no metaclass. Types
are compared by identity, and read with ``type``'s own descriptors.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.libraries import GPU_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_jupyter.kernel.foresight.libraries import Libraries

ELEMENTS_MAX: Final = 16
"""Most elements to look at in one container: a list of tensors begins with a tensor."""

DEPTH_MAX: Final = 4

_PLAIN: Final = frozenset(
    map(id, (int, float, complex, bool, str, bytes, bytearray, type(None), range, slice, type(...)))
)
_SEQUENCES: Final = frozenset(map(id, (list, tuple, set, frozenset)))
_DICTS: Final = frozenset(map(id, (dict, OrderedDict)))

_module: Final[Any] = type.__dict__["__module__"].__get__
_name: Final[Any] = type.__dict__["__name__"].__get__
_mro: Final[Any] = type.__dict__["__mro__"].__get__
_class_names: Final[Any] = type.__dict__["__dict__"].__get__
_module_names: Final[Any] = vars(ModuleType)["__dict__"].__get__


def is_plain(value: object) -> bool:
    """Return whether a value is data that holds nothing else."""
    return id(type(value)) in _PLAIN


def is_container(value: object) -> bool:
    kind = id(type(value))
    return kind in _SEQUENCES or kind in _DICTS


def is_module(value: object) -> bool:
    return _is_based_on(type(value), ModuleType)


def is_class(value: object) -> bool:
    return _is_based_on(type(value), type)


def _is_based_on(kind: type, base: object) -> bool:
    """Do as ``issubclass``, by identity: a metaclass may compare in its own way."""
    return base is not None and any(one is base for one in _mro(kind))


def names_of(module: object) -> dict[str, Any]:
    """Return the names of a module, without loading a lazy one."""
    found = _module_names(module)
    return found if type(found) is dict else {}


def module_of(kind: type) -> str:
    """Return the module that a class says it is from; "": it does not say."""
    found = _module(kind)
    return found if type(found) is str else ""


def name_of(module: object) -> str:
    found = names_of(module).get("__name__")
    return found if type(found) is str else ""


class Values:
    """Looks at values for one cell. ``on_time`` returns false when the time is over; then nothing
    more is found."""

    def __init__(self, libraries: Libraries, on_time: Callable[[], bool]) -> None:
        self._libraries = libraries
        self._on_time = on_time
        self._seen: set[int] = set()

    def holds(self, value: Any, depth: int = 0) -> str:
        """Return what of a GPU ``value`` holds, in words; "": nothing that is known in time."""
        kind = type(value)
        if is_plain(value) or depth > DEPTH_MAX or id(value) in self._seen or not self._on_time():
            return ""
        if is_container(value):
            self._seen.add(id(value))
            return self._first(value.values() if id(kind) in _DICTS else value, depth)
        if (
            is_module(value)
            or is_class(value)
            or kind is FunctionType
            or kind is BuiltinFunctionType
        ):
            return ""
        if self._libraries.is_driven_by(module_of(kind)):
            return f"it is a {_short(kind)}"
        if (torch := sys.modules.get("torch")) is not None:
            found = self._torch(value, names_of(torch))
            if found is not None:
                return found
        if why := self.works(value):
            return why
        if not is_users_module(module_of(kind)):
            return ""
        self._seen.add(id(value))
        return self._first(held(value).values(), depth)

    def works(self, value: Any) -> str:
        """Return whether ``value`` moves its work to the GPU by itself (a ``Trainer``), in words;
        "": no."""
        kind = type(value)
        if any(self._libraries.moves_by_itself(module_of(b), _name(b)) for b in _mro(kind)):
            return f"it is a {_short(kind)}, which works on the GPU"
        return ""

    def _first(self, values: Iterable[Any], depth: int) -> str:
        try:
            some = list(islice(values, ELEMENTS_MAX))
        except RuntimeError:  # another thread changes it
            return ""
        return next((why for value in some if (why := self.holds(value, depth + 1))), "")

    def _torch(self, value: Any, torch: dict[str, Any]) -> str | None:
        """Judge an object of PyTorch's; ``None``: it is none. Subclasses of tensors may run code of
        their own when they are asked, and are not."""
        tensor, nn = torch.get("Tensor"), torch.get("nn")
        inside_nn = names_of(nn) if is_module(nn) else {}
        kind = type(value)
        if type(value) is tensor or (tensor and type(value) is inside_nn.get("Parameter")):
            return "it is a tensor on the GPU" if _is_cuda(tensor, value) else ""
        if _is_based_on(kind, inside_nn.get("Module")):
            on_gpu = self._has_parameters(value, tensor, inside_nn.get("Parameter"))
            return "its parameters are on the GPU" if on_gpu else ""
        optim = torch.get("optim")
        if is_module(optim) and _is_based_on(kind, names_of(optim).get("Optimizer")):
            groups = held(value).get("param_groups")
            return self._first(groups or (), 0) if is_container(groups) else ""
        return None

    def _has_parameters(self, module: Any, tensor: Any, parameter: Any) -> bool:
        """Return whether the first parameter of a module, or of a module in it, is on the GPU."""
        waiting = [module]
        while waiting and self._on_time():
            inside = held(waiting.pop())
            for kind in ("_parameters", "_buffers"):
                for value in _values(inside.get(kind)):
                    if type(value) is tensor or (parameter and type(value) is parameter):
                        return _is_cuda(tensor, value)
            waiting += reversed(_values(inside.get("_modules")))
        return False

    def may_be_gpu(self, value: Any) -> bool:
        """Return whether ``value`` names a device that may be a GPU: ``"cuda:0"``, ``0``,
        ``torch.device("cuda")``."""
        if type(value) is str:
            return GPU_TEXT.match(value) is not None
        torch = sys.modules.get("torch")
        device = names_of(torch).get("device") if torch is not None else None
        if device is not None and type(value) is device:
            return GPU_TEXT.match(str(value.type)) is not None
        return type(value) is int

    def code_of(self, value: Any) -> FunctionType | None:
        """Return the user's function that a call of ``value`` runs; ``None``: no such."""
        for _ in range(DEPTH_MAX):
            if type(value) is partial:
                value = value.func
            elif type(value) is MethodType:
                value = value.__func__
            elif type(value) is not FunctionType and (inner := _wrapped(value)) is not None:
                value = inner
            else:
                break
        if is_class(value):
            value = _in_class(value, "__init__")
        elif type(value) is not FunctionType:
            value = _in_class(type(value), "__call__") or _in_class(type(value), "forward")
        return value if type(value) is FunctionType and _is_users_function(value) else None


def held(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object; empty if it has none, or one that the user computes."""
    for base in _mro(type(value)):
        getter = _class_names(base).get("__dict__")
        if getter is not None:
            found = getter.__get__(value) if type(getter) is GetSetDescriptorType else None
            return found if type(found) is dict else {}
    return {}


def method(value: Any, name: str) -> Any:
    """Return what ``value.name`` is by its class or ``__dict__``, without running anything."""
    if is_module(value):
        return names_of(value).get(name)
    if is_class(value):
        return _plain_function(_in_class(value, name))
    inside = held(value)
    return inside[name] if name in inside else _plain_function(_in_class(type(value), name))


def origin(value: Any) -> tuple[str, str]:
    """Return module and name of a function or class; "" for anything else."""
    if is_class(value):
        return module_of(value), _name(value)
    if type(value) is FunctionType or type(value) is BuiltinFunctionType:
        module, name = value.__module__, value.__name__
        return (module, name) if type(module) is str else ("", "")
    return "", ""


def is_users_module(name: str) -> bool:
    """Return whether a module is the notebook, or a file of its user's that is no package."""
    if name in ("__main__", "builtins", ""):
        return name == "__main__"
    top = name.partition(".")[0]
    loaded = sys.modules.get(top)
    if top in sys.stdlib_module_names or loaded is None or not is_module(loaded):
        return False
    place = names_of(loaded).get("__file__")
    return type(place) is str and "-packages" not in place


def _is_cuda(tensor: Any, value: Any) -> bool:
    return bool(tensor.is_cuda.__get__(value))


def _values(inside: Any) -> list[Any]:
    return list(inside.values()) if id(type(inside)) in _DICTS else []


def _wrapped(value: Any) -> Any:
    """Return the function that a decorator has wrapped (``functools.wraps``, ``jax.jit``)."""
    if "__wrapped__" in _class_names(type(value)):
        return None
    return held(value).get("__wrapped__")


def _in_class(cls: type, name: str) -> Any:
    return next((_class_names(b)[name] for b in _mro(cls) if name in _class_names(b)), None)


def _plain_function(value: Any) -> Any:
    wrapped = type(value) is staticmethod or type(value) is classmethod
    return value.__func__ if wrapped else value


def _is_users_function(function: FunctionType) -> bool:
    return is_users_module(str(function.__globals__.get("__name__", "")))


def _short(kind: type) -> str:
    return f"{module_of(kind).partition('.')[0]}.{_name(kind)}"
