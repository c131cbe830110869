"""Compare what code reaches (``CodeNeeds``) with what the names mean (``Names``)."""

from __future__ import annotations

import abc
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, Generic, Protocol

from kiwi_jupyter.kernel.analysis.classes import Classes
from kiwi_jupyter.kernel.analysis.from_ast import LOADS
from kiwi_jupyter.kernel.analysis.judge import ORIGINAL_BUILTINS, Judge
from kiwi_jupyter.kernel.analysis.libraries import Libraries, attribute_is_harmless
from kiwi_jupyter.kernel.analysis.names import Computed, Defined, Existing, Imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_jupyter.kernel.analysis.names import Meaning, Names
    from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds, MagicCall

MISSING: Final = object()


@dataclass(frozen=True)
class Objection:
    """The first reason found why code may use the GPU. ``taints``: the code may also change later
    cells without a trace in them (imports, ``exec``), so "nothing can reach a GPU" no longer holds.
    ``plain``: it uses the GPU by name (``plain.py``).
    """

    line: int
    subject: str
    why: str
    taints: bool = True
    plain: bool = False


class Checker:
    """The checker for one cell and mode.

    ``clean``: no library that can reach a GPU is in the process and no code so far could have
    brought one in, so that no object needs a check; only doors, imports and modules count.
    """

    def __init__(
        self,
        libraries: Libraries,
        *,
        clean: bool,
        patched: frozenset[str] | set[str] = frozenset(),
        magic: Callable[[MagicCall], Objection | None] | None = None,
        callbacks: bool = False,
    ) -> None:
        self.libraries = libraries
        self.classes = Classes()
        self._clean = clean
        self._patched = patched
        self._magic = magic
        self._judge = Judge(libraries, self, clean=clean, callbacks=callbacks)
        self._in_progress: set[int] = set()

    def forget(self) -> None:
        """Drop all references to the objects that were checked."""
        self._judge.forget()

    def check(self, needs: CodeNeeds, names: Names) -> Objection | None:
        """Return the first reason, by line, why code that reaches ``needs`` may use the GPU."""
        faults = [fault for fault in self._faults(needs, names) if fault is not None]
        return min(faults, key=lambda fault: fault.line, default=None)

    def _faults(self, needs: CodeNeeds, names: Names) -> Iterator[Objection | None]:
        for line, why in needs.doors:
            yield Objection(line, why, "that can lead anywhere")
        yield from self._name_faults(needs, names)
        for (module, chain), line in needs.modules.items():
            yield self._module(module, chain, line)
        for attribute, line in needs.attributes.items():
            yield self._attribute(attribute, line)
        for magic in needs.magics:
            yield self._magic(magic) if self._magic else _unknown_magic(magic)

    def _name_faults(self, needs: CodeNeeds, names: Names) -> Iterator[Objection | None]:
        for module, line in needs.imports.items():
            yield self._import(module, line)
        for (name, chain), line in needs.reads.items():
            yield self._name(name, chain, line, names, names.meanings(name))
        for (name, chain), line in needs.cells.items():
            yield self._name(name, chain, line, names, names.cell(name))
        for name, line in needs.stores.items():
            yield self.stored(name, names.old_value(name), line)
        for (name, chain), line in needs.mentions.items():
            yield self._mention(name, chain, line, names, _is_class)
        for (name, chain), line in needs.bases.items():
            yield self._mention(name, chain, line, names, _is_quiet_base)

    def stored(self, name: str, old: object, line: int) -> Objection | None:
        """Return why binding or deleting ``name`` may use the GPU: it releases ``old``, whose
        destructor runs.
        """
        if self._clean or type(old) is ModuleType:
            return None
        why = self._judge.value(old)
        if why is None:
            return None
        return Objection(line, name, f"its old value goes: {why}", taints=False)

    def dropped(self, value: object) -> str | None:
        """Return why dropping the last reference to ``value`` may use the GPU."""
        return None if self._clean or type(value) is ModuleType else self._judge.value(value)

    # --- names

    def _name(
        self, name: str, chain: Chain, line: int, names: Names, meanings: list[Meaning]
    ) -> Objection | None:
        for meaning in meanings:
            fault = self._meaning(name, chain, line, names, meaning)
            if fault is not None:
                return fault
        if not meanings:  # a NameError, or bound in the meantime by code that stays on the CPU
            return self._chain(name, chain, line)
        return None

    def _meaning(
        self, name: str, chain: Chain, line: int, names: Names, meaning: Meaning
    ) -> Objection | None:
        if isinstance(meaning, Computed):
            return self._chain(name, chain, line)
        if isinstance(meaning, Imported):
            return self._module(meaning.module, meaning.chain + chain, line)
        if isinstance(meaning, Defined):
            return self._defined(meaning, chain, line, names)
        return self._existing(name, chain, line, meaning)

    def _defined(self, meaning: Defined, chain: Chain, line: int, names: Names) -> Objection | None:
        key = id(meaning.needs)
        if key in self._in_progress:
            return self._chain(meaning.name, chain, line)
        self._in_progress.add(key)
        try:
            fault = self.check(meaning.needs, names)
        finally:
            self._in_progress.discard(key)
        if fault is not None:
            why = f"it reaches `{fault.subject}` in line {fault.line}, and {fault.why}"
            return Objection(line, meaning.name, why, fault.taints)
        return self._chain(meaning.name, chain, line)

    def _existing(self, name: str, chain: Chain, line: int, meaning: Existing) -> Objection | None:
        value = meaning.value
        if chain == ("(constant)",):  # getattr with a constant as the attribute's name
            if value is ORIGINAL_BUILTINS["getattr"]:
                return None
            chain = ()
        if type(value) is ModuleType:
            return self._module_object(value.__name__, value, chain, line, name)
        why = self._judge.value(value)
        if why is not None:
            return Objection(line, name, why)
        return self._chain(name, chain, line)

    def _chain(self, name: str, chain: Chain, line: int) -> Objection | None:
        for attribute in chain:
            if attribute == "format" and len(chain) == 1:
                return Objection(line, f"{name}.format", "a format string can read any attribute")
            fault = self._attribute(attribute, line, name)
            if fault is not None:
                return fault
        return None

    def _attribute(self, attribute: str, line: int, of: str = "…") -> Objection | None:
        if attribute == "format":
            return Objection(line, f"{of}.format", "a format string can read any attribute")
        if not attribute_is_harmless(attribute):
            return Objection(line, f"{of}.{attribute}", "that attribute can lead anywhere")
        if attribute in self._patched and not self._clean:
            why = "code of this notebook has set an attribute of that name on some object"
            return Objection(line, f"{of}.{attribute}", why)
        return None

    # --- modules

    def _import(self, module: str, line: int) -> Objection | None:
        if self.libraries.is_trusted(module):
            return None
        if not self._clean and module in sys.modules:
            return None  # it only gets a name; its use is judged where the name is read
        why = "it may use the GPU"
        if not self.libraries.is_gpu(module):
            why = "it is not known to stay on the CPU (the setting Kiwi.cpu_modules can say so)"
        return Objection(line, f"import {module}", why)

    def _module(self, name: str, chain: Chain, line: int) -> Objection | None:
        if chain and chain[-1] == LOADS:
            return self._loads(name, chain, line)
        loaded = sys.modules.get(name)
        if loaded is not None:
            return self._module_object(name, loaded, chain, line, name)
        if self.libraries.is_gpu(name):
            return Objection(line, name, f"{name} may use the GPU")
        if not self.libraries.is_trusted(name):
            return Objection(line, name, f"{name} is not known to stay on the CPU")
        return self._trusted_chain(name, chain, line)

    def _loads(self, name: str, chain: Chain, line: int) -> Objection | None:
        """Check a call of ``load`` that asks for data only: then ``numpy.load`` is harmless."""
        if name == "numpy" and len(chain) == 1 and self.libraries.is_trusted("numpy"):
            return None
        return self._module(name, (*chain[:-1], "load"), line)

    def _trusted_chain(self, name: str, chain: Chain, line: int) -> Objection | None:
        """Check a trusted module that is not loaded yet, or that loads its parts lazily."""
        if not chain:
            return Objection(line, name, "a module passed around can lead anywhere")
        if not self.libraries.allows(name, chain[0]):
            return Objection(line, f"{name}.{chain[0]}", "that can lead anywhere")
        inner = f"{name}.{chain[0]}"
        if inner in sys.modules or inner == "concurrent.futures":
            return self._module(inner, chain[1:], line)
        return self._chain(inner, chain[1:], line)

    def _module_object(
        self, name: str, module: object, chain: Chain, line: int, said: str
    ) -> Objection | None:
        if chain and chain[-1] == LOADS and sys.modules.get(name) is module:
            return self._loads(name, chain, line)
        if self.libraries.is_gpu(name):
            return Objection(line, said, f"{name} may use the GPU")
        if sys.modules.get(name) is not module:
            return Objection(line, said, f"it is not the module {name} that is loaded")
        if not chain:
            return Objection(line, said, "a module passed around can lead anywhere")
        if self.libraries.is_other_stdlib(name):
            return Objection(line, said, f"{name} can lead anywhere")
        trusted = self.libraries.is_trusted(name)
        if trusted and not self.libraries.allows(name, chain[0]):
            return Objection(line, f"{said}.{chain[0]}", "that can lead anywhere")
        found = module.__dict__.get(chain[0], MISSING)
        if found is MISSING:
            if trusted:
                return self._trusted_chain(name, chain, line)
            why = f"{name} has no such name, and may make it up"
            return Objection(line, f"{said}.{chain[0]}", why)
        return self._found(name, trusted, found, chain, line, f"{said}.{chain[0]}")

    def _found(
        self, module: str, trusted: bool, found: object, chain: Chain, line: int, said: str
    ) -> Objection | None:
        if issubclass(type(found), ModuleType):
            inner = vars(found).get("__name__")
            if not isinstance(inner, str):
                return Objection(line, said, "it is a module without a name")
            return self._module_object(inner, found, chain[1:], line, said)
        why = self._judge.value(found)
        if why is not None and not (trusted and _of_library(found, module)):
            return Objection(line, said, why)
        return self._chain(said, chain[1:], line)

    # --- mentions

    def _mention(
        self, name: str, chain: Chain, line: int, names: Names, harmless: Callable[[object], bool]
    ) -> Objection | None:
        """Judge naming a class that already exists: it does nothing, whatever library the class is
        from.
        """
        for meaning in names.meanings(name):
            if harmless(already_there(meaning, chain)):
                continue
            fault = self._meaning(name, chain, line, names, meaning)
            if fault is not None:
                return fault
        return None


def _unknown_magic(magic: MagicCall) -> Objection:
    return Objection(magic.line, "get_ipython()", "a magic inside a function is not looked into")


def _of_library(value: object, module: str) -> bool:
    """Return whether ``value``, found in a trusted module, is of a class of that same library:
    ``np.r_``, ``plt.rcParams``. Containers are judged by their contents.
    """
    kind = type(value)
    if not isinstance(kind.__module__, str) or issubclass(kind, type):
        return False
    top = kind.__module__.partition(".")[0]
    return top == module.partition(".")[0] and top not in ("functools", "collections", "types")


def already_there(meaning: Meaning, chain: Chain) -> object:
    """Return what ``chain`` leads to in loaded modules, without running anything; or a miss."""
    if isinstance(meaning, Existing):
        value: object = meaning.value
    elif isinstance(meaning, Imported):
        value, chain = sys.modules.get(meaning.module, MISSING), meaning.chain + chain
    else:
        return MISSING
    for attribute in chain:
        if type(value) is not ModuleType:
            return MISSING
        value = vars(value).get(attribute, MISSING)
    return value


def _is_class(value: object) -> bool:
    return value is None or issubclass(type(value), type)


def _is_quiet_base(value: object) -> bool:
    """Return whether a ``class`` statement with this base runs nothing of the base's library."""
    if type(value) not in (type, abc.ABCMeta):
        return False
    own = (base for base in value.__mro__ if base not in (object, Generic, Protocol))  # type: ignore[attr-defined]
    return not any("__init_subclass__" in vars(base) for base in own)
