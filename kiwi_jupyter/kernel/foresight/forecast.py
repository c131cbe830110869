"""Look at the statements of a cell in their order, until one plainly goes for the GPU or the time
is over.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.libraries import (
    CPU_LIBRARIES,
    DEVICE_WORDS,
    TO_GPU,
    Libraries,
)
from kiwi_jupyter.kernel.foresight.look import CellLook, names_in
from kiwi_jupyter.kernel.foresight.values import is_module, is_plain, module_of, name_of

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Mapping

WITHIN_NS: Final = 2_000_000
"""Longest look at a cell, in processor time. What is not known by then is not foreseen."""

TEXT_MAX: Final = 20_000
"""Most characters of a cell whose words are looked at first."""

NOTHING: Final = (
    "nothing in it goes for the GPU; if it does all the same, it waits at its first call"
)
NO_TIME: Final = (
    "nothing in it goes for the GPU as far as Kiwi looked in two milliseconds; if it does all the "
    "same, it waits at its first call"
)

_WORD: Final = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class Foreseen:
    """``first_statement`` is the index of the first top-level statement that goes for the GPU;
    ``why`` names the words in it, with the line. For a cell that does not: 0, and why it runs at
    once."""

    gpu: bool
    why: str
    first_statement: int = 0


class Forecaster:
    """Foresees for one kernel. ``transform`` makes Python of what IPython adds to it."""

    def __init__(
        self,
        libraries: Libraries | None = None,
        transform: Callable[[str], str] = lambda code: code,
        within_ns: int = WITHIN_NS,
    ) -> None:
        self.libraries = libraries or Libraries()
        self._transform = transform
        self._within_ns = within_ns

    def foresee(
        self, tree: ast.Module, space: Mapping[str, Any], text: str | None = None
    ) -> Foreseen:
        """Return whether a cell that is about to run in the namespace ``space`` goes for the GPU.
        Does not change ``tree``, and runs no code of the user's. ``text``: what ``tree`` was parsed
        from, if that is certain; it is only for speed."""
        if text is not None and self._says_nothing(text, space):
            return Foreseen(False, NOTHING)
        look = CellLook(self.libraries, self._transform, space, self._within_ns)
        try:
            for index, statement in enumerate(tree.body):
                if why := look.statement(statement):
                    return Foreseen(True, f"line {look.line or statement.lineno}: {why}", index)
        except RecursionError:
            return Foreseen(False, NO_TIME)
        finally:
            on_time = look.on_time()
            look.forget()
        return Foreseen(False, NOTHING if on_time else NO_TIME)

    def _says_nothing(self, text: str, space: Mapping[str, Any]) -> bool:
        """Return whether the words of a cell are enough: no library for GPUs is loaded or named, or
        each name is new or means plain data."""
        if len(text) > TEXT_MAX:
            return False
        words = set(_WORD.findall(text))
        if not self.libraries.known.isdisjoint(words):
            return False
        if not self.libraries.any_loaded():
            return True
        if not words.isdisjoint(_SIGNALS):
            return False
        found = [space[word] for word in words if word in space]
        return all(_stays(one) or self._function_stays(one, space) for one in found)

    def _function_stays(self, value: Any, space: Mapping[str, Any]) -> bool:
        """Return whether a value is a function of the user's whose own words are enough."""
        if type(value) is not FunctionType or value.__globals__ is not space:
            return False
        if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
            return False
        names, texts = names_in(value.__code__)
        said = names | texts
        if not (self.libraries.known.isdisjoint(said) and said.isdisjoint(_SIGNALS)):
            return False
        return all(_stays(space[name]) for name in names if name in space)


FEW: Final = 64
"""A list that is no longer is looked through at a glance."""


def _stays(value: Any) -> bool:
    """Return whether a value is data, or a module of a library that stays on the CPU."""
    if is_plain(value):
        return True
    if (type(value) is list or type(value) is tuple) and len(value) <= FEW:
        return all(
            is_plain(row) or (type(row) is tuple and len(row) <= FEW and all(map(is_plain, row)))
            for row in value
        )
    if is_module(value):
        top = name_of(value).partition(".")[0]
        return top in CPU_LIBRARIES or top in sys.stdlib_module_names
    return module_of(type(value)) == "numpy"


_SIGNALS: Final = TO_GPU | DEVICE_WORDS | {"get_ipython", "exec", "eval"}
