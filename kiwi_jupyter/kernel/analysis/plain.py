"""Decide whether a cell plainly uses the GPU, while the driver is not initialised.

Such a process cannot use the GPU, and whatever initialises the driver passes Kiwi's gate. So
nothing has to be proved here: a cell takes its turn beforehand if its imports, or the values of its
names, are from a GPU library. A use that is overlooked waits at the gate.
"""

from __future__ import annotations

from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis import data
from kiwi_jupyter.kernel.analysis.check import Checker, Objection, already_there
from kiwi_jupyter.kernel.analysis.from_code import needs_of_code
from kiwi_jupyter.kernel.analysis.names import Defined, Existing, FunctionNames, Imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_jupyter.kernel.analysis.libraries import Libraries
    from kiwi_jupyter.kernel.analysis.names import Meaning, Names
    from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds, MagicCall

STEPS_MAX: Final = 400
"""Most values checked for one cell: a millisecond or so."""

ELEMENTS_MAX: Final = 32
"""Most elements to look at in one container: a list of tensors starts with a tensor."""


class PlainChecker(Checker):
    """The checker for one cell. It finds plain uses only; everything that is merely possible
    passes.
    """

    def __init__(
        self, libraries: Libraries, *, magic: Callable[[MagicCall], Objection | None] | None = None
    ) -> None:
        super().__init__(libraries, clean=False, magic=magic)
        self._known: dict[int, str | None] = {}
        self._keep: list[object] = []

    def forget(self) -> None:
        self._known.clear()
        self._keep.clear()

    def _faults(self, needs: CodeNeeds, names: Names) -> Iterator[Objection | None]:
        for module, line in needs.imports.items():
            yield self._import(module, line)
        for (module, chain), line in needs.modules.items():
            yield self._of(module, Imported(module, chain), (), line, names)
        for (name, chain), line in needs.reads.items():
            for meaning in names.meanings(name):
                yield self._of(name, meaning, chain, line, names)
        for (name, chain), line in needs.cells.items():
            for meaning in names.cell(name):
                yield self._of(name, meaning, chain, line, names)
        for magic in needs.magics:
            fault = self._magic(magic) if self._magic else None
            yield fault if fault is not None and fault.plain else None

    def stored(self, name: str, old: object, line: int) -> Objection | None:  # noqa: ARG002
        return None

    def dropped(self, value: object) -> str | None:  # noqa: ARG002
        return None

    def _import(self, module: str, line: int) -> Objection | None:
        if not self.libraries.is_plainly_gpu(module):
            return None
        return _fault(line, f"import {module}", "it uses the GPU")

    def _of(
        self, name: str, meaning: Meaning, chain: Chain, line: int, names: Names
    ) -> Objection | None:
        if isinstance(meaning, Defined):
            fault = self._defined(meaning, (), line, names)
            return None if fault is None else replace(fault, plain=True)
        module = _module_name(meaning)
        if module and self.libraries.is_plainly_gpu(".".join((module, *chain))):
            return _fault(line, name, f"{module.partition('.')[0]} uses the GPU")
        why = self._leads(already_there(meaning, chain)) or self._chain_base(meaning, chain)
        return None if why is None else _fault(line, name, why)

    def _chain_base(self, meaning: Meaning, chain: Chain) -> str | None:
        """Judge the value of ``trainer`` in ``trainer.fit``, unless it is a module."""
        if not chain or not isinstance(meaning, Existing) or type(meaning.value) is ModuleType:
            return None
        return self._leads(meaning.value)

    # --- values

    def _leads(self, value: Any) -> str | None:
        kind = type(value)
        if kind in data.LEAVES:
            return None
        key = id(value)
        if key not in self._known and len(self._known) < STEPS_MAX:
            self._known[key] = None  # on a cycle
            self._keep.append(value)
            self._known[key] = self._look(value, kind)
        return self._known.get(key)

    def _look(self, value: Any, kind: type) -> str | None:
        if issubclass(kind, ModuleType):
            name = str(vars(value).get("__name__", ""))
            return f"{name} uses the GPU" if self.libraries.is_plainly_gpu(name) else None
        if kind is FunctionType:
            return self._function_leads(value)
        if kind is MethodType:
            return self._any((value.__self__, value.__func__))
        if kind is BuiltinFunctionType:
            return self._said(value.__module__, "it is a function of")
        if kind in (list, tuple, set, frozenset):
            return self._any([item for item, _ in zip(value, range(ELEMENTS_MAX), strict=False)])
        if kind is dict:
            return self._any(list(value.values())[:ELEMENTS_MAX])
        return self._object_leads(value, value if issubclass(kind, type) else kind)

    def _object_leads(self, value: Any, cls: type) -> str | None:
        for base in cls.__mro__:
            why = self._said(
                base.__module__, f"it is {'' if base is cls else 'based on '}a class of"
            )
            if why is not None:
                return why
        if not self._is_users(cls.__module__):
            return None
        members = [m for base in cls.__mro__[:-1] for m in list(vars(base).values())]
        held = () if cls is value else getattr(value, "__dict__", ())
        return self._any([m for m in members if type(m) is FunctionType]) or (
            self._any(list(held.values())[:ELEMENTS_MAX]) if type(held) is dict else None
        )

    def _function_leads(self, function: Any) -> str | None:
        why = self._said(function.__module__, "it is a function of")
        if why is not None or not self._is_users(function.__globals__.get("__name__")):
            return why
        names = FunctionNames(function.__globals__, function)
        fault = self.check(needs_of_code(function.__code__), names)
        return None if fault is None else f"it reaches `{fault.subject}`, and {fault.why}"

    def _any(self, values: Any) -> str | None:
        return next((why for value in values if (why := self._leads(value)) is not None), None)

    def _said(self, module: object, how: str) -> str | None:
        if not isinstance(module, str) or not self.libraries.is_plainly_gpu(module):
            return None
        return f"{how} {module}, which uses the GPU"

    def _is_users(self, module: object) -> bool:
        """Return whether it is the notebook's own code or from a file of its user's, and not from a
        package.
        """
        return isinstance(module, str) and self.libraries.is_users(module)


def _module_name(meaning: Meaning) -> str:
    """Return the module that a name means, and what was taken from it; "" for anything else."""
    if isinstance(meaning, Imported):
        return ".".join((meaning.module, *meaning.chain))
    if isinstance(meaning, Existing) and type(meaning.value) is ModuleType:
        return str(vars(meaning.value).get("__name__", ""))
    return ""


def _fault(line: int, subject: str, why: str) -> Objection:
    return Objection(line, subject, why, taints=False, plain=True)
