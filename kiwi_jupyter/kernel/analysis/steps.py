"""Read the statements of a cell: the half of the analysis that depends on the text alone.

People run a cell again and again, with a changed line in between, so what was read from each
statement is kept. The meanings of names, whether modules are loaded, and the contents of ``%run``
files are looked up each time.
"""

from __future__ import annotations

import ast
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.analysis.from_ast import chain_of, needs_of, split_definition
from kiwi_jupyter.kernel.analysis.names import Imported
from kiwi_jupyter.kernel.analysis.scopes import imports_in

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.analysis.names import Meaning
    from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds

KEPT_MAX: Final = 640
"""Statements that are remembered: some hundred kilobytes in all."""

KEPT_STATEMENTS_MAX: Final = 100
"""Statements of a cell that is remembered. A longer one would push out most others."""

Source = tuple[str, int]
"""The text that a cell was parsed from, and the flags of the compiler."""

_SIMPLE: Final = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class CodeStep:
    """A top-level statement. It keeps no nodes, because other transformers change those in
    place.
    """

    now: CodeNeeds
    """What it reaches when it runs."""
    later: CodeNeeds | None
    """What using its definition reaches; ``None`` if it defines nothing."""
    simple: bool
    """True if it certainly binds its names."""
    imported: dict[str, Meaning]
    """The names that it imports."""
    alias: tuple[str, str, Chain] | None
    """For ``a = b.c``: a, b and the attributes read from b."""
    shown_at: int | None
    """The line of an expression: its value is shown if it comes last."""


class Reading:
    """The statements that were read lately. Not thread-safe, like ``Analyzer``."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], CodeStep] = OrderedDict()

    def steps(self, tree: ast.Module, source: Source | None) -> list[CodeStep]:
        """Return the statements of ``tree``. ``source`` is what it was parsed from, unchanged;
        ``None`` if that is not certain."""
        # Python breaks lines at "\r", too; with it, their numbers would not be those of split().
        if source is None or len(tree.body) > KEPT_STATEMENTS_MAX or "\r" in source[0]:
            return [read(statement) for statement in tree.body]
        text, flags = source
        lines = text.split("\n")
        return [self._step(statement, lines, flags) for statement in tree.body]

    def _step(self, statement: ast.stmt, lines: list[str], flags: int) -> CodeStep:
        """Read a statement, or find it: its lines and its place in them determine it."""
        place = (statement.lineno, statement.col_offset, statement.end_lineno)
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        first = min((each.lineno for each in decorators), default=statement.lineno)
        own = tuple(lines[first - 1 : statement.end_lineno])
        key = (own, place, statement.end_col_offset, flags)
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = read(statement)
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return known


def read(statement: ast.stmt) -> CodeStep:
    """Read one top-level statement."""
    split = split_definition(statement)
    now, later = split if split is not None else (needs_of([statement]), None)
    return CodeStep(
        now=now,
        later=later,
        simple=isinstance(statement, _SIMPLE),
        imported=_imported(statement) if now.imports else {},
        alias=_alias(statement),
        shown_at=statement.lineno if isinstance(statement, ast.Expr) else None,
    )


def _imported(statement: ast.stmt) -> dict[str, Meaning]:
    found = imports_in(ast.walk(statement))
    return {name: Imported(module, chain) for name, (module, chain) in found.items()}


def _alias(node: ast.stmt) -> tuple[str, str, Chain] | None:
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    value, chain = chain_of(node.value)
    if not isinstance(target, ast.Name) or not isinstance(value, ast.Name):
        return None
    return target.id, value.id, chain
