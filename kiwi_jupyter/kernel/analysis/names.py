"""The possible meanings of a name at the place where it is read."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds


@dataclass(frozen=True)
class Computed:
    """A value that CPU code made from values that stay on the CPU."""


@dataclass(frozen=True)
class Existing:
    """An object that exists."""

    value: object


@dataclass(frozen=True)
class Imported:
    """A module (or what ``chain`` reads from it), loaded by now or not."""

    module: str
    chain: Chain = ()


@dataclass(frozen=True)
class Defined:
    """A function or class that an earlier statement of this cell defines, with what using it
    reaches.
    """

    name: str
    needs: CodeNeeds


Meaning = Computed | Existing | Imported | Defined
COMPUTED: Final = Computed()
_MISSING: Final = object()


class Names(Protocol):
    """The names that some code sees."""

    def meanings(self, name: str) -> list[Meaning]:
        """Return everything that global ``name`` may mean here; empty if nothing (a
        ``NameError``).
        """

    def cell(self, name: str) -> list[Meaning]:
        """Do the same for a variable of an enclosing function."""

    def old_value(self, name: str) -> object:
        """Return the old value that binding global ``name`` releases; ``None`` if nothing."""


def _in_spaces(name: str, space: Mapping[str, Any]) -> list[Meaning]:
    found = space.get(name, _MISSING)
    if found is _MISSING:
        found = builtins.__dict__.get(name, _MISSING)
    return [] if found is _MISSING else [Existing(found)]


class FunctionNames:
    """The names of a function: its own globals and its closure."""

    def __init__(self, space: Mapping[str, Any], function: Any) -> None:
        self._space = space
        self._function = function

    def meanings(self, name: str) -> list[Meaning]:
        return _in_spaces(name, self._space)

    def cell(self, name: str) -> list[Meaning]:
        free = self._function.__code__.co_freevars
        closure = self._function.__closure__ or ()
        if name not in free:
            return [COMPUTED]
        try:
            return [Existing(closure[free.index(name)].cell_contents)]
        except (ValueError, IndexError):
            return []

    def old_value(self, name: str) -> object:
        return self._space.get(name)


class CellNames:
    """The names of a cell: the user's namespace, and what its statements have bound so far."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self._bound: dict[str, list[Meaning]] = {}
        self._replaced: set[str] = set()

    def meanings(self, name: str) -> list[Meaning]:
        bound = self._bound.get(name)
        if bound is None:
            return _in_spaces(name, self._space)
        if name in self._replaced:
            return bound
        return [*_in_spaces(name, self._space), *bound]

    def cell(self, name: str) -> list[Meaning]:  # noqa: ARG002
        return [COMPUTED]

    def may_bind(self, name: str, meaning: Meaning) -> None:
        """Record that a statement may bind ``name``: the old meaning stays possible."""
        known = self._bound.setdefault(name, [])
        if meaning not in known:
            known.append(meaning)

    def binds(self, name: str, meaning: Meaning) -> None:
        """Record that a plain statement at top level has certainly bound ``name``."""
        self._bound[name] = [meaning]
        self._replaced.add(name)

    def forget(self) -> None:
        """Drop the references to the objects that names were found to mean."""
        self._bound.clear()

    def old_value(self, name: str) -> object:
        """Return the value from before the cell that binding ``name`` releases; ``None`` if
        nothing.
        """
        if name in self._replaced:
            return None
        return self._space.get(name)
