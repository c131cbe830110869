"""Hypothesis strategies for every message, derived from the structs."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from kiwi_core.wire import messages as m
from kiwi_core.wire.pager import PagerDone

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
NAME = st.text(st.characters(exclude_categories=("Cs", "C", "Z")), max_size=30)
INT = st.integers(-(2**53), 2**53)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)


def _struct(kind: type[msgspec.Struct], **fixed: st.SearchStrategy[object]) -> st.SearchStrategy:
    """Return instances of ``kind``: each field by its type, nested structs likewise."""
    fields = {
        field.name: fixed[field.name] if field.name in fixed else _of(field.type)
        for field in msgspec.inspect.type_info(kind).fields  # type: ignore[union-attr]
    }
    return st.builds(lambda values: kind(**values), st.fixed_dictionaries(fields))


def _of(info: msgspec.inspect.Type) -> st.SearchStrategy:
    match info:
        case msgspec.inspect.StructType(cls=cls):
            return _struct(cls)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=3)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.IntType(ge=ge, lt=lt):
            return INT if ge is None else st.integers(ge, lt - 1)
        case msgspec.inspect.FloatType(ge=ge, lt=lt):
            return SECONDS if ge is None else st.floats(ge, lt, exclude_max=True)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return TEXT
    raise NotImplementedError(info)


# The daemon cleans words for people on arrival, so that only clean ones come back unchanged.
HELLO = _struct(m.Hello, client=NAME, name=NAME, kernel_id=NAME)
CLIENT_KINDS: tuple[type[msgspec.Struct], ...] = m.ClientMessage.__args__  # type: ignore[attr-defined]
DAEMON_KINDS: tuple[type[msgspec.Struct], ...] = m.DaemonMessage.__args__  # type: ignore[attr-defined]
PAGER_DONE = _struct(PagerDone, detail=NAME)
CLEANED = (m.Hello, PagerDone)
CLIENT = st.one_of(
    HELLO, PAGER_DONE, *(_struct(kind) for kind in CLIENT_KINDS if kind not in CLEANED)
)
DAEMON = st.one_of(*map(_struct, DAEMON_KINDS))
