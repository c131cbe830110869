"""Decide whether a cell may use the GPU, and from which statement on.

There are two proofs that it does not. While no library that can reach a GPU is in the process, and
no code so far could have imported one, it is enough that this cell imports none (``clean``).
Otherwise every name that the cell reaches must lead to something that stays on the CPU. A cell
without a proof counts as using the GPU, unless the process cannot use it at all: see ``plain``.

Two things are trusted: that the libraries on the CPU list stay on the CPU in whatever state they
were left (an exotic logging handler, a display formatter), and that code of other threads does not
matter to the cell.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis.check import MISSING, Checker, Objection, already_there
from kiwi_jupyter.kernel.analysis.glance import Glance
from kiwi_jupyter.kernel.analysis.holdings import CALLBACKS
from kiwi_jupyter.kernel.analysis.libraries import Libraries
from kiwi_jupyter.kernel.analysis.magic_calls import Magics, parse
from kiwi_jupyter.kernel.analysis.names import (
    COMPUTED,
    CellNames,
    Defined,
    Existing,
    Meaning,
)
from kiwi_jupyter.kernel.analysis.plain import PlainChecker
from kiwi_jupyter.kernel.analysis.steps import CodeStep, Reading, Source, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_jupyter.kernel.analysis.needs import Chain

STATEMENTS_MAX: Final = 2_000
"""A cell with more top-level statements is generated; it counts as using the GPU."""


RUNS_ANYTHING: Final = frozenset({"exec", "eval", "compile", "__import__", "getattr", "execfile"})
"""Names that run code which is not in the cell."""

PUT_OFF_MAX: Final = 512
"""Most cells that are put off. They are all analysed at once, in about half a second."""

NOT_PLAIN: Final = "it does not plainly use the GPU"


@dataclass(frozen=True)
class Verdict:
    """The result of an analysis. ``first_statement`` is the index of the first top-level statement
    that may use the GPU; ``why`` is the reason in words, with the line. For a CPU cell: 0, and why
    it does not use the GPU.
    """

    gpu: bool
    why: str
    first_statement: int = 0


class Analyzer:
    """The analyzer of a kernel; remembers what the cells so far may have done. Not thread-safe: the
    cell hook calls it under a lock.
    """

    def __init__(
        self,
        libraries: Libraries | None = None,
        transform: Callable[[str], str] = lambda code: code,
    ) -> None:
        self.libraries = libraries or Libraries()
        self._transform = transform
        self._tainted: str | None = None
        self._patched: set[str] = set()
        self._callbacks = False
        """See ``Holdings``."""
        self._harmless_modules: set[str] = set()
        self._reading = Reading()
        self.glance = Glance(self.libraries)
        self._put_off: dict[Source, None] = {}
        """Cells that ran and were not analysed, in order: see ``put_off``."""

    @property
    def tainted(self) -> str | None:
        """Return why objects have to be checked one by one; ``None`` while that is not needed."""
        return self._tainted or self._unknown_loaded()

    def taint(self, why: str) -> None:
        """Record that code ran which this analyzer has not seen."""
        self._tainted = self._tainted or why
        self._callbacks = True

    def put_off(self, source: Source) -> None:
        """Record a cell that runs without an analysis (``glance``). It is analysed before the next
        cell that needs an analysis, because its effect on later cells must be known then.
        """
        if source not in self._put_off:
            self._put_off[source] = None
            if len(self._put_off) > PUT_OFF_MAX:
                self._put_off.clear()
                self.taint("too many cells ran before the first one that had to be looked at")

    def _catch_up(self, space: Mapping[str, Any]) -> None:
        """Analyse the cells that were put off, as their names are now."""
        while self._put_off:
            text, flags = source = next(iter(self._put_off))
            del self._put_off[source]
            try:
                tree = compile(text, "<cell>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
            except (SyntaxError, ValueError):
                self.taint("a cell that ran could not be read again")
                continue
            self._analyse(tree, space, source)

    def analyse(
        self, tree: ast.Module, space: Mapping[str, Any], source: Source | None = None
    ) -> Verdict:
        """Return the verdict on a cell that is about to run in the namespace ``space``. Does not
        change ``tree`` and runs no code of the user. ``source`` is what ``tree`` was parsed from
        and is determined by, if that is certain; it is only for speed.
        """
        self._catch_up(space)
        return self._analyse(tree, space, source)

    def _analyse(
        self, tree: ast.Module, space: Mapping[str, Any], source: Source | None
    ) -> Verdict:
        if not tree.body:
            return Verdict(False, "the cell is empty")
        if len(tree.body) > STATEMENTS_MAX:
            self.taint("a cell was too long to be looked at")
            return Verdict(True, "the cell is too long to be looked at")
        steps = self._reading.steps(tree, source)
        self._note_callbacks(steps)
        if self.tainted is None:
            with _Pass(self, space, clean=True) as run:
                found = run.first_fault(steps)
            if run.taint is None:
                return self._verdict(found, "nothing in this kernel can reach a GPU")
            self._tainted = f"line {run.taint.line}: `{run.taint.subject}`: {run.taint.why}"
        with _Pass(self, space, clean=False) as run:
            found = run.first_fault(steps)
            for step in steps:
                self._note_patches(step, run.names)
        return self._verdict(found, "everything that it reaches stays on the CPU")

    def plainly(
        self, tree: ast.Module, space: Mapping[str, Any], source: Source | None = None
    ) -> Verdict:
        """Return whether the cell plainly uses the GPU. ``analyse`` has said that it may use the
        GPU, and has recorded what the cell does to later ones.
        """
        if len(tree.body) > STATEMENTS_MAX:
            return Verdict(False, NOT_PLAIN)
        with _Pass(self, space, clean=False, plain=True) as run:
            found = run.first_fault(self._reading.steps(tree, source))
        return self._verdict(found, NOT_PLAIN)

    def preview(self, tree: ast.Module, space: Mapping[str, Any]) -> Verdict:
        """Do the same as ``analyse`` for code that is not going to run. Nothing is remembered of
        it.
        """
        self._catch_up(space)
        before = self._tainted, set(self._patched), self._callbacks
        try:
            return self.analyse(tree, space)
        finally:
            self._tainted, self._patched, self._callbacks = before

    def _verdict(self, found: tuple[int, Objection] | None, why_not: str) -> Verdict:
        if found is None:
            return Verdict(False, why_not)
        index, fault = found
        why = f"line {fault.line}: `{fault.subject}`: {fault.why}"
        return Verdict(True, why, index)

    def _unknown_loaded(self) -> str | None:
        """Return the name of a loaded library that could reach a GPU, with the reason, or
        ``None``.
        """
        if self._harmless_modules.issuperset(sys.modules):
            return None
        for name in sys.modules.keys() - self._harmless_modules:
            if not self.libraries.loaded_without_harm(name):
                return f"{name.partition('.')[0]} is loaded in this kernel"
            self._harmless_modules.add(name)
        return None

    def _note_callbacks(self, steps: list[CodeStep]) -> None:
        self._callbacks = self._callbacks or any(map(self._may_give_callbacks, steps))

    def _may_give_callbacks(self, step: CodeStep) -> bool:
        """Return whether a statement gives functions to an object that does not show them, or runs
        unknown code.
        """
        return any(
            not CALLBACKS.isdisjoint(needs.words())
            or not RUNS_ANYTHING.isdisjoint(name for name, _ in needs.reads)
            or any(not self.libraries.is_known(module) for module in needs.imports)
            for needs in (step.now, step.later)
            if needs is not None
        )

    def _note_patches(self, step: CodeStep, names: CellNames) -> None:
        for needs in (step.now, step.later):
            for name, chain, attribute in needs.patches if needs is not None else ():
                for meaning in names.meanings(name):
                    if _is_of_library(already_there(meaning, chain), self.libraries):
                        self._patched.add(attribute)


class _Pass:
    """One pass over a cell, in one of the three modes. At its end it drops its references to the
    user's objects: it is part of a reference cycle, and objects that the cell deletes must be freed
    at once.
    """

    def __init__(
        self, analyzer: Analyzer, space: Mapping[str, Any], *, clean: bool, plain: bool = False
    ) -> None:
        self._transform = analyzer._transform
        self._note_callbacks = analyzer._note_callbacks
        self._space = space
        self._clean = clean
        self.names = CellNames(space)
        self.taint: Objection | None = None
        magic = Magics(self._body)
        if plain:
            self._checker: Checker = PlainChecker(analyzer.libraries, magic=magic)
        else:
            libraries, patched = analyzer.libraries, analyzer._patched
            self._checker = Checker(
                libraries,
                clean=clean,
                patched=patched,
                magic=magic,
                callbacks=analyzer._callbacks,
            )

    def __enter__(self) -> _Pass:
        return self

    def __exit__(self, *_: object) -> None:
        self._checker.forget()
        self.names.forget()

    def first_fault(self, steps: list[CodeStep]) -> tuple[int, Objection] | None:
        """Return index and reason of the first statement that may use the GPU.

        A clean pass goes on to the end: a fault further down must not be forgotten.
        """
        found: tuple[int, Objection] | None = None
        for index, step in enumerate(steps):
            fault = self._step(step)
            if fault is not None and fault.taints and self.taint is None:
                self.taint = fault
            if fault is not None and found is None:
                found = (index, fault)
            if found is not None and not self._clean:
                return found
        return found or self._display(steps)

    def _step(self, step: CodeStep) -> Objection | None:
        meanings = _bindings(step, self.names)
        for name in step.now.stores:
            self.names.may_bind(name, meanings.get(name, COMPUTED))
        fault = self._checker.check(step.now, self.names)
        if fault is None and step.later is not None:
            for name in step.later.stores:
                self.names.may_bind(name, COMPUTED)
            if self._clean:
                fault = self._checker.check(step.later, self.names)
        if (fault is None and step.simple) or step.later is not None:
            for name in step.now.stores:
                self.names.binds(name, meanings.get(name, COMPUTED))
        return fault

    def _display(self, steps: list[CodeStep]) -> tuple[int, Objection] | None:
        """Judge showing the last expression: it moves ``_`` to ``__`` to ``___``, which drops one
        reference.
        """
        shown_at = steps[-1].shown_at
        if shown_at is None:
            return None
        old = self._space.get("___")
        kept = self._space.get("Out")
        if type(kept) is dict and any(value is old for value in list(kept.values())):
            return None
        why = self._checker.dropped(old)
        if why is None:
            return None
        fault = Objection(shown_at, "___", f"its old value goes: {why}", taints=False)
        return len(steps) - 1, fault

    def _body(self, code: str, fresh: bool) -> Objection | None:
        """Judge code inside a magic; ``fresh``: a script with a namespace of its own."""
        tree = parse(code, self._transform)
        if tree is None:
            return Objection(0, code.strip()[:60], "it is not Python that Kiwi can read")
        outer = self.names
        if fresh:
            self.names = CellNames({})
        steps = [read(statement) for statement in tree.body]
        self._note_callbacks(steps)
        try:
            for step in steps:
                fault = self._step(step) or self._later(step)
                if fault is not None:
                    return fault
            bound = {name for step in steps for name in step.now.stores}
        finally:
            self.names = outer
        return self._into_notebook(bound) if fresh else None

    def _later(self, step: CodeStep) -> Objection | None:
        return None if step.later is None else self._checker.check(step.later, self.names)

    def _into_notebook(self, bound: set[str]) -> Objection | None:
        """Bind the script's names in the notebook, as ``%run`` copies them."""
        for name in bound:
            fault = self._checker.stored(name, self.names.old_value(name), 0)
            if fault is not None:
                return fault
            self.names.may_bind(name, COMPUTED)
        return None


def _bindings(step: CodeStep, names: CellNames) -> dict[str, Meaning]:
    """Return the known meanings of the names that a statement binds, if more than "computed" is
    known.
    """
    if step.later is not None:
        return {name: Defined(name, step.later) for name in step.now.stores}
    if step.alias is None:
        return step.imported
    target, name, chain = step.alias
    found = _existing(name, chain, names)
    return step.imported if found is None else {**step.imported, target: found}


def _existing(name: str, chain: Chain, names: CellNames) -> Existing | None:
    """Return the class or function that ``a`` or ``a.b`` is, if that can be seen without running
    it.
    """
    meanings = names.meanings(name)
    if len(meanings) != 1:
        return None
    value = already_there(meanings[0], chain)
    unknown = value is None or value is MISSING or type(value) is ModuleType
    return None if unknown else Existing(value)


def _is_of_library(value: object, libraries: Libraries) -> bool:
    """Return whether setting an attribute of ``value`` changes a library for everybody."""
    if type(value) is ModuleType:
        return libraries.is_cpu(value.__name__)
    if issubclass(type(value), type):
        return libraries.is_cpu(type.__getattribute__(value, "__module__"))
    return False
