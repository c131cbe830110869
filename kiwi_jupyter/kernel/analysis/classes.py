"""Check whether the user's own classes and their instances stay on the CPU."""

from __future__ import annotations

import abc
import enum
import types
import typing
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis.holdings import end_callbacks

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.analysis.judge import Judge

_METACLASSES: Final = frozenset({type, abc.ABCMeta, type(enum.Enum), type(typing.Protocol)})

_PAYLOAD_BASES: Final[dict[type, Any]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    dict: dict.items,
    int: None,
    float: None,
    complex: None,
    str: None,
    bytes: None,
}
"""Builtins that a user's class may extend, and how to read what an instance holds as one."""

_HOLLOW_BASES: Final = frozenset(
    {object, abc.ABC, enum.Enum, enum.IntEnum, enum.Flag, enum.IntFlag, typing.Generic}
    | {typing.Protocol}
)

_BOOKKEEPING: Final = frozenset(
    """
    __module__ __dict__ __weakref__ __doc__ __qualname__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __firstlineno__ __static_attributes__ __match_args__
    __abstractmethods__ _abc_impl __dataclass_fields__ __dataclass_params__ __slots__
    __parameters__ __orig_bases__ __protocol_attrs__ __non_callable_proto_members__ __hash__
    __classdictcell__ __type_params__ __getnewargs__
    """.split()
)


class Classes:
    """Stateless; a class so that a test can give another one."""

    def why_not_class(self, cls: type, judge: Judge) -> str | None:
        """Return why using ``cls``, a class of no known library, may lead to a GPU."""
        if type(cls) not in _METACLASSES:
            return f"its class {cls.__qualname__} has the metaclass {type(cls).__qualname__}"
        for base in cls.__mro__:
            why = self._why_not_base(base, judge)
            if why is not None:
                return why
        return None

    def _why_not_base(self, base: type, judge: Judge) -> str | None:
        if base in _HOLLOW_BASES or base in _PAYLOAD_BASES or _is_builtin_exception(base):
            return None
        if base.__module__ == "builtins":
            return f"it extends the builtin {base.__qualname__}"
        if judge._libraries.is_gpu(base.__module__) or judge._libraries.is_cpu(base.__module__):
            return f"it extends {base.__module__}.{base.__qualname__}"
        for name, member in vars(base).items():
            if name in _BOOKKEEPING:
                continue
            why = judge.value(member)
            if why is not None:
                return f"{base.__qualname__}.{name} may: {why}"
        return None

    def why_not_instance(self, value: Any, kind: type, judge: Judge) -> str | None:
        """Return why ``value``, an instance of a class of no known library, may lead to a GPU."""
        if kind.__flags__ & _HEAP_TYPE == 0 or not isinstance(kind.__module__, str):
            return f"it is a {kind.__module__}.{kind.__qualname__}, which may hold anything"
        why = judge.value(kind)
        if why is not None:
            return why
        why = self._why_not_payload(value, kind, judge) or judge.value(end_callbacks(value))
        if why is not None:
            return why
        for base in kind.__mro__:
            if not isinstance(vars(base).get("__dict__"), types.GetSetDescriptorType | None):
                return f"{base.__qualname__} has a __dict__ of its own making"
            why = self._why_not_slots(value, base, judge)
            if why is not None:
                return why
        try:
            space = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return None
        return judge.value(space)

    def _why_not_payload(self, value: Any, kind: type, judge: Judge) -> str | None:
        for base in kind.__mro__:
            look = _PAYLOAD_BASES.get(base)
            if look is not None:
                return judge.value(list(look(value)))
            if _is_builtin_exception(base):
                return judge.value(BaseException.__dict__["args"].__get__(value))
        return None

    def _why_not_slots(self, value: Any, base: type, judge: Judge) -> str | None:
        for member in vars(base).values():
            if type(member) is not types.MemberDescriptorType or base.__flags__ & _HEAP_TYPE == 0:
                continue
            try:
                held = member.__get__(value)
            except AttributeError:
                continue
            why = judge.value(held)
            if why is not None:
                return why
        return None


_HEAP_TYPE: Final = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: made by a ``class`` statement, not in C."""


def _is_builtin_exception(base: type) -> bool:
    return base.__module__ == "builtins" and issubclass(base, BaseException)
