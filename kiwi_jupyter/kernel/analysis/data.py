"""The types that are plain data: every instance of them stays on the CPU.

The exact type counts, because a subclass may do anything. Types of libraries are looked up in
modules that are already loaded; this module imports none.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LEAVES: Final = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, type(None), type(...), range}
    | {type(NotImplemented)}
)

_ROWS: Final = frozenset({list, tuple})

_PLAIN: Final[dict[str, frozenset[str]]] = {
    "datetime": frozenset("date datetime time timedelta timezone".split()),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "uuid": frozenset({"UUID"}),
    "re": frozenset({"Pattern", "Match"}),
    "random": frozenset({"Random"}),
    "_collections": frozenset({"_tuplegetter"}),
    "zoneinfo": frozenset({"ZoneInfo"}),
    "string": frozenset({"Template"}),
    "array": frozenset({"array"}),
    "pandas": frozenset("Timestamp Timedelta Period Interval RangeIndex DatetimeIndex".split())
    | frozenset("TimedeltaIndex PeriodIndex".split()),
    "numpy.random": frozenset("Generator RandomState SeedSequence PCG64".split()),
}

OBJECTS_MAX: Final = 100_000
"""Longest sequence whose elements are checked: a millisecond or two."""


def is_plain(kind: type) -> bool:
    """Return whether every instance of exactly ``kind`` is harmless, whatever it holds."""
    if kind in LEAVES:
        return True
    for module, names in _PLAIN.items():
        loaded = sys.modules.get(module)
        if type(loaded) is not ModuleType or kind.__name__ not in names:
            continue
        if loaded.__dict__.get(kind.__name__) is kind:
            return True
    return _is_numpy_scalar_or_dtype(kind)


def _is_numpy_scalar_or_dtype(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not str(kind.__module__).startswith("numpy"):
        return False
    space = numpy.__dict__
    generic = space.get("generic")
    if isinstance(generic, type) and issubclass(kind, generic):
        return space.get(kind.__name__) is kind and kind.__name__ not in ("void", "object_")
    dtype = space.get("dtype")
    return isinstance(dtype, type) and issubclass(kind, dtype) and not kind.__name__.startswith("V")


def why_not_elements(items: Any, count: int, value: Callable[[object], str | None]) -> str | None:
    """Judge every element. This is fast if all elements are plain."""
    if count > OBJECTS_MAX:
        return "it is too long to be looked at"
    kinds = set(map(type, items))
    if kinds <= LEAVES or (kinds <= _ROWS and _rows_of_leaves(items)):
        return None
    if all(map(is_plain, kinds)):
        return None
    for item in items:
        why = value(item)
        if why is not None:
            return why
    return None


def _rows_of_leaves(items: Iterable[Any]) -> bool:
    """Return whether lists and tuples (exact types) hold nothing but leaves."""
    return sum(map(len, items)) <= OBJECTS_MAX and LEAVES.issuperset(
        map(type, chain.from_iterable(items))
    )


def why_not_array(array: Any, value: Callable[[object], str | None]) -> str | None:
    """Check a numpy array (exact type): it must hold no objects, and be in ordinary memory."""
    if array.dtype.hasobject:
        if array.dtype.kind != "O":
            return "it is a numpy array with objects inside"
        return why_not_elements(array.ravel().tolist(), array.size, value)
    base = array.base
    while base is not None:
        if type(base) is not type(array):
            plain = type(base) in (bytes, bytearray, memoryview) or _is_plain_base(base)
            return None if plain else f"its memory belongs to a {name_of(type(base))}"
        base = base.base
    return None


def _is_plain_base(base: object) -> bool:
    kind = type(base)
    if kind.__name__ == "PyCapsule":
        return _capsule_name(base) == b"arrow::Buffer"
    return (kind.__module__, kind.__name__) in {("mmap", "mmap"), ("array", "array")}


def _capsule_name(capsule: object) -> bytes | None:
    """Return the name that a capsule's maker gave it: Arrow's memory, or another library's
    tensor.
    """
    ask = ctypes.pythonapi.PyCapsule_GetName
    ask.restype, ask.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    name: bytes | None = ask(capsule)
    return name


_COLUMNS: Final = frozenset(
    """
    ArrowExtensionArray ArrowStringArray BooleanArray Categorical DatetimeArray FloatingArray
    IntegerArray IntervalArray PeriodArray StringArray TimedeltaArray
    """.split()
)
"""Kinds of columns that hold no objects."""

_FRAME_ATTRIBUTES: Final = frozenset(
    {"_mgr", "_item_cache", "_attrs", "_flags", "_name", "_is_copy", "_cacher"}
)


def why_not_frame(frame: Any, value: Callable[[object], str | None]) -> str | None:
    """Check a pandas ``DataFrame`` or ``Series`` (exact type) by its blocks."""
    extra = frame.__dict__.keys() - _FRAME_ATTRIBUTES
    if extra or frame.__dict__.get("_attrs"):
        return "it carries attributes of its own"
    why = value(frame.__dict__.get("_name"))
    if why is not None:
        return why
    for axis in frame.axes:
        why = why_not_index(axis, value)
        if why is not None:
            return why
    for block in frame._mgr.arrays:
        why = _why_not_column(block, value)
        if why is not None:
            return why
    return None


def why_not_index(index: Any, value: Callable[[object], str | None]) -> str | None:
    pandas = sys.modules["pandas"].__dict__
    kind = type(index)
    if is_plain(kind):
        return value(tuple(index.names))
    if kind is pandas["MultiIndex"]:
        levels = (why_not_index(level, value) for level in index.levels)
        return next((why for why in levels if why is not None), value(tuple(index.names)))
    if kind not in (pandas["Index"], pandas["CategoricalIndex"], pandas["IntervalIndex"]):
        return f"its index is a {name_of(kind)}"
    return _why_not_column(index._values, value) or value(tuple(index.names))


def _why_not_column(array: Any, value: Callable[[object], str | None]) -> str | None:
    kind = type(array)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return why_not_array(array, value)
    if kind.__module__.partition(".")[0] != "pandas" or kind.__name__ not in _COLUMNS:
        return f"a column is a {name_of(kind)}"
    if kind.__name__ == "Categorical":
        return why_not_index(array.categories, value)
    return None


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
