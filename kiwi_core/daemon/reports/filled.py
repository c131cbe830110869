"""Fill the wire's structs from what the daemon knows already, by the names of the fields."""

from __future__ import annotations

from functools import cache
from inspect import isroutine
from typing import Any, TypeVar

from msgspec import Struct

from kiwi_core.units import ns_to_seconds

_Report = TypeVar("_Report", bound=Struct)


def filled(report: type[_Report], *sources: object, **given: object) -> _Report:
    """Return a ``report`` with the ``given`` fields. The others are read from the first of
    ``sources`` that has a field of that name; ``held_s`` is read from ``held_ns``, too. Raise
    ``TypeError`` if a field is nowhere."""
    for name, index, read, in_ns in _plan(report, tuple(map(type, sources)), frozenset(given)):
        value = getattr(sources[index], read)
        given[name] = ns_to_seconds(value) if in_ns and value is not None else value
    return report(**given)


@cache
def _plan(
    report: type[Any], kinds: tuple[type[Any], ...], given: frozenset[str]
) -> list[tuple[str, int, str, bool]]:
    """Return for each field that is not ``given``: its name, which of ``kinds`` has it, under which
    name, and whether in nanoseconds."""

    def has(kind: type[Any], read: str) -> bool:
        fields = getattr(kind, "__dataclass_fields__", ())
        return read in fields or (hasattr(kind, read) and not isroutine(getattr(kind, read)))

    plan = []
    for name in report.__struct_fields__:
        if name in given:
            continue
        reads = (name, f"{name[:-2]}_ns") if name.endswith("_s") else (name,)
        places = ((i, read) for i, kind in enumerate(kinds) for read in reads if has(kind, read))
        index, read = next(places, (-1, ""))
        if index < 0:
            raise TypeError(f"{report.__name__}.{name} comes from none of {kinds}")
        plan.append((name, index, read, read != name))
    return plan
